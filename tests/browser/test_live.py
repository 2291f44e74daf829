"""Live decoder, mask view and lossless lab as a person meets them, driven by mouse and keyboard in a real JupyterLab."""

import itertools
import re

import pytest

from .conftest import PATIENCE, PICTURES, errors, go_dark, open_notebook, photograph, run_all

pytestmark = pytest.mark.browser

WAIT = 240_000  # milliseconds; decoding shares two cores with the browser
NARROW = 700

LIVE = """
from treespec import load_pair
from treespec.widgets import LiveDecoder
pair = load_pair("toy", "model")
live = LiveDecoder(pair, prompt="the cat", policy="dynamic:tau=0.1,high=9,budget=9")
live
"""
SLOW = """
import functools
import time

def slow(model, seconds=0.05):
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        time.sleep(seconds)
        return inner(*args, **kwargs)

    model.forward = forward
"""
MASK = """
from treespec.widgets import MaskView
step = next(e for e in pair.generate("the cat", policy="uniform:depth=3,width=2", max_new_tokens=20).steps if len(e.path) > 1)
mask = MaskView(step)
mask
"""
LAB = """
from treespec.widgets import LosslessLab
lab = LosslessLab()
lab
"""
PLAN = """
import treespec
from treespec.widgets import PlacementView
view = PlacementView(treespec.plan("llama-3.1-70b", "llama-3.2-3b", "4x80GB"))
view
"""
TURN = itertools.count()


def ask(page, expression):
    """What a Python expression is in the notebook's kernel: the last cell, written anew, prints it."""
    turn = f"answer {next(TURN)}:"
    last = page.locator(".jp-Notebook-cell.jp-CodeCell").last
    last.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.type(f'print("{turn}", {expression})')
    page.keyboard.press("Control+Enter")
    out = last.locator(".jp-OutputArea-output").filter(has_text=turn)
    out.wait_for(timeout=PATIENCE)
    return out.inner_text().removeprefix(turn).strip()


@pytest.fixture
def notebook(lab, page):
    def opened(name, *cells):
        open_notebook(page, lab.add(name, [*cells, "print('ready')"]))
        run_all(page)
        page.locator(".jp-OutputArea-output").filter(has_text="ready").wait_for(timeout=WAIT)
        assert errors(page).all_inner_texts() == []
        return page

    return opened


def mark(node):
    """What is drawn of a node, above its label."""
    return node.locator("circle, rect, path, text").first


def button(page, name):
    return page.locator("button.jupyter-button").filter(has_text=re.compile(f"^\\s*{name}\\s*$"))


def test_a_live_decode_runs_streams_and_stops(notebook):
    page = notebook("live.ipynb", LIVE, SLOW)
    button(page, "Run").click()
    page.get_by_text("Output identical to plain decoding:").wait_for(timeout=WAIT)
    assert "yes, every token id" in page.locator(".jp-OutputArea-output").first.inner_text()
    tokens = page.locator("span[title*=': accepted'], span[title*=': bonus'], span[title*=': plain']")
    assert tokens.count() == 64 == int(ask(page, "len(live.written.tokens)"))
    assert page.locator("span[title*=': accepted']").count() == int(ask(page, "live.written.count('accepted')"))
    assert page.locator(".js-plotly-plot .bars .point").count() == 4 * int(ask(page, "len(live.events) - 1"))
    photograph(page, "live-light.png")

    slider = page.locator(".widget-slider .noUi-handle")
    step = slider.nth(slider.count() - 1)  # the step slider comes last
    step.focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_text("Step 3, verified:").wait_for(timeout=PATIENCE)
    button(page, "pruned").click()
    page.get_by_text("Step 3, pruned:").wait_for(timeout=PATIENCE)
    button(page, "grown").click()
    page.get_by_text("Step 3, grown:").wait_for(timeout=PATIENCE)
    assert ask(page, "live.steps.frame") == "9"

    ask(page, "(slow(pair.target), setattr(live.new_tokens, 'value', 512))")
    button(page, "Run").click()
    spans = "document.querySelectorAll(\"span[title^='step ']\").length"
    page.wait_for_function(f"{spans} < 20", timeout=WAIT)  # the first run's 64 are gone
    page.wait_for_function(f"{spans} > 20", timeout=WAIT)
    button(page, "Stop").click()
    page.get_by_text("stopped:").wait_for(timeout=WAIT)
    assert 20 < int(ask(page, "len(live.written.tokens)")) < 512
    assert ask(page, "pair.generate('the cat', policy='plain', max_new_tokens=3).tokens") == ask(
        page, "pair.generate('the cat', policy='linear', max_new_tokens=3).tokens"
    )


def test_errors_show_in_the_widget_and_a_rerun_stacks_nothing(notebook):
    page = notebook("errors.ipynb", LIVE)
    box = page.locator("textarea").first
    box.fill("   ")
    button(page, "Run").click()
    page.locator("[role=alert]").filter(has_text="the prompt is empty; give some text").wait_for(timeout=PATIENCE)
    ask(page, "setattr(live, '_read', lambda: [][1])")
    button(page, "Run").click()
    alert = page.locator("[role=alert]").filter(has_text="IndexError: list index out of range")
    alert.wait_for(timeout=PATIENCE)
    assert alert.locator("details").count() == 1
    page.screenshot(path=PICTURES / "live-error.png")

    before = int(ask(page, "len(__import__('ipywidgets').widgets.widget._instances)"))
    page.locator(".jp-Notebook-cell.jp-CodeCell").first.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(3000)
    assert int(ask(page, "len(__import__('ipywidgets').widgets.widget._instances)")) == before


def test_pointing_at_a_node_lights_its_row_and_keys_choose(notebook):
    page = notebook("mask.ipynb", LIVE.split("live =")[0], MASK)
    nodes, rows = page.locator(".treespec-mask .tree svg > g"), page.locator(".treespec-mask g.row")
    count = int(ask(page, "len(mask.tree)"))
    assert rows.count() == count and nodes.count() == count
    photograph(page, "mask-light.png")

    mark(nodes.nth(4)).hover()
    page.locator(".treespec-mask g.row.lit[data-node='4']").wait_for(timeout=PATIENCE)
    assert page.locator(".treespec-mask .said").inner_text() == ask(page, "mask.canvas.said[4]")
    page.screenshot(path=PICTURES / "mask-hover.png")
    rows.nth(2).hover()
    page.wait_for_function("document.querySelectorAll('.treespec-mask .tree g.lit').length === 1", timeout=PATIENCE)
    assert [i for i, node in enumerate(nodes.all()) if "lit" in (node.get_attribute("class") or "")] == [2]

    page.mouse.move(5, 5)
    page.locator(".treespec-mask .pictures").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    chosen = int(ask(page, "mask.tree.parent.tolist().index(1)"))  # down, down: node 1; right: its first child
    assert int(ask(page, "mask.selected")) == chosen
    assert rows.nth(chosen).get_attribute("class") == "row lit"
    ask(page, "setattr(mask, 'selected', 3)")
    page.locator(".treespec-mask g.row.lit[data-node='3']").wait_for(timeout=PATIENCE)


def test_sound_rules_meet_the_law_and_the_biased_one_is_found_out(notebook):
    page = notebook("lossless.ipynb", LAB)
    button(page, "Draw").click()
    page.get_by_text("500 texts per side: no difference to be seen").wait_for(timeout=WAIT)
    assert int(ask(page, "lab.tally.samples")) == 500
    photograph(page, "lossless-match-light.png")
    page.locator(".jp-OutputArea-output select").first.select_option(
        label="biased: deliberately wrong: p/q tests of children that were not drawn"
    )
    page.get_by_text("nothing drawn yet").wait_for(timeout=PATIENCE)
    button(page, "Draw").click()
    page.get_by_text("the rule is biased").wait_for(timeout=WAIT)
    photograph(page, "lossless-biased-light.png")
    photograph(page, "lossless-narrow.png", NARROW)


def test_a_device_is_pointed_out_by_a_click_or_by_name(notebook):
    page = notebook("plan.ipynb", PLAN)
    layers = "i => Array.from(document.querySelectorAll('.js-plotly-plot')[1].data, bars => bars.opacity ?? 1)[i]"
    page.locator(".js-plotly-plot").nth(1).locator(".bars .point").first.wait_for(state="attached", timeout=PATIENCE)
    assert [page.evaluate(layers, i) for i in range(4)] == [1, 1, 1, 1]
    page.wait_for_timeout(1000)  # it fits itself to the page
    box = page.locator(".js-plotly-plot").first.locator(".trace.bars").first.locator(".point").nth(2).bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + box["height"] / 2)
    page.locator(".hoverlayer .hovertext").first.wait_for(state="attached", timeout=PATIENCE)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function(f"() => ({layers})(0) < 1", timeout=PATIENCE)
    assert [page.evaluate(layers, i) < 1 for i in range(4)] == [True, True, False, True]
    chosen = page.locator(".jp-OutputArea-output select")
    assert chosen.evaluate("box => box.selectedOptions[0].text") == ask(page, "view.plan.devices[2].device.name")
    chosen.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(f"() => ({layers})(3) === 1", timeout=PATIENCE)
    assert ask(page, "view.device.value == view.plan.devices[3].device.name") == "True"
    photograph(page, "plan-light.png")


def test_in_the_dark(notebook):
    """Last: the theme stays with the server."""
    page = notebook("dark.ipynb", LIVE, MASK, LAB)
    go_dark(page)
    button(page, "Run").click()
    page.get_by_text("Output identical to plain decoding:").wait_for(timeout=WAIT)
    button(page, "Draw").click()
    page.get_by_text("500 texts per side:").wait_for(timeout=WAIT)
    mark(page.locator(".treespec-mask .tree svg > g").nth(3)).click()
    photograph(page, "widgets-dark.png")
    photograph(page, "widgets-dark-narrow.png", NARROW)
