"""Where a plan puts things: a bar per device, and the target's parts in order."""

from __future__ import annotations

import math
from itertools import cycle

import plotly.graph_objects as go

from treespec.marks import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from treespec.placement.layout import DevicePlan, PlacementPlan
from treespec.placement.show import SHARES, gigabytes, sizes
from treespec.plots.style import INK, Parts, axis, figure, look, note, safe

MEMORY = "Does it fit, and what fills each device?"
STRIP = "Which layers lie where?"
SHAPES = {"weights": "", "cache": "/", "workspace": ".", "draft": "x", "reserve": "\\"}
DEVICES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)  # by device, over again for more
ROW, STRIP_HEIGHT = 46, 190  # pixels
FAINT = 0.2


def memory_figure(plan: PlacementPlan) -> go.Figure:
    """Gigabytes of every device by what they are for; a frame is the device's memory."""
    return figure(memory_parts(plan))


def memory_parts(plan: PlacementPlan) -> Parts:
    """Traces and layout of :func:`memory_figure`."""
    rows = plan.devices
    at = list(range(len(rows)))
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "x": [sizes(row)[name] / 1e9 for row in rows],
            "y": at,
            "width": 0.56,
            "marker": {
                "color": colour,
                "line": {"width": 0},
                "pattern": {
                    "shape": SHAPES[name],
                    "size": 6,
                    "solidity": 0.25,
                    "fgcolor": "#ffffff",
                    "fillmode": "overlay",
                },
            },
            "hovertext": [f"{safe(row.device.name)}: {words} {gigabytes(sizes(row)[name])}" for row in rows],
            "hoverinfo": "text",
            "customdata": [row.device.name for row in rows],
        }
        for name, words, colour in SHARES
    ]
    frames = [
        {
            "type": "rect", "x0": 0, "x1": row.device.memory / 1e9, "y0": i - 0.34, "y1": i + 0.34,
            "line": {"color": INK, "width": 1.5}, "fillcolor": "rgba(0,0,0,0)",
        }
        for i, row in enumerate(rows)
        if math.isfinite(row.device.memory)
    ]  # fmt: skip
    ends = [max(row.used, _known(row.device.memory)) / 1e9 for row in rows]
    said = [
        note(_left(row), xref="x", yref="y", x=end, y=i, xanchor="left", xshift=6)
        for i, (row, end) in enumerate(zip(rows, ends))
    ]
    layout = look(
        MEMORY,
        110 + ROW * len(rows),
        margin={"l": 90, "t": 66, "r": 110},
        barmode="stack",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal", "itemclick": False},
        xaxis=axis("gigabytes (frame: what the device has)", range=[0, 1.02 * max(ends or [1.0])]),
        yaxis={
            "range": [len(rows) - 0.5, -0.5], "tickvals": at, "ticktext": [safe(row.device.name) for row in rows],
            "showgrid": False, "zeroline": False, "ticklen": 0,
        },
        shapes=frames,
        annotations=said,
    )  # fmt: skip
    return bars, layout


def _known(memory: float) -> float:
    return memory if math.isfinite(memory) else 0.0


def _left(row: DevicePlan) -> str:
    if row.free < 0:
        return f"<b>{gigabytes(-row.free)} short</b>"
    return f"{gigabytes(row.free)} free" if math.isfinite(row.free) else ""


def strip_figure(plan: PlacementPlan, chosen: str = "") -> go.Figure:
    """The target's parts from the embedding to the output layer, and the draft, each coloured by its device.

    Args:
        plan: the plan.
        chosen: name of the device to point out; the others' parts are faint.
    """
    return figure(strip_parts(plan, chosen))


def strip_parts(plan: PlacementPlan, chosen: str = "") -> Parts:
    """Traces and layout of :func:`strip_figure`; as many traces as devices. Divided layers are stacked shares."""
    names = [part.name for part in plan.target.parts]
    size = {part.name: part.weight_bytes for part in plan.target.parts}
    place = {name: i for i, name in enumerate(names)}
    draft = len(names) + 1
    bars = []
    for row, colour in zip(plan.devices, cycle(DEVICES)):
        held = [(place[part], row.share, f"{part}: {gigabytes(size[part] * row.share)}") for part in row.parts]
        if row.device.name == plan.draft_device:
            held.append((draft, 1.0, f"draft {plan.draft.name}: {gigabytes(row.draft)} with its cache"))
        bars.append(
            {
                "type": "bar",
                "name": safe(row.device.name),
                "x": [x for x, _, _ in held],
                "y": [share for _, share, _ in held],
                "marker": {"color": colour, "line": {"width": 0}},
                "opacity": 1.0 if chosen in ("", row.device.name) else FAINT,
                "hovertext": [f"{safe(words)} on {safe(row.device.name)}" for _, _, words in held],
                "hoverinfo": "text",
            }
        )
    ticks = {0: short_name(names[0]).partition("_")[0], draft: "draft"} if names else {}
    every = max(1, plan.target.layers // 8)
    for i, name in enumerate(names):
        last = name.rpartition(".")[2]
        if last.isdigit() and int(last) and int(last) % every == 0 and draft - i > every / 2:  # each has room
            ticks[i] = last
    layout = look(
        STRIP,
        STRIP_HEIGHT,
        margin={"t": 66, "b": 44, "l": 28},
        barmode="stack",
        bargap=0.12,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal", "itemclick": False},
        xaxis=axis(
            "layer", tickvals=list(ticks), ticktext=[safe(t) for t in ticks.values()], showgrid=False, tickangle=0
        ),
        yaxis={"visible": False, "range": [0, 1]},
    )
    return bars, layout


def short_name(part: str) -> str:
    """The last word of a part's name."""
    return part.rpartition(".")[2]
