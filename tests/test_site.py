"""Static pages of notebooks: one plotly.js for all, figures as data, live controls as notes, everything escaped."""

import json
import re

import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from benchmarks.site import DRAW, PLOTLY, SCRIPT, WIDGET, api, build, index, page, title

pytestmark = pytest.mark.thorough

HOSTILE = "</script><img src=x onerror=alert(1)>"


def widgets(**models):
    state = {name: {"model_name": kind, "state": {"children": children}} for name, (kind, children) in models.items()}
    return {"widgets": {"application/vnd.jupyter.widget-state+json": {"state": state}}}


def shown(data):
    return [new_output("display_data", data)]


@pytest.fixture
def book():
    figure = json.loads(go.Figure(go.Scatter(y=[1, 3, 2]), layout={"title": HOSTILE, "height": 321}).to_json())
    control, bar = ({WIDGET: {"model_id": name}, "text/plain": "VBox(children=…)"} for name in ("box", "bar"))
    return new_notebook(
        cells=[
            new_markdown_cell("# Is it <true>?\n\nYou can decide **whether** it `is`.\n\nMore: $\\sum x$"),
            new_code_cell("figure()", outputs=shown({PLOTLY: figure}), metadata={"jupyter": {"source_hidden": True}}),
            new_code_cell("print(6 * 7)", outputs=[new_output("stream", text="42\n")]),
            new_code_cell("explore()", outputs=shown(control)),
            new_code_cell("progress()", outputs=shown(bar)),
        ],
        metadata=widgets(
            box=("VBoxModel", ["IPY_MODEL_slider"]), slider=("FloatSliderModel", []),
            bar=("HBoxModel", ["IPY_MODEL_inner"]), inner=("FloatProgressModel", []),
        ),
    )  # fmt: skip


def test_a_page_draws_with_the_shared_script(book):
    text = page(book, "x.ipynb")
    assert len(text) < 600_000, "plotly.js alone is 4.8 MB"
    assert text.count(f'<script src="{SCRIPT}"></script>') == 1 and text.count(DRAW) == 1
    figure = re.search(
        r'<div data-plotly="" style="height:321px"></div><script type="application/json">(.*?)</script>', text
    )
    assert json.loads(figure[1])["layout"]["title"]["text"] == HOSTILE
    assert HOSTILE not in text
    assert "require" not in re.sub(r"<style.*?</style>|<script>.*?</script>", "", text, flags=re.S)
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', text)
    assert [url.partition("?")[0].rsplit("/", 1)[1] for url in loaded] == ["latest.js"], "MathJax and nothing else"


def test_code_that_only_draws_is_left_out_and_other_code_is_not(book):
    text = re.sub(r"<[^>]+>", "", page(book, "x.ipynb"))
    assert "print" in text and "42" in text and "figure()" not in text


def test_a_live_control_becomes_a_note_and_a_progress_bar_nothing(book):
    text = page(book, "06 <x>.ipynb")
    assert text.count("A live control stands here.") == 1 and "06 &lt;x&gt;.ipynb" in text
    assert "VBox(children" not in text and "jupyter-widgets" not in text


def test_the_index_lists_questions_in_plain_text(book):
    assert title(book) == ("Is it <true>?", "You can decide whether it is.")
    text = index({"00_a": book})
    assert '<a href="00_a.html">Is it &lt;true&gt;?</a><p>You can decide whether it is.</p>' in text


def test_a_notebook_that_fails_keeps_its_old_page(tmp_path, monkeypatch, capsys):
    """Executed for real: one cell that works, and one notebook whose cell raises."""
    import nbformat

    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PLOTLY_RENDERER", "")  # restored afterwards: build sets it
    folder, out = tmp_path / "notebooks", tmp_path / "site"
    folder.mkdir()
    out.mkdir()
    (out / "1_bad.html").write_text("old")
    for name, source in (("0_good", "print(2 + 2)"), ("1_bad", "1 / 0")):
        cells = [new_markdown_cell(f"# {name}?"), new_code_cell(source)]
        nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    assert build(folder, out, timeout=60) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (out / "1_bad.html").read_text() == "old" and "4" in (out / "0_good.html").read_text()
    assert "0_good.html" in (out / "index.html").read_text() and (out / SCRIPT).stat().st_size > 4_000_000


def test_the_api_is_made_of_the_docstrings(tmp_path):
    api(tmp_path, "treespec.tree")
    text = re.sub(r"<[^>]+>", "", (tmp_path / "treespec" / "tree.html").read_text())
    assert "TokenTree" in text and "Arguments:" in text
    assert "A tree of candidate tokens under the root." in " ".join(text.split())
