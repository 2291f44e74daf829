"""What steps cost and what they give: tokens against time, where the time goes, and verification against nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from treespec.cost import CostCurve, CostModel, load_cost, shipped
from treespec.files import read_json
from treespec.marks import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Mark, strategy_mark
from treespec.plots.style import INK, Parts, axis, figure, hatched, look, note, safe
from treespec.tune import pareto

Row = Mapping[str, Any]  # as treespec.scoring.Score.row, treespec.table, treespec.tune and treespec.compare name them
BIGGER = "Is a bigger tree worth its check?"
WHERE = "Where does a step's time go?"
CHECK = "What does it cost to check n nodes at once?"
SPEEDUPS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
PHASES = {"draft": (SKY, ""), "prune": (PURPLE, "x"), "verify": (BLUE, "/"), "overhead": (GREY, ".")}
LINES = ("solid", "dash", "dot", "dashdot", "longdash")
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE)


def step_ms(row: Row) -> float:
    """Milliseconds of a step."""
    if "step_ms" in row:
        return float(row["step_ms"])
    return float(row["verify_ms"] + row["draft_ms"] + row["overhead_ms"])


def plain_ms(rows: Iterable[Row]) -> float:
    """Milliseconds of a step of plain decoding, by any row: what its speed-up is measured against."""
    for row in rows:
        return float(row["speedup"] * step_ms(row) / row["tokens_per_step"])
    return float("nan")


def named(row: Row) -> str:
    """What a row is called: its strategy, else its setting."""
    return str(row.get("strategy") or row["policy"])


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
    """Named strategies, their names where they do not run into one another."""
    looks = [strategy_mark(str(row["policy"])) for row in rows]
    boxes = [(x - 7, y - 7, x + 7, y + 7) for x, y in map(span.pixels, rows)]
    if you:
        x, y = span.pixels(you)
        boxes.append((x - 14, y - 28, x + 14, y + 12))
    where = []
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
        boxes.append(sides[side])
        where.append(side)
    marker = {"size": 12, **_marks(looks), "line": {"color": DARK, "width": 1}}
    texts = [safe(named(row)) for row in rows]
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


def time_figure(rows: Sequence[Row], *, title: str = WHERE, width: int = 620, height: int = 300) -> go.Figure:
    """Milliseconds per step by phase, one bar per setting, with what a token costs at the end.

    Args:
        rows: as for :func:`frontier_figure`, with ``verify_ms draft_ms`` and ``step_ms`` or ``overhead_ms``; where
            ``prune_ms`` is known it is taken out of the overhead, which holds it otherwise.
        title: of the figure.
        width: pixels that the figure will have.
        height: pixels.
    """
    return figure(time_parts(rows, title=title, width=width, height=height))


def time_parts(rows: Sequence[Row], *, title: str = WHERE, width: int = 620, height: int = 300) -> Parts:
    """Traces and layout of :func:`time_figure`; always as many traces."""
    names = [f"<b>{safe(named(row))}</b>" if named(row) == "YOU" else safe(named(row)) for row in rows]
    parts = [phases(row) for row in rows]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase,
            "x": [p[phase] for p in parts],
            "y": list(range(len(rows))),
            "width": 0.62,
            "marker": hatched(*PHASES[phase]),
            "hovertext": [f"{name}: {phase} {p[phase]:.2f} ms of a step" for name, p in zip(names, parts)],
            "hoverinfo": "text",
        }
        for phase in PHASES
    ]
    totals = [sum(p.values()) for p in parts]
    said = [f" {t / row['tokens_per_step']:.1f} ms a token: {row['speedup']:.2f}×" for t, row in zip(totals, rows)]
    ends = {
        "type": "scatter",
        "mode": "text",
        "x": totals,
        "y": list(range(len(rows))),
        "text": said,
        "textposition": "middle right",
        "textfont": {"size": 11, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
    left = 20 + max([6.6 * len(named(row)) for row in rows] or [0])
    room = max((width - left - 20) / max(width - left - 20 - 150, 60), 1.0)  # for the words at the longest bar's end
    layout = look(
        title,
        height,
        margin={"l": left, "t": 62},
        barmode="stack",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal", "itemclick": False},
        xaxis=axis("milliseconds per step", range=[0, room * max(totals or [1.0])]),
        yaxis={
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": list(range(len(rows))),
            "ticktext": names,
            "showgrid": False,
            "zeroline": False,
            "ticklen": 0,
        },
    )
    return [*bars, ends], layout


def phases(row: Row) -> dict[str, float]:
    """Milliseconds of a step by phase; ``prune`` is 0, and part of the overhead, where a row does not know it."""
    draft, verify, prune = float(row["draft_ms"]), float(row["verify_ms"]), float(row.get("prune_ms", 0.0))
    rest = max(step_ms(row) - draft - verify - prune, 0.0)
    return {"draft": draft, "prune": prune, "verify": verify, "overhead": rest}


def cost_figure(
    curves: Sequence[CostModel | str],
    *,
    most: int = 128,
    context: float | None = None,
    relative: bool = False,
    title: str = CHECK,
    height: int = 380,
) -> go.Figure:
    """Milliseconds of a verification against its nodes; measured points filled, estimates hollow, formulas dashed.

    Args:
        curves: cost models or their names.
        most: nodes to draw up to.
        context: cached tokens; None for each model's own.
        relative: in times of one node's check, which makes different machines comparable.
        title: of the figure.
        height: pixels.
    """
    models = [load_cost(c) if isinstance(c, str) else c for c in curves]
    nodes = np.unique(np.geomspace(1, most, 60).round().astype(int))
    out = go.Figure()
    for i, model in enumerate(models):
        unit = 1 / model.verify(1, context) if relative else 1e3
        colour = COLOURS[i % len(COLOURS)]
        style = {"color": colour, "dash": LINES[i % len(LINES)] if isinstance(model, CostCurve) else "dash"}
        y = [unit * model.verify(int(n), context) for n in nodes]
        unmeasured = "" if isinstance(model, CostCurve) else " (formula)"
        out.add_scatter(x=nodes, y=y, mode="lines", line=style, name=safe(str(model)) + unmeasured)
        if isinstance(model, CostCurve):
            _dots(out, model, unit, context, most, colour)
    what = "times the check of one node" if relative else "milliseconds per verification"
    return out.update_layout(
        look(title, height, showlegend=True),
        xaxis=axis("nodes in one verification, the root included", rangemode="tozero"),
        yaxis=axis(what, rangemode="tozero"),
        legend={"x": 0.02, "y": 1, "yanchor": "top"},
    )


def _dots(out: go.Figure, curve: CostCurve, unit: float, context: float | None, most: int, colour: str) -> None:
    """A curve's points: filled where a file holds the timings, hollow where it only says so."""
    measured = measured_rows(curve)
    for known in (True, False):
        rows = [n for n in curve.verify_rows if (n in measured) is known and n <= most]
        if not rows:
            continue
        words = "measured" if known else "given, not measured here" if measured == set() else "estimate"
        out.add_scatter(
            x=rows,
            y=[unit * curve.verify(int(n), context) for n in rows],
            mode="markers",
            marker={"symbol": "circle" if known else "circle-open", "size": 9, "color": colour, "line": {"width": 2}},
            name=f"{safe(str(curve))}: {words}",
        )


def measured_rows(curve: CostCurve) -> set[float]:
    """Rows of a curve whose timings are in its file (``treespec measure`` writes them); none for other curves."""
    path = shipped().get(curve.name, Path(curve.name))
    if not path.is_file():
        return set()
    points = read_json(path).get("points", {})
    return {float(p["rows"]) for p in points.get("verify", [])} if isinstance(points, dict) else set()
