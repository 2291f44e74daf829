"""The steps of one text under way: where each one's time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from treespec.events import StepEvent, StepTimes
from treespec.plots.costs import PHASES, phases
from treespec.plots.style import INK, Parts, axis, figure, hatched, look

QUESTION = "Where did each step's time go?"
FIRST = 12  # steps that the axis has room for from the start


def step_figure(events: Sequence[StepEvent], *, chosen: int | None = None, height: int = 230) -> go.Figure:
    """One bar per step: draft, prune, verify and the rest, in milliseconds, with the tokens it gave above.

    Args:
        events: in order; the prefill, step 0, reads the whole prompt and is left out: its bar would flatten the others.
        chosen: number of the step to mark.
        height: pixels.
    """
    return figure(step_parts(events, chosen=chosen, height=height))


def step_parts(events: Sequence[StepEvent], *, chosen: int | None = None, height: int = 230) -> Parts:
    """Traces and layout of :func:`step_figure`; always as many traces."""
    steps = [event for event in events if not event.is_prefill]
    at, parts = [event.index for event in steps], [_phases(event.times) for event in steps]
    totals = [sum(p.values()) for p in parts]
    bars = [
        {
            "type": "bar",
            "name": phase,
            "x": at,
            "y": [p[phase] for p in parts],
            "marker": hatched(*PHASES[phase]),
            "hovertext": [
                f"step {i}: {phase} {p[phase]:.2f} of {t:.1f} ms, {e.nodes} nodes, {len(e.tokens)} tokens"
                for i, p, t, e in zip(at, parts, totals, steps)
            ],
            "hoverinfo": "text",
            "customdata": at,
        }
        for phase in PHASES
    ]
    given: dict[str, Any] = {
        "type": "scatter",
        "mode": "text",
        "x": at,
        "y": totals,
        "text": [("<b>▾{}</b>" if i == chosen else "{}").format(len(e.tokens)) for i, e in zip(at, steps)],
        "textposition": "top center",
        "textfont": {"size": 11, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
    layout = look(
        QUESTION,
        height,
        margin={"t": 62},
        barmode="stack",
        bargap=0.25,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal", "itemclick": False},
        xaxis=axis("step (above each bar: the tokens it gave)", range=[0.4, max([FIRST, *at]) + 0.6], showgrid=False),
        yaxis=axis("milliseconds", range=[0, 1.18 * max([1.0, *totals])]),
    )
    return [*bars, given], layout


def _phases(times: StepTimes) -> dict[str, float]:
    """Milliseconds by phase; they add up to the step."""
    seconds = {"draft": times.draft, "prune": times.prune, "verify": times.verify, "overhead": times.overhead}
    return phases({f"{name}_ms": 1e3 * value for name, value in seconds.items()})
