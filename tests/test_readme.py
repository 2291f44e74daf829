"""The README's twin in Chinese says the same: the same commands, the same headings, the same figures."""

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
GLOSSARY = "## 文章术语对照"  # the one section that only the twin has


def text(name):
    return (REPO / name).read_text(encoding="utf-8")


def twin():
    """The Chinese README without its glossary."""
    before, heading, glossary = text("README.zh-CN.md").partition(GLOSSARY)
    assert heading and "## " not in glossary, "the glossary is the last section"
    return before


def code(markdown):
    return re.findall(r"^```(\w+)\n(.*?)^```", markdown, re.S | re.M)


def prose(markdown):
    return re.sub(r"^```\w+\n.*?^```", "", markdown, flags=re.S | re.M)


def headings(markdown):
    return [line.partition(" ")[0] for line in prose(markdown).splitlines() if re.match(r"#+ ", line)]


def tables(markdown):
    """Rows by table, each a list of cells."""
    out, inside = [], False
    for line in prose(markdown).splitlines():
        if line.startswith("|"):
            out += [] if inside else [[]]
            out[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return out


def numbers(text):
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_code_blocks_are_identical():
    assert code(twin()) == code(text("README.md")) != []


def test_there_are_as_many_headings_of_each_level():
    assert headings(twin()) == headings(text("README.md"))


def test_tables_have_the_same_rows_and_the_same_numbers():
    ours, theirs = tables(text("README.md")), tables(twin())
    assert [[len(row) for row in table] for table in theirs] == [[len(row) for row in table] for table in ours]
    for mine, other in zip(ours, theirs):
        for one, two in zip(mine, other):
            assert numbers(" ".join(two)) == numbers(" ".join(one)), one[0]


def test_inline_code_and_links_are_the_same():
    def inline(markdown):
        return sorted(re.findall(r"`([^`\n]+)`", " ".join(prose(markdown).split())))

    ours, theirs = inline(text("README.md")), inline(twin())
    assert [c for c in ours if ours.count(c) > theirs.count(c)] == [], "missing in the twin"
    assert [c for c in theirs if theirs.count(c) > ours.count(c)] == [], "only in the twin"

    def links(markdown):
        return sorted(set(re.findall(r"\]\(([^)#]+)\)", markdown)) - {"README.md", "README.zh-CN.md"})

    assert links(twin()) == links(text("README.md")) != []
    assert "](README.md)" in twin() and "](README.zh-CN.md)" in text("README.md"), "each names the other"
