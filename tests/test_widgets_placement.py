"""The placement view shows the plan's own numbers, every part once, and what is missing."""

import re

import pytest
from ipywidgets.widgets.widget import _instances

import treespec
from treespec.errors import InputError
from treespec.placement.show import SHARES, gigabytes, sizes
from treespec.plots.placement import memory_figure, strip_figure
from treespec.widgets import PlacementView
from treespec.widgets.live_figure import bring_plotly

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def article():
    return treespec.plan("llama-3.1-70b", "llama-3.2-3b", "4x80GB")


@pytest.fixture(scope="module")
def small():
    return treespec.plan("llama-3.1-8b", "none", "1x12GB")


@pytest.fixture
def view(article):
    made = PlacementView(article)
    yield made
    made.close()


def test_bars_are_the_plans_bytes(article):
    figure = memory_figure(article)
    assert [bars.name for bars in figure.data] == [words for _, words, _ in SHARES]
    for row, device in enumerate(article.devices):
        shown = sum(bars.x[row] for bars in figure.data)
        assert 1e9 * shown == pytest.approx(device.used)
        assert [1e9 * bars.x[row] for bars in figure.data] == pytest.approx(list(sizes(device).values()))
        assert 1e9 * figure.layout.shapes[row].x1 == pytest.approx(device.device.memory)
        assert figure.layout.annotations[row].text == f"{gigabytes(device.free)} free"


def test_every_part_lies_somewhere_once(article):
    strip = strip_figure(article)
    placed = {}
    for bars in strip.data:
        for x, share in zip(bars.x, bars.y):
            placed[x] = placed.get(x, 0.0) + share
    parts = len(article.target.parts)
    assert placed == dict.fromkeys([*range(parts), parts + 1], pytest.approx(1.0))  # the last one is the draft
    on = next(bars for bars in strip.data if parts + 1 in bars.x)
    assert on.name == article.draft_device and "llama-3.2-3b" in on.hovertext[-1]


def test_divided_layers_are_shares_of_every_device():
    divided = treespec.plan("llama-3.1-8b", "none", "2x24GB", tensor_parallel=True)
    strip = strip_figure(divided)
    assert len(strip.data) == 2 and all(set(bars.y) == {0.5} for bars in strip.data)
    assert list(strip.data[0].x) == list(strip.data[1].x) == list(range(len(divided.target.parts)))


def test_pointing_a_device_out(view):
    assert [bars.opacity for bars in view.strip.figure.data] == [1.0] * 4
    name = view.plan.devices[2].device.name
    view.device.value = name
    assert [bars.opacity for bars in view.strip.figure.data] == [0.2, 0.2, 1.0, 0.2]
    view.memory.clicked = [0, 1, 1]
    assert view.device.value == view.plan.devices[1].device.name
    assert [bars.opacity for bars in view.strip.figure.data] == [0.2, 1.0, 0.2, 0.2]


def test_what_does_not_fit_is_said(small):
    assert not small.fits
    view = PlacementView(small)
    assert (
        small.verdict.split(";")[0].split(".")[0][:20] in view.children[1].value and "#D55E00" in view.children[1].value
    )
    assert all(remedy in view.children[1].value for remedy in small.remedies)
    assert "short</b>" in memory_figure(small).layout.annotations[0].text
    view.close()


def test_the_table_has_the_same_numbers(view):
    rows = re.findall(r"<tr>(<td>.*?)</tr>", view.children[-3].value)
    first = re.findall(r"<td>(.*?)</td>", rows[0])
    device = view.plan.devices[0]
    assert len(rows) == 4 and first[0] == device.device.name and first[1] == gigabytes(device.device.memory)
    assert first[2:-2] == [gigabytes(size) for size in sizes(device).values()] and first[-2] == gigabytes(device.free)


def test_wrong_input_is_refused():
    with pytest.raises(InputError, match=r"shows a plan, .*; got a str"):
        PlacementView("4x80GB")


def test_closing_frees_everything(article):
    bring_plotly()  # stays for the next figures
    before = set(_instances)
    PlacementView(article).close()
    assert set(_instances) == before
