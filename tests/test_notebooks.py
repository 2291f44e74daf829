"""Notebooks are stored clean, run from top to bottom, and say what they promise to say."""

import os
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


@each
@pytest.mark.slow
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
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
