"""Is a bigger tree worth its check? Tokens per step against milliseconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from treespec.marks import DARK, GREY, VERMILION, Mark, strategy_mark
from treespec.plots.rows import Row, named, on_log_axes, plain_ms, step_ms
from treespec.plots.style import INK, Parts, axis, figure, look, note, safe
from treespec.tune import pareto

BIGGER = "Is a bigger tree worth its check?"
CROWDED = 60.0  # square pixels of a name under others from which it is left out
SPEEDUPS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def frontier_figure(
    rows: Sequence[Row],
    *,
    you: Row | None = None,
    trail: Sequence[tuple[float, float]] = (),
    title: str = BIGGER,
    width: int = 620,
    height: int = 430,
) -> go.Figure:
    """Tokens per step against milliseconds per step, both on log scales, so that equal speed-ups are parallel lines.

    Args:
        rows: with ``policy tokens_per_step speedup`` and ``step_ms`` (or its parts). Those with a ``strategy`` are
            marked and named, the others are the cloud of settings; the Pareto front runs over all of them.
        you: the setting in hand, a ring.
        trail: ``(step_ms, tokens_per_step)`` where the ring was before, oldest first.
        title: of the figure.
        width: pixels that the figure will have; names are placed for it.
        height: pixels.
    """
    return figure(frontier_parts(rows, you=you, trail=trail, title=title, width=width, height=height))


def frontier_parts(
    rows: Sequence[Row],
    *,
    you: Row | None = None,
    trail: Sequence[tuple[float, float]] = (),
    title: str = BIGGER,
    width: int = 620,
    height: int = 430,
) -> Parts:
    """Traces and layout of :func:`frontier_figure`; always as many traces."""
    rows = [row for row in rows if on_log_axes(row)]
    you = you if you and on_log_axes(you) else None
    cloud = [row for row in rows if not row.get("strategy")]
    marked = [row for row in rows if row.get("strategy")]
    everything = [*rows, *([you] if you else [])]
    span = _Span(everything, width, height)
    isos, names = _isos(plain_ms(everything), span)
    traces = [
        isos,
        _cloud(cloud),
        _front(rows),
        _trail(trail),
        _marked(marked, you, span),
        _you(you),
    ]
    layout = look(
        title,
        height,
        margin={"r": 60},
        xaxis=axis("milliseconds per step, log scale", type="log", range=span.x, **_ticks(span.x)),
        yaxis=axis("tokens per step, log scale", type="log", range=span.y, **_ticks(span.y)),
        annotations=names,
    )
    return traces, layout


class _Span:
    """Decimal logs that the axes reach from and to, and the pixels they have."""

    def __init__(self, rows: Sequence[Row], width: int, height: int) -> None:
        x = np.log10([step_ms(row) for row in rows] or [1.0])
        y = np.log10([row["tokens_per_step"] for row in rows] or [1.0])
        self.x = [float(x.min()) - 0.06, float(x.max()) + 0.12]
        self.y = [min(float(y.min()), 0.0) - 0.04, max(float(y.max()), 0.3) + 0.06]
        self.wide, self.high = width - 116, height - 94

    def pixels(self, row: Row) -> tuple[float, float]:
        """Where a row lies, from the left and the bottom."""
        x, y = np.log10(step_ms(row)), np.log10(row["tokens_per_step"])
        across = self.wide * (x - self.x[0]) / (self.x[1] - self.x[0])
        return float(across), float(self.high * (y - self.y[0]) / (self.y[1] - self.y[0]))


def _ticks(span: list[float]) -> dict[str, Any]:
    """Round numbers inside a span of decimal logs, four to eight of them."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8)):
        found = [s * 10.0**e for e in range(-3, 7) for s in steps if span[0] <= np.log10(s * 10.0**e) <= span[1]]
        if len(found) >= 4:
            break
    return {"tickvals": found, "ticktext": [f"{v:g}" for v in found]}


def _isos(plain: float, span: _Span) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Lines of equal speed-up: tokens = speed-up × milliseconds ÷ plain milliseconds."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    notes = []
    for s in SPEEDUPS if plain == plain else ():
        lift = np.log10(s / plain)  # y = x + lift
        left, right = max(span.x[0], span.y[0] - lift), min(span.x[1], span.y[1] - lift)
        if right - left < 0.12 * (span.x[1] - span.x[0]):
            continue
        xs += [10**left, 10**right, None]
        ys += [10 ** (left + lift), 10 ** (right + lift), None]
        at = {"x": right, "y": right + lift, "xref": "x", "yref": "y"}
        side = {"xanchor": "right", "yanchor": "bottom"} if right < span.x[1] - 1e-9 else {"xanchor": "left"}
        notes.append(note(f"{s:g}×" + (" plain" if s == 1 else ""), **at, **side))
    line = {"color": INK, "width": 1, "dash": "dot"}
    return {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "line": line, "hoverinfo": "skip"}, notes


def _said(row: Row) -> str:
    """A row in a hover box."""
    ci = "({:.2f} to {:.2f})".format(*row["speedup_ci"]) if row.get("speedup_ci") else ""
    lines = [f"<b>{safe(named(row))}</b>"]
    if row.get("strategy"):
        lines.append(safe(str(row["policy"])))
    lines.append(f"{row['tokens_per_step']:.2f} tokens in {step_ms(row):.1f} ms: {row['speedup']:.2f}× plain {ci}")
    lines.append(f"{row['nodes']:.1f} nodes per check" if "nodes" in row else "")
    if row.get("truncated_share"):
        lines.append(f"{row['truncated_share']:.1%} of its steps left the recording")
    return "<br>".join(line for line in lines if line)


def _points(rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [step_ms(row) for row in rows],
        "y": [float(row["tokens_per_step"]) for row in rows],
        "hovertext": [_said(row) for row in rows],
        "hoverinfo": "text",
        "customdata": [str(row["policy"]) for row in rows],
        **more,
    }


def _cloud(rows: Sequence[Row]) -> dict[str, Any]:
    looks = [strategy_mark(str(row["policy"])) for row in rows]
    marker = {"size": 6, "opacity": 0.45, **_marks(looks), "line": {"width": 0}}
    return _points(rows, marker=marker)


def _marks(looks: Sequence[Mark]) -> dict[str, Any]:
    return {"symbol": [mark.symbol for mark in looks], "color": [mark.colour for mark in looks]}


def _front(rows: Sequence[Row]) -> dict[str, Any]:
    """No other setting gives as many tokens in as little time."""
    exact = [row for row in rows if row.get("strategy") != "hindsight"]  # a bound, no setting
    table = pd.DataFrame({"step_ms": map(step_ms, exact), "tokens_per_step": [r["tokens_per_step"] for r in exact]})
    best = pareto(table, "step_ms") if len(table) else table
    return {
        "type": "scatter",
        "mode": "lines",
        "x": best["step_ms"].tolist(),
        "y": best["tokens_per_step"].tolist(),
        "line": {"color": GREY, "width": 2, "shape": "hv"},
        "hovertext": "Pareto front: no setting gives as many tokens in as little time",
        "hoverinfo": "text",
    }


def _trail(trail: Sequence[tuple[float, float]]) -> dict[str, Any]:
    faint = np.linspace(0.15, 0.6, len(trail)).tolist()
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [x for x, _ in trail],
        "y": [y for _, y in trail],
        "line": {"color": "rgba(122,122,122,.35)", "width": 1},
        "marker": {"symbol": "circle-open", "size": 9, "color": INK, "opacity": faint},
        "hoverinfo": "skip",
    }


def _marked(rows: Sequence[Row], you: Row | None, span: _Span) -> dict[str, Any]:
    """Named strategies, their names where they do not run into one another; the tuner's only where there is room."""
    looks = [strategy_mark(str(row["policy"])) for row in rows]
    boxes = [(x - 7, y - 7, x + 7, y + 7) for x, y in map(span.pixels, rows)]
    if you:
        x, y = span.pixels(you)
        boxes.append((x - 14, y - 28, x + 14, y + 12))
    where, texts = [], []
    for row in rows:
        (x, y), wide = span.pixels(row), 6.4 * len(named(row)) + 6
        sides = {
            "middle right": (x + 8, y - 8, x + 8 + wide, y + 8),
            "middle left": (x - 8 - wide, y - 8, x - 8, y + 8),
            "top center": (x - wide / 2, y + 7, x + wide / 2, y + 22),
            "bottom center": (x - wide / 2, y - 22, x + wide / 2, y - 7),
        }
        own = (x - 7, y - 7, x + 7, y + 7)
        crowd = {side: _overlap(box, [b for b in boxes if b != own], span) for side, box in sides.items()}
        side = min(crowd, key=lambda side: crowd[side])
        where.append(side)
        spare = crowd[side] > CROWDED and str(row["strategy"]).startswith("best ")  # the tuner's, on hover then
        texts.append("" if spare else safe(named(row)))
        if not spare:
            boxes.append(sides[side])
    marker = {"size": 12, **_marks(looks), "line": {"color": DARK, "width": 1}}
    return _points(
        rows, mode="markers+text", marker=marker, text=texts, textposition=where, textfont={"size": 11, "color": INK}
    )


Box = tuple[float, float, float, float]


def _overlap(box: Box, others: Sequence[Box], span: _Span) -> float:
    """Square pixels that a box shares with others, or that lie outside the figure."""
    left, low, right, high = box
    shared = [max(0.0, min(right, c) - max(left, a)) * max(0.0, min(high, d) - max(low, b)) for a, b, c, d in others]
    outside = (max(0.0, -left) + max(0.0, right - span.wide)) * 16 + (max(0.0, -low) + max(0.0, high - span.high)) * 16
    return sum(shared) + outside


def _you(you: Row | None) -> dict[str, Any]:
    rows = [you] if you else []
    return _points(
        rows,
        mode="markers+text",
        marker={"symbol": "circle-open", "size": 20, "color": VERMILION, "line": {"color": VERMILION, "width": 4}},
        text=["<b>YOU</b>"] * len(rows),
        textposition="bottom center",
        textfont={"size": 12, "color": VERMILION},
    )
