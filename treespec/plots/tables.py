"""What a figure shows, as text: the article's table with the setting in hand, and any figure's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from treespec.marks import strategy_mark
from treespec.plots.style import INK, RULE
from treespec.table import COLUMNS, cells

CELL = f"padding:3px 10px;border-bottom:1px solid {RULE};white-space:nowrap"


def table_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """The article's table of rows as :func:`treespec.table.article_table` and a score give them.

    Columns that no row knows are left out; a row whose ``strategy`` is ``YOU`` stands out.
    """
    written = [cells(row) for row in rows]
    shown = [name for name in COLUMNS if any(row[name] for row in written)]
    lines = []
    for row, texts in zip(rows, written):
        look = strategy_mark(str(row["policy"]))
        sign = f'<span style="color:{look.ink}" title="{escape(look.words)}">{look.sign}</span> '
        line = "".join(_cell(name, texts[name], sign if name == shown[0] else "") for name in shown)
        strong = ' style="font-weight:bold"' if row.get("strategy") == "YOU" else ""
        lines.append(f"<tr{strong}>{line}</tr>")
    return _table("article", "".join(_cell(name, name, tag="th") for name in shown), lines)


def _cell(column: str, text: str, sign: str = "", tag: str = "td") -> str:
    side = "left" if column in ("strategy", "policy") else "right"
    return f'<{tag} style="{CELL};text-align:{side}">{sign}{escape(text)}</{tag}>'


def _table(kind: str, head: str, lines: Sequence[str]) -> str:
    style = "border-collapse:collapse;font:12px system-ui,sans-serif;color:inherit;margin:0"
    return (
        f'<div style="overflow-x:auto"><table class="treespec-{kind}" style="{style};border-top:1px solid {INK}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def figure_html(figure: go.Figure) -> str:
    """The points of a figure as text, one line each: what a hover box would say, trace by trace."""
    lines = []
    for trace in figure.data:
        hover, x, y = trace.hovertext, trace.x, trace.y
        if trace.hoverinfo != "text" or x is None or isinstance(hover, str) or hover is None:
            continue
        for said, a, b in zip(hover, x, y):
            parts = [part for part in str(said).split("<br>") if part]
            place = f"{_number(a)}, {_number(b)}"
            lines.append(f'<tr><td style="{CELL}">{place}</td><td style="{CELL}">{"; ".join(parts)}</td></tr>')
    return _table("points", f'<th style="{CELL}">x, y</th><th style="{CELL};text-align:left">point</th>', lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
