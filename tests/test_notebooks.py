"""Notebooks are stored clean, run from top to bottom, and say what they promise to say."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 60_000
# what must stand in the printed outputs, per notebook
PROMISES = {
    "00_start_here.ipynb": [
        "identical to plain decoding? yes",
        "identical to transformers' generate? yes",
        "All texts were identical.",
        "You guessed",
    ],
    "06_the_explorer.ipynb": ["1 + accepted:", "best τ of these:", "Judged on this recording"],
    "01_why_guess.ipynb": [
        "formula 2.383, 200,000 drawn chains 2.38",
        "Judged: the rule is as quoted;",
        "Judged: 'breaks the shackles'",
        "You guessed 4 for the measured costs.",
    ],
    "02_topology_explosion.ipynb": [
        "formula = nodes grown, for 16 shapes; 4×3: 120  4×4: 340",
        "5 levels of 4: 1364; you guessed 500",
        "one token 24.5 ms (the article measured 24.5), n* = 134 tokens",
        "if reading and arithmetic overlap: 25% of the A100's peak",
        "as the package's own replay says",
    ],
    "03_from_tree_to_mask.ipynb": [
        "'off' is at position 103; you guessed 108",
        "26 of 81 pairs are visible; a plain causal mask would show 45",
        "wrong scores at 0% of the nodes, another first choice at 0%",
        "(a) positions by slot        wrong scores at 78% of the nodes, another first choice at 33%",
        "4×4: 1024 tokens instead of 340",
        "kept slots [0, 2, 5, 8]",
    ],
    "04_the_pruner.ipynb": [
        "no child is likelier than its parent",
        "enumerated 3.1816659 tokens per step, 1 + ΣP over the kept nodes = 3.1816659",
        "2.0 bits at depth 3: 3 children; you guessed 2",
        "As published, the pruner gives up at the root in",
    ],
    "05_lossless.ipynb": [
        "throughput   identical to transformers' generate: yes",
        "traversal with dynamic: refused.",
        "coupled  the same text under plain, linear and uniform? yes",
        "The biased rule is caught at",
    ],
    "07_strategies_compared.ipynb": [
        "one draft forward: at least 3.15 ms = 6.42 GB over 2.04 TB/s",
        "NOT possible",
        "claimed order:    D > C > A > B",
        "order, one GPU:   D > C > B > A",
        "'D is the best': {'this machine (CPU)':",
        "You said D at the measured costs; it is",
    ],
    "08_what_is_optimal.ipynb": [
        "for every size the best tree is the most probable nodes",
        "Calibration error",
        "Judged: 'the core weapon'",
        "of the hindsight bound",
    ],
    "09_your_own_models.ipynb": [
        "replayed steps equal the live ones, token for token and node for node? yes",
        "recommended:",
        "tokens per step: predicted",
        "--- sglang",
        "temporary files removed",
    ],
    "11_write_your_own_pruner.ipynb": [
        "Overdrawn: NOT SOUND: the budget holds",
        "Contrarian: NOT SOUND: the likelier of two siblings is kept first",
        "Forgetful: NOT SOUND:",
        "you guessed 0.95; it is",
    ],
    "10_several_gpus.ipynb": [
        "formula 327,680, counted 327,680",
        "identical? yes",
        "cannot be divided among 3 processes",
        "you guessed",
    ],
}
# outputs of these kinds, at least so many
PICTURES = {
    "00_start_here.ipynb": {
        "<svg": 2,
        "vnd.plotly": 2,
        "<table": 1,
        "pruned: below τ": 2,
        "pruned: parent too uncertain": 1,
        "pruned: over budget": 1,
        "pruned: too deep": 1,
    },
    "06_the_explorer.ipynb": {"vnd.plotly": 1, "widget-view+json": 1, "<table": 1},
    "01_why_guess.ipynb": {"vnd.plotly": 7},
    "02_topology_explosion.ipynb": {"vnd.plotly": 6, "<svg": 1},
    "03_from_tree_to_mask.ipynb": {"vnd.plotly": 4, "<svg": 1, "widget-view": 1},
    "04_the_pruner.ipynb": {"vnd.plotly": 6, "<svg": 2, "pruned: too deep": 1},
    "05_lossless.ipynb": {"vnd.plotly": 3, "widget-view": 1},
    "07_strategies_compared.ipynb": {"vnd.plotly": 6, "treespec-article": 3},
    "08_what_is_optimal.ipynb": {"vnd.plotly": 8, "<svg": 1},
    "09_your_own_models.ipynb": {"vnd.plotly": 3},
    "11_write_your_own_pruner.ipynb": {"vnd.plotly": 2, "✓ pass": 1},
    "10_several_gpus.ipynb": {"vnd.plotly": 1, "target weights": 4, "It does not fit": 1},
}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_are_notebooks_and_each_promise_is_of_one():
    assert {path.name for path in NOTEBOOKS} >= PROMISES.keys() | PICTURES.keys()


@each
def test_stored_small_and_without_outputs(path):
    assert path.stat().st_size < MOST_BYTES
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    assert [cell.id for cell in code_cells(book) if cell.outputs or cell.execution_count is not None] == []


IN_BROWSER = {"00_start_here.ipynb": "test_start_notebook.py", "06_the_explorer.ipynb": "test_explorer.py"}


@each
@pytest.mark.slow
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    if path.name in IN_BROWSER and shutil.which("chromium"):
        pytest.skip(f"tests/browser/{IN_BROWSER[path.name]} runs it in JupyterLab")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # threads that spin while they wait make everything several times slower as soon as the cores are shared
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    # no kernel of the user's: "python3" is then this interpreter's own
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    before = set(os.listdir(FOLDER))
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()

    outputs = [output for cell in code_cells(book) for output in cell.outputs]
    streams = [output for output in outputs if output.output_type == "stream"]
    assert [output.text for output in streams if output.name == "stderr"] == []
    printed = "".join(output.text for output in streams)
    assert [promise for promise in PROMISES.get(path.name, []) if promise not in printed] == []
    data = [f"{kind} {text}" for output in outputs for kind, text in output.get("data", {}).items()]
    for mark, least in PICTURES.get(path.name, {}).items():
        assert sum(mark in text for text in data) >= least, f"too few outputs with {mark}"
    assert set(os.listdir(FOLDER)) == before, "the notebook left files behind"
