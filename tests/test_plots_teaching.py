"""The notebooks' figures: numbers arrive as they were given, guesses where they were made."""

import numpy as np
import pytest

from treespec.marks import STRATEGIES
from treespec.plots.teaching import add_guess, add_level, bars_figure, ink, lines_figure, reliability_figure
from treespec.reliability import Reliability

LINES = {"one": ([1, 2, 4], [3.0, 1.5, 0.2]), "<b>two</b> $x$": ([1, 2], [1, 2])}


def test_lines_hold_the_numbers_and_escape_names():
    fig = lines_figure("How <many>?", LINES, x="nodes", y="ms", colours={"one": "#123456"})
    first, second = fig.data
    assert (list(first.x), list(first.y), first.line.color) == ([1, 2, 4], [3.0, 1.5, 0.2], "#123456")
    assert second.name == "&lt;b&gt;two&lt;/b&gt; &#36;x&#36;"
    assert second.marker.symbol != first.marker.symbol
    assert fig.layout.title.text == "How &lt;many&gt;?"
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("nodes", "ms")
    assert fig.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_axes_of_counts_have_whole_ticks_and_others_do_not():
    fig = lines_figure("?", {"a": ([1, 2, 3], [0.5, 0.6, 0.7])}, x="level", y="share")
    assert fig.layout.xaxis.dtick == 1 and fig.layout.yaxis.dtick is None


@pytest.mark.parametrize("log", [False, True])
def test_a_guess_alone_is_a_line_at_its_place(log):
    fig = add_guess(lines_figure("?", LINES, x="x", y="y", log_x=log, log_y=log), x=100)
    shape, note = fig.layout.shapes[0], fig.layout.annotations[0]
    assert (shape.x0, shape.x1, shape.y0, shape.y1, shape.yref) == (100, 100, 0, 1, "paper")
    assert note.x == (2 if log else 100)  # annotations of a logarithmic axis are in decades, shapes are not
    assert note.text == "your guess: 100"
    assert add_guess(fig, y=10, text="mine").layout.annotations[1].y == (1 if log else 10)


def test_a_guess_of_both_is_a_mark_and_of_lists_a_curve():
    fig = add_guess(lines_figure("?", LINES, x="x", y="y"), x=2, y=1.5)
    assert (fig.data[-1].mode, fig.data[-1].x, fig.data[-1].y) == ("markers", (2,), (1.5,))
    fig = add_guess(fig, x=[1, 2], y=[3, 4])
    assert (fig.data[-1].mode, fig.data[-1].line.dash) == ("lines+markers", "dot")


@pytest.mark.parametrize("guess", [{}, {"x": [1, 2], "y": [1]}])
def test_half_a_guess_is_refused(guess):
    with pytest.raises(ValueError, match="a guess needs"):
        add_guess(lines_figure("?", LINES, x="x", y="y"), **guess)


def test_a_level_is_a_thin_line_with_its_name():
    fig = add_level(lines_figure("?", LINES, x="x", y="y"), 1.0, "plain")
    assert (fig.layout.shapes[0].y0, fig.layout.shapes[0].line.dash, fig.layout.annotations[0].text) == (
        1.0,
        "solid",
        "plain",
    )


def test_bars_write_their_values_and_reach_over_their_intervals():
    values, intervals = {"a": 2.0, "b": 1.0}, {"a": (1.5, 3.0), "b": (0.9, 1.1)}
    fig = bars_figure(
        "?", values, unit="times", intervals=intervals, colours={"b": ink("dynamic")}, reference=(1.0, "plain")
    )
    (bar,) = fig.data
    assert list(bar.x) == [2.0, 1.0]
    np.testing.assert_allclose(bar.error_x.array, [1.0, 0.1])
    np.testing.assert_allclose(bar.error_x.arrayminus, [0.5, 0.1])
    assert bar.marker.color[1] == STRATEGIES["dynamic"].colour
    assert [(note.text, note.x) for note in fig.layout.annotations] == [("2", 3.0), ("1", 1.1), ("plain", 1.0)]
    assert fig.layout.xaxis.range[1] > 3.0
    assert fig.layout.annotations[2].yanchor == "bottom"  # above the bars, not on the first


def test_bars_of_nothing_but_zero_have_an_axis():
    fig = bars_figure("?", {"a": 0.0}, unit="share")
    assert fig.layout.xaxis.range[1] > 0


def test_reliability_leaves_out_empty_and_tiny_bins():
    found = Reliability(
        np.array([40, 0, 3, 160]), np.array([0.1, np.nan, 0.5, 0.9]), np.array([0.2, np.nan, 0.0, 0.7]), 0.16
    )
    diagonal, line = reliability_figure("?", {"all": found}).data
    assert (list(diagonal.x), list(diagonal.y)) == ([0, 1], [0, 1])
    assert (list(line.x), list(line.y), list(line.customdata)) == ([0.1, 0.9], [0.2, 0.7], [40, 160])
    assert line.marker.size[1] == 20 > line.marker.size[0]
