"""Static pictures for notebooks: a token tree as SVG, a generation as coloured text. No JavaScript, all text escaped.

Marks, colours and layout are those of the whole package (:mod:`treespec.marks`).
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from treespec.marks import (
    ACCEPTED,
    BONUS,
    DARK,
    DEAD,
    GREEN,
    GREY,
    KEPT,
    LABELS_UP_TO,
    LIGHT,
    ROOT,
    bonus_text,
    chances,
    hover_text,
    last_accepted,
    node_mark,
    places,
    short,
    token_text,
)
from treespec.spans import Written
from treespec.tree import Reason, TokenTree

if TYPE_CHECKING:
    from treespec.events import Generation

LEVEL = 70  # pixels between levels
PAGE = 1000  # pixels across that a big tree tries to fit into
STYLE = "font:12px system-ui,sans-serif;color:inherit;max-width:100%"
PAPER = "var(--jp-layout-color0, Canvas)"  # the page's own colour, light or dark


def tree_html(tree: TokenTree, bonus: int | None = None) -> str:
    """The tree as SVG: depth downwards, siblings left to right by draft rank, a legend of what occurs.

    Args:
        tree: with reasons and accepted nodes.
        bonus: the bonus token, drawn as a star below the last accepted node.
    """
    x, depth = places(tree, bonus is not None)
    columns = float(x.max()) + 1
    labelled = len(tree) <= LABELS_UP_TO
    gap = 92.0 if labelled else max(3.0, min(16.0, PAGE / columns))
    width = max(int(columns * gap) + 140, 360)
    height = int(depth.max()) * LEVEL + 72
    at = [(110 + x[i] * gap, 36 + int(depth[i]) * LEVEL) for i in range(len(x))]
    parts = [_levels(tree, width), _edges(tree, at), *(_node(tree, i, at[i], gap) for i in range(len(tree)))]
    if bonus is not None:
        parts.append(_bonus(tree, bonus, at[last_accepted(tree)], at[-1], gap))
    svg = f'<svg viewBox="0 0 {width} {height}" width="{width}" style="{STYLE}" role="img">{"".join(parts)}</svg>'
    return f'<div style="overflow-x:auto">{_caption(tree, bonus)}{svg}</div>'


def _levels(tree: TokenTree, width: int) -> str:
    out = []
    for depth in range(1, int(tree.depth.max()) + 1):
        y = 36 + depth * LEVEL
        out.append(
            f'<line x1="0" x2="{width}" y1="{y}" y2="{y}" stroke="{LIGHT}" stroke-opacity=".2"/>'
            f'<text x="2" y="{y - 4}" fill="{GREY}" font-size="10">draft step {depth}</text>'
        )
    return "".join(out)


def _edges(tree: TokenTree, at: list[tuple[float, int]]) -> str:
    out, accepted, chance = [], set(tree.accepted), chances(tree.logp)
    for i, p in enumerate(tree.parent.tolist()):
        if p < 0:
            continue
        (x1, y1), (x2, y2) = at[p], at[i]
        colour, thick = (GREEN, 3) if i in accepted else (GREY, 1)
        opacity = 1.0 if i in accepted else 0.25 + 0.75 * float(chance[i])
        out.append(
            f'<line x1="{x1:.0f}" y1="{y1}" x2="{x2:.0f}" y2="{y2}" stroke="{colour}" stroke-width="{thick}" '
            f'stroke-opacity="{opacity:.2f}"/>'
        )
    return "".join(out)


def _node(tree: TokenTree, i: int, at: tuple[float, int], gap: float) -> str:
    x, y = at
    look, why = node_mark(tree, i), Reason(int(tree.reason[i]))
    radius = min(3.0, gap / 2.5) + 6 * float(chances(tree.log_path[i])) ** 0.5
    if look is ROOT:
        mark = f'<rect x="{x - 6:.0f}" y="{y - 6}" width="12" height="12" fill="{look.colour}"/>'
    elif look is ACCEPTED:
        mark = f'<circle cx="{x:.0f}" cy="{y}" r="{radius:.1f}" fill="{look.colour}"/>'
    elif look is KEPT:
        hollow = f'fill="{PAPER}" stroke="{look.colour}" stroke-width="2"'
        mark = f'<circle cx="{x:.0f}" cy="{y}" r="{radius:.1f}" {hollow}/>'
    else:
        faint = ' fill-opacity=".5"' if why == Reason.ENTROPY_CAP else ""
        mark = _sign(look.sign, x, y + 5, look.colour, faint)
    cap = DEAD[Reason.ENTROPY_CAP]
    if bool(((tree.parent == i) & (tree.reason == Reason.ENTROPY_CAP)).any()):
        mark += f'<path d="M{x - 9:.0f} {y + 10}h18" stroke="{cap.colour}" stroke-width="4" class="cap"/>'
    probability = f" {float(tree.logp[i].exp()):.2f}" if i else ""
    text = _text(tree.label(i), probability, x, y) if gap > 16 else ""
    return f"<g><title>{escape(hover_text(tree, i))}</title>{mark}{text}</g>"


def _sign(sign: str, x: float, y: float, colour: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-size="16" fill="{colour}"{more}>{sign}</text>'


def _text(label: str, probability: str, x: float, y: float) -> str:
    return (
        f'<text x="{x:.0f}" y="{y + 23:.0f}" text-anchor="middle" fill="currentColor" paint-order="stroke" '
        f'stroke="{PAPER}" stroke-width="4">{escape(short(label))}'
        f'<tspan fill="{GREY}" font-size="10">{probability}</tspan></text>'
    )


def _bonus(tree: TokenTree, token: int, above: tuple[float, int], at: tuple[float, int], gap: float) -> str:
    (x1, y1), (x, y) = above, at
    line = f'<line x1="{x1:.0f}" y1="{y1}" x2="{x:.0f}" y2="{y}" stroke="{GREY}" stroke-dasharray="3 3"/>'
    star = _sign(BONUS.sign, x, y + 6, BONUS.colour, f' stroke="{DARK}" stroke-width=".8"')
    text = _text(token_text(tree, token), "", x, y) if gap > 16 else ""
    return f"<g><title>{escape(bonus_text(tree, token))}</title>{line}{star}{text}</g>"


def _caption(tree: TokenTree, bonus: int | None) -> str:
    counts = {ACCEPTED: len(tree.accepted), KEPT: tree.candidates - len(tree.accepted)}
    items = [
        _item(look.sign, look.ink, f"{words} {counts[look]}")
        for look, words in ((ACCEPTED, "accepted"), (KEPT, "verified"))
    ]
    if bonus is not None:
        items.append(_item(BONUS.sign, BONUS.ink, "bonus"))
    for why, look in DEAD.items():
        count = int((tree.reason == why).sum())
        if count:
            items.append(_item(look.sign, look.ink, f"{look.words} {count}"))
    return f'<div style="{STYLE}">{" &nbsp; ".join(items)}</div>'


def _item(sign: str, colour: str, words: str) -> str:
    return f'<span style="color:{colour}">{sign}</span> {words}'


def generation_html(generation: Generation) -> str:
    """New text with accepted, bonus and plain tokens told apart, and the sums in one line."""
    written = Written(generation.tokenizer)
    for event in generation.steps:
        written.add(event)
    sums = escape(str(generation.stats))
    return f'<div style="{STYLE}">{written.html()}<p style="margin-top:.8em">{written.legend()}</p><p>{sums}</p></div>'
