"""A placement plan to look at: what fills each device, which layers lie where, and whether it fits."""

from __future__ import annotations

from html import escape

import ipywidgets as w

from treespec.errors import InputError
from treespec.marks import GREEN, VERMILION
from treespec.placement import PlacementPlan
from treespec.placement.show import SHARES, gigabytes, headline, parts_of, sizes
from treespec.plots.placement import memory_parts, strip_parts
from treespec.widgets.base import Panel
from treespec.widgets.live_figure import LiveFigure

TEXT = "font:13px system-ui,sans-serif;line-height:1.5"
ALL = "all devices"


class PlacementView(Panel):
    """Devices and what fills them: weights, KV cache, the tree's work space, the draft, and what is left.

    Choosing a device, or clicking its bar, points out its layers.

    Args:
        plan: of :func:`treespec.plan`.

    Raises:
        InputError: for something that is no plan.
    """

    def __init__(self, plan: PlacementPlan) -> None:
        if not isinstance(plan, PlacementPlan):
            raise InputError(
                f"PlacementView shows a plan, treespec.plan(target, draft, devices); got a {type(plan).__name__}"
            )
        super().__init__()
        self.plan = plan
        names = [row.device.name for row in plan.devices]
        self.device = w.Dropdown(options=[ALL, *names], value=ALL, description="point out")
        self.memory = LiveFigure(memory_parts(plan))
        self.strip = LiveFigure(strip_parts(plan))
        self.on(self.device, self._point)
        for share in range(len(SHARES)):
            self.memory.on_point(share, self._clicked)
        self.lay_out(
            w.HTML(f'<div style="{TEXT}">{escape(headline(plan))}</div>'),
            w.HTML(verdict_html(plan)),
            w.HBox([self.memory]),
            self.device,
            w.HBox([self.strip]),
            w.HTML(table_html(plan)),
        )

    def _clicked(self, name: str) -> None:
        self.attempt(lambda: setattr(self.device, "value", name))

    def _point(self) -> None:
        chosen = "" if self.device.value == ALL else self.device.value
        self.strip.show(strip_parts(self.plan, chosen))


def verdict_html(plan: PlacementPlan) -> str:
    """The verdict, and what would make it fit."""
    colour = GREEN if plan.fits else VERMILION
    more = "".join(f"<li>{escape(remedy)}</li>" for remedy in plan.remedies)
    listed = f'<ul style="margin:.2em 0">{more}</ul>' if more else ""
    return f'<div style="{TEXT};border-left:4px solid {colour};padding-left:8px">{escape(plan.verdict)}{listed}</div>'


def table_html(plan: PlacementPlan) -> str:
    """A row per device, folded away."""
    heads = ("device", "has", *(words for _, words, _ in SHARES), "free", "holds")
    rows = [
        (
            row.device.name,
            gigabytes(row.device.memory),
            *map(gigabytes, sizes(row).values()),
            gigabytes(row.free),
            parts_of(row, row.device.name == plan.draft_device),
        )
        for row in plan.devices
    ]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{h}</th>" for h in heads)
    return (
        f'<details style="{TEXT}"><summary>as a table</summary><table class="dataframe"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></details>"
    )
