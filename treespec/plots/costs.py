"""Where the time of a step goes, and what a verification costs by its nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from treespec.cost import CostCurve, CostModel, load_cost, shipped
from treespec.files import read_json
from treespec.marks import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from treespec.plots.rows import Row, named, step_ms
from treespec.plots.style import INK, Parts, axis, figure, hatched, look, safe

WHERE = "Where does a step's time go?"
CHECK = "What does it cost to check n nodes at once?"
PHASES = {"draft": (SKY, ""), "prune": (PURPLE, "x"), "verify": (BLUE, "/"), "overhead": (GREY, ".")}
LEGEND = 390  # pixels of its names on one line
LINES = ("solid", "dash", "dot", "dashdot", "longdash")
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE)


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
    said = [_end(t, row) for t, row in zip(totals, rows)]
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
        margin={"l": left, "t": 62 if width - left > LEGEND else 84},
        barmode="stack",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal", "itemclick": False},
        xaxis=axis("milliseconds per step", range=[0, room * max(totals or [1.0])]),
        yaxis=axis(
            range=[len(rows) - 0.5, -0.5],
            tickvals=list(range(len(rows))),
            ticktext=names,
            showgrid=False,
            ticklen=0,
        ),
    )
    return [*bars, ends], layout


def _end(total: float, row: Row) -> str:
    """What stands at the end of a bar."""
    if row["tokens_per_step"] > 0:
        return f" {total / row['tokens_per_step']:.1f} ms a token: {row['speedup']:.2f}×"
    return " no step: the prompt's forward gave all of the text"


def phases(row: Row) -> dict[str, float]:
    """Milliseconds of a step by phase; ``prune`` is 0, and part of the overhead, where a row does not know it."""
    known = (float(row["draft_ms"]), float(row["verify_ms"]), float(row.get("prune_ms", 0.0)))
    draft, verify, prune = (v if math.isfinite(v) else 0.0 for v in known)
    whole = step_ms(row)
    rest = max(whole - draft - verify - prune, 0.0) if math.isfinite(whole) else 0.0
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
