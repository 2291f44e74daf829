"""The start notebook as a person meets it: JupyterLab in a browser, Run All Cells, every picture on the page."""

import pytest

from .conftest import PICTURES, errors, go_dark, open_notebook, photograph, run_all

pytestmark = pytest.mark.browser

RUN_ALL_SECONDS = 400  # about 60 on two quiet cores; the browser itself takes its share


def test_run_all_cells_and_look(lab, page):
    open_notebook(page, lab.url("00_start_here.ipynb"))
    page.screenshot(path=PICTURES / "start-notebook-opened.png")

    run_all(page)
    outputs = page.locator(".jp-OutputArea-output")
    error = errors(page)
    last = outputs.filter(has_text="Measured on:")
    try:
        last.or_(error).first.wait_for(timeout=1000 * RUN_ALL_SECONDS)
    finally:
        photograph(page, "start-notebook-light.png")

    assert error.all_inner_texts() == []
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts() == []
    assert outputs.filter(has_text="identical to plain decoding? yes").count() == 1
    assert outputs.filter(has_text="guessed by the draft, accepted").count() >= 1
    trees = outputs.locator("svg[role=img]")
    assert [tree.locator("rect").count() for tree in trees.all()] == [1, 1], "two trees with one root each"
    fates = " ".join(trees.last.locator("title").all_text_contents())
    for why in ("below τ", "parent too uncertain", "over budget", "too deep"):  # the toy's tree shows every reason
        assert f"pruned: {why}" in fates
    assert page.locator("table.comparison tbody tr").count() == 5
    plots = page.locator(".js-plotly-plot")
    assert plots.count() == 2
    assert plots.filter(has_text="Which tree pays on this machine?").locator(".bars .point").count() == 5

    go_dark(page)
    photograph(page, "start-notebook-dark.png")
