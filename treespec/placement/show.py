"""A plan for people: a table in the terminal, plain text, and a bar per device in a notebook. All text is escaped."""

from __future__ import annotations

from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from rich.table import Table

from treespec.console import plain_console
from treespec.draw import STYLE
from treespec.marks import BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, VERMILION

if TYPE_CHECKING:
    from treespec.placement.layout import DevicePlan, PlacementPlan

# what a device's bytes are, in the order of the bar
SHARES = (
    ("weights", "target weights", BLUE),
    ("cache", "target cache", GREEN),
    ("workspace", "work space", ORANGE),
    ("draft", "draft", PURPLE),
    ("reserve", "reserve", GREY),
)


def gigabytes(size: float) -> str:
    """``35.3 GB``; MB below one."""
    if size == float("inf"):
        return "–"
    return f"{size / 1e9:,.1f} GB" if abs(size) >= 1e9 else f"{size / 1e6:,.0f} MB"


def parts_of(row: DevicePlan, beside: bool) -> str:
    """What of the models lies on a device."""
    from treespec.placement.layout import span

    share = f"1/{round(1 / row.share)} of " if row.share < 1 else ""
    return ", ".join(filter(None, [f"{share}{span(row.parts)}" if row.parts else "", "draft" if beside else ""])) or "–"


def sizes(row: DevicePlan) -> dict[str, float]:
    """Bytes of a device by what they are for, in the order of :data:`SHARES`."""
    return {name: row.device.reserve if name == "reserve" else getattr(row, name) for name, _, _ in SHARES}


def headline(plan: PlacementPlan) -> str:
    """Models, context and batch in one line."""
    draft = plan.draft.name if plan.draft.kind == "none" else f"{plan.draft.name} ({_size(plan.draft.parameters)})"
    return (
        f"{plan.target.name} ({_size(plan.target.parameters)}, {plan.target.dtype}) with draft {draft}; context "
        f"{plan.load.context:,}, batch {plan.load.batch}, budget {plan.load.budget}"
    )


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def plan_table(plan: PlacementPlan) -> Table:
    """A row per device."""
    table = Table(title=headline(plan), caption=plan.verdict, title_justify="left", caption_justify="left")
    table.add_column("device", no_wrap=True)
    for head in ("has", *(name for name, _, _ in SHARES), "free"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("holds")
    for row in plan.devices:
        numbers = [gigabytes(row.device.memory), *map(gigabytes, sizes(row).values()), gigabytes(row.free)]
        table.add_row(row.device.name, *numbers, parts_of(row, row.device.name == plan.draft_device))
    return table


def plan_text(plan: PlacementPlan) -> str:
    """The table as plain text."""
    console = plain_console(160, file=StringIO())
    console.print(plan_table(plan))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip()


def plan_html(plan: PlacementPlan) -> str:
    """A bar per device, its memory across, with the verdict above and a legend below."""
    most = max((max(r.device.memory, r.used) for r in plan.devices if r.device.memory != float("inf")), default=1.0)
    colour = GREEN if plan.fits else VERMILION
    rows = "".join(_bar(plan, row, most) for row in plan.devices)
    legend = " &nbsp; ".join(f'<span style="color:{shade}">■</span> {words}' for _, words, shade in SHARES)
    return (
        f'<div style="{STYLE}"><p>{escape(headline(plan))}</p>'
        f'<p style="border-left:4px solid {colour};padding-left:8px">{escape(plan.verdict)}</p>{rows}'
        f'<p style="margin-top:6px">{legend}</p></div>'
    )


def _bar(plan: PlacementPlan, row: DevicePlan, most: float) -> str:
    known = row.device.memory != float("inf")
    pieces = "".join(
        f'<div title="{escape(words)}: {gigabytes(size)}" '
        f'style="width:{100 * size / most:.2f}%;background:{shade}"></div>'
        for (_, words, shade), size in zip(SHARES, sizes(row).values())
    )
    edge = f"width:{100 * row.device.memory / most:.2f}%" if known else "width:100%"
    over = (
        f'<b style="color:{VERMILION}">{gigabytes(-row.free)} short</b>'
        if row.free < 0
        else f"{gigabytes(row.free)} free"
    )
    words = f"{row.device.name} · {row.device.label} · {gigabytes(row.device.memory)} · "
    return (
        f'<div style="margin:6px 0"><div>{escape(words)}{over} · '
        f"{escape(parts_of(row, row.device.name == plan.draft_device))}</div>"
        f'<div style="position:relative;height:16px;background:none">'
        f'<div style="position:absolute;inset:0;display:flex">{pieces}</div>'
        f'<div style="position:absolute;top:0;bottom:0;left:0;{edge};border:1px solid {LIGHT};box-sizing:border-box">'
        f"</div></div></div>"
    )
