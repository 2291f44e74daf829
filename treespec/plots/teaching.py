"""Figures of the notebooks: lines, bars and calibration, each with room for the reader's own guess.

Pure functions from numbers to plotly figures. A guess is always drawn the same way, dotted and in the ink's colour, so
that the eye finds it in every notebook. No figure has a background of its own: they read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from treespec.reliability import Reliability

INK, RULE, CLEAR = "#808080", "rgba(128,128,128,.25)", "rgba(0,0,0,0)"
# Okabe-Ito without its black and yellow, which vanish on a dark or a light page
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#999999")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross")
# one colour per strategy in all notebooks
STRATEGY = {
    "plain": "#999999",
    "linear": "#56B4E9",
    "uniform": "#E69F00",
    "threshold": "#CC79A7",
    "dynamic": "#009E73",
    "bestfirst": "#0072B2",
    "throughput": "#D55E00",
}
HEIGHT = 380
Line = tuple[Sequence[float], Sequence[float]]


def _figure(title: str, height: int = HEIGHT) -> go.Figure:
    return go.Figure(
        layout=dict(
            template="none",
            paper_bgcolor=CLEAR,
            plot_bgcolor=CLEAR,
            font_color=INK,
            title=dict(text=escape(title), x=0, xref="paper", y=0.97, font_size=17),
            height=height,
            margin=dict(l=70, r=40, t=76, b=56),
            legend=dict(orientation="h", x=0, y=1.0, yanchor="bottom"),
            hoverlabel=dict(namelength=-1),
        )
    )


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
    """Lines with marks, told apart by colour and by shape.

    Args:
        title: the question that the figure answers.
        lines: name -> (x values, y values).
        x: title of the horizontal axis, with its unit.
        y: title of the vertical axis, with its unit.
        log_x: logarithmic horizontal axis.
        log_y: logarithmic vertical axis.
        colours: name -> colour, where a line has one of its own; the others take their turn.
    """
    fig = _figure(title)
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        colour = (colours or {}).get(name, CYCLE[i % len(CYCLE)])
        fig.add_scatter(
            x=list(xs),
            y=list(ys),
            name=escape(name),
            mode="lines+markers" if len(xs) <= 40 else "lines",
            line=dict(color=colour, width=2),
            marker=dict(symbol=SYMBOLS[i % len(SYMBOLS)], size=8),
        )
    across = np.concatenate([np.asarray(xs, dtype=float) for xs, _ in lines.values()])
    along = np.concatenate([np.asarray(ys, dtype=float) for _, ys in lines.values()])
    fig.update_xaxes(_scale(across, log_x), title=escape(x), gridcolor=RULE, zeroline=False)
    fig.update_yaxes(_scale(along, log_y), title=escape(y), gridcolor=RULE, zeroline=False)
    if not log_y:
        fig.update_yaxes(rangemode="tozero")
    return fig


def _scale(values: np.ndarray, log: bool) -> dict[str, object]:
    if log:
        positive = values[values > 0]
        decades = np.log10(positive.max() / positive.min()) if len(positive) else 0.0
        return dict(type="log", dtick="D2" if decades < 3 else 1)  # on few decades 1, 2, 5 are labels enough
    whole = np.array_equal(values, values.round()) and np.ptp(values) <= 20
    return dict(dtick=1) if whole else {}  # there is no level one and a half


def bars_figure(
    title: str,
    values: Mapping[str, float],
    *,
    unit: str,
    intervals: Mapping[str, Sequence[float]] | None = None,
    colours: Mapping[str, str] | None = None,
    reference: tuple[float, str] | None = None,
    log: bool = False,
) -> go.Figure:
    """Horizontal bars, the value written at the end of each.

    Args:
        title: the question that the figure answers.
        values: name -> length of its bar.
        unit: title of the axis.
        intervals: name -> (low, high), drawn as whiskers.
        colours: name -> colour, blue for the others.
        reference: a value and its name, drawn as a line across all bars.
        log: logarithmic axis; for values that differ by orders of magnitude.
    """
    names = list(values)
    fig = _figure(title, height=150 + 34 * len(names))
    low_high = [(intervals or {}).get(name, (values[name], values[name])) for name in names]
    numbers = [values[name] for name in names]
    fig.add_bar(
        y=[escape(name) for name in names],
        x=numbers,
        orientation="h",
        width=0.6,
        marker_color=[(colours or {}).get(name, CYCLE[0]) for name in names],
        error_x=dict(
            type="data",
            symmetric=False,
            color=INK,
            visible=intervals is not None,
            array=[high - value for (_, high), value in zip(low_high, numbers)],
            arrayminus=[value - low for (low, _), value in zip(low_high, numbers)],
        ),
        hovertemplate="%{y}: %{x:.4g}<extra></extra>",
        showlegend=False,
    )
    ends = [max(high, value) for (_, high), value in zip(low_high, numbers)]
    for name, value, end in zip(names, numbers, ends):
        at = np.log10(max(end, 1e-300)) if log else end
        fig.add_annotation(y=escape(name), x=at, text=f"{value:.3g}", showarrow=False, xanchor="left", xshift=6)
    fig.update_xaxes(title=escape(unit), gridcolor=RULE, zeroline=False, type="log" if log else "linear")
    if reference is not None:
        _across(fig, "x", *reference)
    if not log:
        fig.update_xaxes(range=[min(0.0, *numbers), 1.12 * max(ends)])
    fig.update_yaxes(autorange="reversed", ticksuffix="  ", automargin=True)
    return fig


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
    if y is None:
        return _across(fig, "x", float(x), f"{text}: {x:g}", dash="dot")  # type: ignore[arg-type]
    if x is None:
        return _across(fig, "y", float(y), f"{text}: {y:g}", dash="dot")  # type: ignore[arg-type]
    xs, ys = np.atleast_1d(x).tolist(), np.atleast_1d(y).tolist()
    if len(xs) != len(ys):
        raise ValueError(f"a guess needs as many x as y; got {len(xs)} and {len(ys)}")
    mode = "lines+markers" if len(xs) > 1 else "markers"
    mark = dict(symbol="star-open", size=13, color=INK, line_width=2)
    return fig.add_scatter(
        x=xs, y=ys, name=escape(text), mode=mode, marker=mark, line=dict(dash="dot", color=INK, width=2)
    )


def _across(fig: go.Figure, axis: str, value: float, text: str, dash: str = "solid") -> go.Figure:
    """A line across the figure with its name; plotly's own misplaces the name on a logarithmic axis."""
    other = "y" if axis == "x" else "x"
    log = fig.layout[f"{axis}axis"].type == "log"
    line = dict(color=INK, dash=dash, width=2 if dash == "dot" else 1)
    fig.add_shape(type="line", line=line, **{f"{axis}0": value, f"{axis}1": value}, **_whole(other))
    place = dict(x=np.log10(value) if log else value, xanchor="left", y=1, yanchor="top", yref="paper", xshift=3)
    if axis == "y":
        place = dict(y=np.log10(value) if log else value, yanchor="bottom", x=1, xanchor="right", xref="paper")
    return fig.add_annotation(text=escape(text), showarrow=False, font_color=INK, **place)


def _whole(axis: str) -> dict[str, object]:
    return {f"{axis}ref": "paper", f"{axis}0": 0, f"{axis}1": 1}


def add_level(fig: go.Figure, value: float, text: str) -> go.Figure:
    """A thin line across a figure at a height that means something, such as plain decoding's.

    Args:
        fig: is changed and returned.
        value: on the vertical axis.
        text: what it is.
    """
    return _across(fig, "y", value, text)


def reliability_figure(title: str, groups: Mapping[str, Reliability]) -> go.Figure:
    """Predicted probability against the share that was right; on the diagonal a draft tells the truth.

    Args:
        title: the question that the figure answers.
        groups: name -> :class:`treespec.reliability.Reliability`; a mark's area grows with its children.
    """
    fig = _figure(title, height=430)
    fig.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=dict(color=INK, dash="dash", width=1), name="true to its word")
    most = max((float(found.count.max()) for found in groups.values()), default=1.0)
    for i, (name, found) in enumerate(groups.items()):
        there = found.count > 0
        fig.add_scatter(
            x=found.predicted[there],
            y=found.observed[there],
            customdata=found.count[there],
            name=escape(name),
            mode="lines+markers",
            line=dict(color=CYCLE[i % len(CYCLE)], width=1),
            marker=dict(symbol=SYMBOLS[i % len(SYMBOLS)], size=5 + 15 * np.sqrt(found.count[there] / most)),
            hovertemplate="predicted %{x:.2f}, right %{y:.2f}, %{customdata} children",
        )
    fig.update_xaxes(title="the draft's probability of a child", range=[-0.03, 1.03], gridcolor=RULE, zeroline=False)
    fig.update_yaxes(title="share of these that were right", range=[-0.03, 1.06], gridcolor=RULE, zeroline=False)
    return fig
