"""Figures of the notebooks: lines, bars and calibration, each with room for the reader's own guess.

Pure functions from numbers to plotly figures. A guess is always drawn the same way, dotted and in the ink's colour, so
that the eye finds it in every notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from treespec.marks import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, strategy_mark
from treespec.plots.style import INK, axis, column, look, safe
from treespec.reliability import Reliability

CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down")
FEW = 40  # points that get a mark each
AXIS = 57  # pixels of an axis with its title
BAR = 32  # pixels per bar
ENOUGH = 20  # children of a bin whose share is worth a mark
Line = tuple[Sequence[float], Sequence[float]]


def ink(policy: str) -> str:
    """The colour that a strategy has in all figures."""
    return strategy_mark(policy).ink


def _figure(title: str, height: int, **more: Any) -> go.Figure:
    margin = {"l": 64, "r": 24}
    # below the axis, where plotly makes room for as many lines of names as the width asks for; above they met the title
    legend = {"orientation": "h", "x": 0, "y": -AXIS / (height - 94), "yanchor": "top"}
    return go.Figure(layout=look(title, height, margin=margin, legend=legend, showlegend=True, **more))


def lines_figure(
    title: str,
    lines: Mapping[str, Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    colours: Mapping[str, str] | None = None,
) -> go.Figure:
    """Lines told apart by colour and by shape.

    Args:
        title: the question that the figure answers.
        lines: name -> (x values, y values).
        x: title of the horizontal axis, with its unit.
        y: title of the vertical axis, with its unit.
        log_x: logarithmic horizontal axis.
        log_y: logarithmic vertical axis.
        colours: name -> colour, where a line has one of its own; the others take their turn.
    """
    fig = _figure(title, 380)
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        fig.add_scatter(
            x=column(xs),
            y=column(ys),
            name=safe(name),
            mode="lines+markers" if len(xs) <= FEW else "lines",
            line={"color": (colours or {}).get(name, CYCLE[i % len(CYCLE)]), "width": 2},
            marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8},
        )
    across, along = (np.array([v for line in lines.values() for v in column(line[k]) if v is not None]) for k in (0, 1))
    fig.update_xaxes(axis(x, **_scale(across, log_x)))
    fig.update_yaxes(axis(y, **_scale(along, log_y), **({} if log_y else {"rangemode": "tozero"})))
    return fig


def _scale(values: np.ndarray, log: bool) -> dict[str, Any]:
    if log:
        positive = values[values > 0]
        decades = float(np.log10(positive.max() / positive.min())) if len(positive) else 0.0
        return {"type": "log", "dtick": "D2" if decades < 3 else 1}  # on few decades 1, 2, 5 are labels enough
    whole = len(values) > 0 and np.array_equal(values, values.round()) and np.ptp(values) <= 20
    return {"dtick": 1} if whole else {}  # there is no level one and a half


def bars_figure(
    title: str,
    values: Mapping[str, float],
    *,
    unit: str,
    intervals: Mapping[str, Sequence[float]] | None = None,
    colours: Mapping[str, str] | None = None,
    reference: tuple[float, str] | None = None,
) -> go.Figure:
    """Horizontal bars, the value written at the end of each.

    Args:
        title: the question that the figure answers.
        values: name -> length of its bar.
        unit: title of the axis.
        intervals: name -> (low, high), drawn as whiskers.
        colours: name -> colour, blue for the others.
        reference: a value and its name, drawn as a line across all bars.
    """
    numbers = [v or 0.0 for v in column(values.values())]  # no number, no bar
    spans = [_ends((intervals or {}).get(name), value) for name, value in zip(values, numbers)]
    names = [safe(name) for name in values]
    fig = _figure(title, 120 + BAR * len(names))
    fig.add_bar(
        y=names,
        x=numbers,
        orientation="h",
        width=0.6,
        marker_color=[(colours or {}).get(name, BLUE) for name in values],
        error_x={
            "type": "data",
            "symmetric": False,
            "color": INK,
            "visible": intervals is not None,
            "array": [high - value for (_, high), value in zip(spans, numbers)],
            "arrayminus": [value - low for (low, _), value in zip(spans, numbers)],
        },
        hovertemplate="%{y}: %{x:.4g}<extra></extra>",
        showlegend=False,
    )
    ends = [max(high, value, 0.0) for (_, high), value in zip(spans, numbers)]
    for name, value, end in zip(names, column(values.values()), ends):
        words = "–" if value is None else f"{value:.3g}"
        fig.add_annotation(y=name, x=end, text=words, showarrow=False, xanchor="left", xshift=6)
    reach = max([*ends, reference[0] if reference else 0.0]) or 1.0
    fig.update_xaxes(axis(unit, range=[min(0.0, *numbers), 1.12 * reach]))
    fig.update_yaxes(autorange="reversed", ticksuffix="  ", automargin=True)
    return fig if reference is None else _across(fig, "x", *reference)


def _ends(interval: Sequence[float] | None, value: float) -> tuple[float, float]:
    low, high = column((value, value) if interval is None else interval)
    return value if low is None else low, value if high is None else high


def add_guess(
    fig: go.Figure,
    *,
    x: float | Sequence[float] | None = None,
    y: float | Sequence[float] | None = None,
    text: str = "your guess",
) -> go.Figure:
    """The reader's guess over a figure: a line across for ``x`` or ``y`` alone, a mark for both, a curve for lists.

    Args:
        fig: is changed and returned.
        x: a place on the horizontal axis, or places.
        y: a place on the vertical axis, or places.
        text: what it is called.

    Raises:
        ValueError: for neither, or lists of unequal length.
    """
    if x is None and y is None:
        raise ValueError("a guess needs x, y or both")
    if x is None or y is None:
        value = float(np.asarray(y if x is None else x))
        return _across(fig, "y" if x is None else "x", value, f"{text}: {value:g}", dash="dot")
    xs, ys = np.atleast_1d(x).tolist(), np.atleast_1d(y).tolist()
    if len(xs) != len(ys):
        raise ValueError(f"a guess needs as many x as y; got {len(xs)} and {len(ys)}")
    return fig.add_scatter(
        x=xs,
        y=ys,
        name=safe(text),
        mode="lines+markers" if len(xs) > 1 else "markers",
        marker={"symbol": "star-open", "size": 13, "color": INK, "line": {"width": 2}},
        line={"dash": "dot", "color": INK, "width": 2},
    )


def add_level(fig: go.Figure, value: float, text: str) -> go.Figure:
    """A thin line across a figure at a height that means something, such as plain decoding's.

    Args:
        fig: is changed and returned.
        value: on the vertical axis.
        text: what it is.
    """
    return _across(fig, "y", value, text)


def _across(fig: go.Figure, along: str, value: float, text: str, dash: str = "solid") -> go.Figure:
    """A line at ``value`` on one axis, with its name; plotly's own misplaces the name where the axis is logarithmic."""
    other = "y" if along == "x" else "x"
    at = float(np.log10(value)) if fig.layout[f"{along}axis"].type == "log" else value
    ends = {f"{along}0": value, f"{along}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    fig.add_shape(type="line", line={"color": INK, "dash": dash, "width": 2 if dash == "dot" else 1}, **ends)
    bars = any(trace.type == "bar" for trace in fig.data)  # a name would lie on the first of them
    corner = {"xanchor": "left", "yanchor": "bottom" if bars else "top", "xshift": 3}
    if along == "y":
        corner = {"xanchor": "right", "yanchor": "bottom"}
    place = {along: at, other: 1, f"{other}ref": "paper", **corner}
    return fig.add_annotation(text=safe(text), showarrow=False, font_color=INK, **place)


def reliability_figure(title: str, groups: Mapping[str, Reliability]) -> go.Figure:
    """Predicted probability against the share that was right; on the diagonal a draft tells the truth.

    Args:
        title: the question that the figure answers.
        groups: name -> what :func:`treespec.reliability.reliability` found; a mark's area grows with its
            children, and a bin of fewer than 20 has none.
    """
    fig = _figure(title, 430)
    line = {"color": INK, "dash": "dash", "width": 1}
    fig.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=line, name="true to its word", hoverinfo="skip")
    most = max((float(found.count.max()) for found in groups.values()), default=1.0)
    for i, (name, found) in enumerate(groups.items()):
        there = found.count >= ENOUGH
        size = 5 + 15 * np.sqrt(found.count[there] / most)
        fig.add_scatter(
            x=found.predicted[there],
            y=found.observed[there],
            customdata=found.count[there],
            name=safe(name),
            mode="lines+markers",
            line={"color": CYCLE[i % len(CYCLE)], "width": 1},
            marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": size},
            hovertemplate="predicted %{x:.2f}, right %{y:.2f}, %{customdata} children",
        )
    fig.update_xaxes(axis("the draft's probability of a child", range=[-0.03, 1.03]))
    fig.update_yaxes(axis("share of these that were right", range=[-0.03, 1.06]))
    return fig
