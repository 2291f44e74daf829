"""The report: its numbers are the library's, its text is escaped, its scripts are locked down, its commands work."""

import base64
import dataclasses
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from drafts import of_the_toy
from test_cli import run

from treespec.cost import CostCurve, load_cost
from treespec.errors import InputError
from treespec.page import Table
from treespec.policies import parse_policy
from treespec.prompts import Prompt
from treespec.provenance import not_measured, record_command, recorded
from treespec.report import report, verdict
from treespec.report_figures import chosen_steps, shown_policy
from treespec.scoring import priced
from treespec.table import article_table, cells
from treespec.trace import Trace, replay
from treespec.tune import tune

pytestmark = pytest.mark.thorough

SCRIPT = "</script><script>alert('x')</script>"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    'a" onmouseover="alert(2)',
    "\u202eevil\u202c & <b>",
    SCRIPT,
    "p-five",
    "$x_1$ {{ 7*7 }}",
]
TEXTS = ["the cat sat", "a dog ran on", "the tree", "mat under a", "dog sat on the mat", "a cat"]
COST = CostCurve((1.0, 7.0, 8.0, 64.0), (0.01, 0.0101, 0.04, 0.4), (1.0, 64.0), (1e-4, 2e-4), name="planted")
SETTINGS = 24
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, tables, data blocks, text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.tables, self.text, self.open = [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]
        if tag == "script":
            self.scripts.append([dict(attrs), ""])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1][1] += data
        elif inside in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if inside not in ("script", "style"):
            self.text += data


class Nasty:
    """A tokenizer whose every token is an attack."""

    def decode(self, tokens, **_):
        return "".join(HOSTILE[t % len(HOSTILE)] for t in tokens)


@pytest.fixture(scope="module", autouse=True)
def few_rivals():
    """Half of the table's grid: every size of it is replayed in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treespec.table.SIZES", (4, 16))
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    prompts = [Prompt(name, HOSTILE[(i + 1) % 6], [text]) for i, (name, text) in enumerate(zip(HOSTILE, TEXTS))]
    return of_the_toy(path, prompts)


@pytest.fixture(scope="module")
def written(trace, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "review.html"
    question = f"Ship it? {SCRIPT}"
    result = report(trace, out, COST, question=question, settings=SETTINGS, tokenizer=Nasty())
    return result, out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(written):
    return Page(written[1])


def test_the_recommendation_is_the_tuners(written, page, trace):
    result, _ = written
    found = tune(trace, COST, settings=SETTINGS)
    best, held = found.recommended, found.recommended["held_out"]
    assert (result["recommended"], result["held_out"]) == (best["policy"], held)
    low, high = held["speedup_ci"]
    assert f"Use {best['policy']}: {held['speedup']:.2f}× plain decoding (95 %: {low:.2f} to {high:.2f})" in page.text
    assert "3 held-out prompts" in page.text
    own = next(t for t in page.tables if t[0][0] == "best setting of each policy")
    assert {row[0] for row in own[1:]} == {row["policy"] for row in found.by_policy.values()}


def test_the_table_is_the_articles(page, trace):
    rows = article_table(trace, COST)["rows"]
    assert [list(cells(row).values()) for row in rows] in [table[1:] for table in page.tables]


def test_every_figure_has_its_twin_in_text(page):
    places = [a["data-figure"] for _, a in page.elements if "data-figure" in a]
    assert places[:4] == [f"figure-{name}" for name in ("frontier", "time", "curve", "entropy")] and len(places) >= 6
    blocks = {a["id"]: json.loads(text) for a, text in page.scripts if a.get("type") == "application/json"}
    assert set(blocks) == set(places) and all(block["data"] for block in blocks.values())
    folded = [e for e in page.elements if e[0] in ("details", "table")]
    assert [tag for tag, _ in folded].count("details") == len(places)
    assert len(page.tables) == len(places) + 2 and all(len(table) > 1 for table in page.tables)
    kept = [row for table in page.tables if table[0][0] == "node" for row in table[1:]]
    assert {row[-1] for row in kept} >= {"root", "accepted", "verified"}


def test_the_trees_are_those_that_the_replay_verified(written, page, trace):
    review = SimpleNamespace(best={"policy": written[0]["recommended"]}, cost=priced(COST, trace))
    assert shown_policy(review).spec() == written[0]["recommended"]
    steps = replay(trace, shown_policy(review), review.cost)
    drawn = [table[1:] for table in page.tables if table[0][0] == "node"]
    chosen = chosen_steps(steps)
    assert len(drawn) == len(chosen) >= 2
    for step, rows in zip(chosen, drawn):
        fates = [row[-1] for row in rows]
        assert fates.count("accepted") == int(steps.grown.accepted[step])
        assert fates.count("accepted") + fates.count("verified") + 1 == int(steps.grown.nodes[step])


def test_no_two_things_have_one_name(page):
    names = [a["id"] for _, a in page.elements if "id" in a]
    assert len(names) > 15 and len(set(names)) == len(names)


def test_headings_are_questions_and_the_contents_lead_to_them(page, written):
    heads = re.findall(r"<h2 id=[^>]*>(.*?)</h2>", written[1])
    assert len(heads) == 10 and all(head.endswith("?") for head in heads)
    links = [a["href"] for tag, a in page.elements if tag == "a"]
    assert links == [f"#{a['id']}" for tag, a in page.elements if tag == "section"]


def test_nothing_is_loaded_and_only_its_own_scripts_may_run(page):
    for tag, attributes in page.elements:
        assert tag not in ("img", "link", "iframe", "object", "base", "form", "svg"), tag
        assert not {"src", "srcset", "action", "data", "background", "poster"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes), attributes
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0] and "unsafe-eval" not in policy
    runs = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runs]
    assert len(runs) == 2 and re.findall(r"'sha256-([^']+)'", policy) == hashes
    style = [tag for tag, _ in page.elements].count("style")
    assert style == 1 and [t for t, a in page.elements if a.get("http-equiv")] == ["meta"]


def test_hostile_text_is_shown_and_never_markup(page, written):
    for text in (SCRIPT, HOSTILE[0], HOSTILE[1], "\u202eevil\u202c & <b>"):
        assert text in page.text, "shown as it is"
        assert f">{text}" not in written[1] if "<" in text else True
    assert not page.open, "all that is opened is closed"
    bodies = [text for a, text in page.scripts if a.get("type") == "application/json"]
    assert not any("<" in body or ">" in body for body in bodies)
    drawn = json.dumps([json.loads(body) for body in bodies], ensure_ascii=False)
    assert "<img" not in drawn and "<script" not in drawn, "plotly reads some HTML too"


def test_half_a_surrogate_pair_does_not_break_the_page(trace, tmp_path):
    broken = dataclasses.replace(trace, about={**trace.about, "target": "\ud800<i>", "versions": {"\udfff": "1"}})
    broken.prompts = [dataclasses.replace(p, id="\udc80" + p.id) for p in trace.prompts]
    report(broken, tmp_path / "r.html", COST, policies="linear", settings=2)
    text = (tmp_path / "r.html").read_bytes().decode("utf-8")
    assert "?&lt;i&gt;" in text


def test_it_replaces_nothing_unasked_and_leaves_nothing_half_written(trace, tmp_path, monkeypatch):
    out = tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(InputError, match="--force"):
        report(trace, out, COST, settings=2)
    monkeypatch.setattr("treespec.report.render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report(trace, out, COST, policies="linear", settings=2, force=True)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]


def test_it_says_when_not_to_speculate(trace, tmp_path):
    dear = CostCurve((1.0, 9.0), (0.01, 0.2), (1.0,), (0.02,))
    report(trace, tmp_path / "r.html", dear, settings=20)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "Do not speculate: at the cost of curve" in page.text
    assert "Steps of dynamic" in page.text, "trees of the article's pruner, to see why"


@pytest.mark.parametrize("mine,word", [(1.404, "as much as"), (1.42, "more than"), (1.3, "less than")])
def test_a_tree_is_set_beside_the_best_chain(mine, word):
    held = {"speedup": mine, "speedup_ci": [1.1, 1.9]}
    tuning = SimpleNamespace(
        recommended={"policy": "dynamic", "held_out": held}, by_policy={"linear": {"policy": "linear:gamma=2", "held_out": 1.4}}
    )  # fmt: skip
    review = SimpleNamespace(tuning=tuning, best=tuning.recommended, cost=SimpleNamespace(context=9.0, batch=1))
    assert f"That is {word} the best chain, linear:gamma=2, gives on the same prompts: 1.40×." in verdict(review)
    held["speedup_ci"] = [0.9, 1.9]
    assert "do not tell it apart from plain decoding" in verdict(review)
    held["speedup"] = 0.8
    assert verdict(review).startswith("Do not rely on dynamic")


def test_columns_of_figures_are_told_from_words():
    table = Table(("a", "b", "c", "d"), [("1", "2.0×", "x", ""), ("2", "–", "3", "4")])
    assert table.sides == ["words", "figures", "words", "figures"]


def test_the_chosen_steps_show_what_they_are_said_to(trace):
    steps = replay(trace, "dynamic:tau=0.01,high=9,low=1", COST)
    chosen = chosen_steps(steps)
    accepted = steps.grown.accepted.numpy()
    by_word = {word: step for step, word in chosen.items()}
    assert accepted[by_word["A step that went well"]] == accepted.max()
    if "A wasted step" in by_word:
        assert accepted[by_word["A wasted step"]] == 0
    assert len(set(chosen)) == len(chosen) and all(steps.grown.nodes[step] > 1 for step in chosen)


def test_what_was_not_measured_is_read_off_the_files(trace):
    found = tune(trace, COST, "linear", settings=2).as_dict()
    rows = article_table(trace, COST)["rows"]
    said = " ".join(not_measured(trace, priced(COST, trace), rows, found))
    assert "No speed-up on this page was timed" in said and "Only 3 prompts were held out" in said
    assert "Only greedy text was recorded" in said and "Neither file names the machine" in said
    assert ("B uniform 4×3" in said) == any(r["extrapolated"] for r in rows)
    assert "A batch of 4 is priced" in " ".join(not_measured(trace, priced(COST, trace, batch=4), rows, found))
    article = load_cost("article")
    said = not_measured(trace, priced(article, trace), [{**r, "extrapolated": False} for r in rows], found)
    assert any("Not measured here" in sentence for sentence in said)


def test_a_measured_curve_of_another_model_is_named(trace, tmp_path):
    path = tmp_path / "here.json"
    point = {"rows": 1, "seconds": 0.01}
    COST.save(
        path, target="other", dtype="float32", machine={"device": "a box"}, points={"verify": [point], "draft": []}
    )
    model = load_cost(str(path))
    found = tune(trace, model, "linear", settings=2).as_dict()
    said = " ".join(not_measured(trace, priced(model, trace), article_table(trace, model)["rows"], found))
    assert "measured with target other, the trace was recorded with toy" in said
    assert "dtype" not in said and "machine" not in said and "no single measurements" not in said
    report(trace, tmp_path / "r.html", str(path), policies="linear", settings=2)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    curve = next(table for table in page.tables if table[0] == ["forward", "rows", "ms", "source"])
    assert curve[1] == ["target", "1", "10.00", "measured"] and curve[2][3] == "given, without a timing"
    assert "device a box" in page.text


def test_the_recording_is_described(trace):
    told = recorded(trace)
    assert (
        told["target"] == "toy, float32"
        and told["prompts"].startswith("6: 1 ")
        and "128 most probable" in told["supertrees"]
    )


def test_the_recording_command_records_the_same_again(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = ("record", "--out", "t.parquet", "--target", "toy", "--draft", "model", "--limit", "3", "--max-new-tokens", "9",
             "--sample", "coupled", "--temperature", "0.7", "--seed", "5", "--nodes", "20", "--narrow", "4")  # fmt: skip
    assert run(capsys, monkeypatch, *first)[0] == 0
    one = Trace.load("t.parquet")
    line, said = record_command(one)
    assert said == [] and "--limit 3" in line
    (tmp_path / "t.parquet").rename(tmp_path / "old.parquet")
    assert run(capsys, monkeypatch, *shlex.split(line)[1:])[0] == 0
    two = Trace.load("t.parquet")
    assert two.about == one.about and two.prompts == one.prompts
    assert all(np.array_equal(two.nodes[name], one.nodes[name], equal_nan=name == "entropy") for name in one.nodes)


def test_foreign_prompts_and_recordings_from_python_are_said_to_be_so(trace):
    line, said = record_command(trace)
    assert "--prompts YOUR_PROMPTS.jsonl" in line and "--draft" not in line
    assert trace.about["asked"] in said[0] and "recorded from Python" in said[1]


def test_the_command(capsys, monkeypatch, trace, tmp_path):
    out = tmp_path / "r.html"
    cost = "1:10 7:10.1 8:40 64:400; draft 1:0.1 64:0.2"
    command = ("report", trace.path, "-o", str(out), "--cost", cost, "--policy", "bestfirst,linear", "--settings", "8")
    code, text, err = run(capsys, monkeypatch, *command, "--question", "Now?", "--json")
    told = json.loads(text)
    assert code == 0 and told["bytes"] == out.stat().st_size > 4_000_000 and told["positions"] == len(trace)
    page = Page(out.read_text(encoding="utf-8"))
    again = next(line for line in page.text.splitlines() if line.startswith("treespec report"))
    for word in ("--cost", cost, "bestfirst,linear", "--settings", "8", "--question", "Now?"):
        assert word in shlex.split(again)
    assert ("title", {}) in page.elements and "Now?" in page.text
    before = out.read_bytes()
    for arguments, wrong in (
        (command, "--force"),
        (("report", str(tmp_path / "no.parquet"), "-o", str(tmp_path / "x.html")), "no.parquet"),
        (("report", trace.path, "-o", str(tmp_path / "x.pdf")), ".html"),
        (("report", trace.path, "-o", str(tmp_path / "no" / "x.html")), "no folder"),
        (("report", trace.path, "-o", str(tmp_path / "x.html"), "--policy", "best"), "unknown policy"),
        (("report", trace.path, "-o", str(tmp_path / "x.html"), "--cost", "z9:8b"), "unknown GPU"),
    ):
        code, text, err = run(capsys, monkeypatch, *arguments)
        assert code == 2 and text == "" and wrong in err and len(err.strip().splitlines()) == 1
    assert out.read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {"r.html"}
    code, text, _ = run(capsys, monkeypatch, *command, "--force")
    assert code == 0 and parse_policy(told["recommended"]).spec() in text and "held-out" in text
