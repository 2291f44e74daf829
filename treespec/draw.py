"""Static pictures for notebooks: a token tree as SVG, a generation as coloured text. No JavaScript, all text escaped.

Marks and colours are those of the whole package (Okabe-Ito, safe for colour-blind readers): accepted nodes filled
green, other kept nodes hollow blue, and for each reason a node died its own shape and colour.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import igraph

from treespec.tree import Reason, TokenTree

if TYPE_CHECKING:
    from treespec.events import Generation

GREY, BLUE, GREEN = "#999999", "#3B8FD0", "#009E73"
VERMILION, PURPLE, ORANGE, LIGHT = "#D55E00", "#CC79A7", "#E69F00", "#BBBBBB"
DEAD = {
    Reason.BELOW_TAU: ("×", VERMILION, "below τ"),
    Reason.ENTROPY_CAP: ("━", PURPLE, "parent too uncertain"),
    Reason.OVER_BUDGET: ("▽", ORANGE, "over budget"),
    Reason.TOO_DEEP: ("•", GREY, "too deep"),
}
LABELS_UP_TO = 80  # nodes; beyond, the text is on hover only
LEVEL = 70  # pixels between levels
PAGE = 1000  # pixels across that a big tree tries to fit into
STYLE = "font:12px system-ui,sans-serif;color:inherit;max-width:100%"
PAPER = "var(--jp-layout-color0, Canvas)"  # the page's own colour, light or dark


def tree_html(tree: TokenTree) -> str:
    """The tree as SVG: depth downwards, siblings left to right by draft rank, a legend of what occurs."""
    x, columns = _layout(tree)
    labelled = len(tree) <= LABELS_UP_TO
    gap = 92.0 if labelled else max(3.0, min(16.0, PAGE / columns))
    width = max(int(columns * gap) + 140, 360)
    height = int(tree.depth.max()) * LEVEL + 72
    at = [(110 + x[i] * gap, 36 + int(tree.depth[i]) * LEVEL) for i in range(len(tree))]
    parts = [_levels(tree, width), _edges(tree, at), *(_node(tree, i, at[i], gap) for i in range(len(tree)))]
    svg = f'<svg viewBox="0 0 {width} {height}" width="{width}" style="{STYLE}" role="img">{"".join(parts)}</svg>'
    return f'<div style="overflow-x:auto">{_caption(tree)}{svg}</div>'


def _layout(tree: TokenTree) -> tuple[list[float], float]:
    """Horizontal place of every node (0-based columns) by Reingold-Tilford, and the number of columns."""
    parent = tree.parent.tolist()
    graph = igraph.Graph(n=len(tree), edges=[(p, i) for i, p in enumerate(parent) if p >= 0])
    x = [point[0] for point in graph.layout_reingold_tilford(root=[0])]
    return [v - min(x) for v in x], max(x) - min(x) + 1


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
    out, accepted = [], set(tree.accepted)
    for i, p in enumerate(tree.parent.tolist()):
        if p < 0:
            continue
        (x1, y1), (x2, y2) = at[p], at[i]
        colour, thick = (GREEN, 3) if i in accepted else (GREY, 1)
        opacity = 1.0 if i in accepted else 0.25 + 0.75 * float(tree.logp[i].exp())
        out.append(
            f'<line x1="{x1:.0f}" y1="{y1}" x2="{x2:.0f}" y2="{y2}" stroke="{colour}" stroke-width="{thick}" '
            f'stroke-opacity="{opacity:.2f}"/>'
        )
    return "".join(out)


def _node(tree: TokenTree, i: int, at: tuple[float, int], gap: float) -> str:
    x, y = at
    why = Reason(int(tree.reason[i]))
    radius = min(3.0, gap / 2.5) + 6 * float(tree.log_path[i].exp()) ** 0.5
    if i == 0:
        mark = f'<rect x="{x - 6:.0f}" y="{y - 6}" width="12" height="12" fill="{GREY}"/>'
    elif i in tree.accepted:
        mark = f'<circle cx="{x:.0f}" cy="{y}" r="{radius:.1f}" fill="{GREEN}"/>'
    elif why == Reason.KEPT:
        hollow = f'fill="{PAPER}" stroke="{BLUE}" stroke-width="2"'
        mark = f'<circle cx="{x:.0f}" cy="{y}" r="{radius:.1f}" {hollow}/>'
    else:
        sign, colour, _ = DEAD[why]
        mark = f'<text x="{x:.0f}" y="{y + 5}" text-anchor="middle" font-size="16" fill="{colour}">{sign}</text>'
    text = ""
    if gap > 16:  # room for a label
        short = tree.label(i) if len(tree.label(i)) <= 10 else tree.label(i)[:9] + "…"
        probability = f" {float(tree.logp[i].exp()):.2f}" if i else ""
        text = (
            f'<text x="{x:.0f}" y="{y + 23}" text-anchor="middle" fill="currentColor" paint-order="stroke" '
            f'stroke="{PAPER}" stroke-width="4">{escape(short)}'
            f'<tspan fill="{GREY}" font-size="10">{probability}</tspan></text>'
        )
    return f"<g><title>{escape(_hover(tree, i))}</title>{mark}{text}</g>"


def _hover(tree: TokenTree, i: int) -> str:
    if i == 0:
        head = f"{tree.label(0)} (root: the last committed token)"
    else:
        head = f"{tree.label(i)}: p = {float(tree.logp[i].exp()):.3f}, path P = {float(tree.log_path[i].exp()):.4f}"
    bits = float(tree.entropy[i])
    head += "" if bits != bits else f", entropy here {bits:.2f} bits"
    why = Reason(int(tree.reason[i]))
    fate = "accepted" if i in tree.accepted else ("verified" if why == Reason.KEPT else f"pruned: {DEAD[why][2]}")
    return head if i == 0 else f"{head}; {fate}"


def _caption(tree: TokenTree) -> str:
    items = [f'<span style="color:{GREEN}">●</span> accepted {len(tree.accepted)}']
    items.append(f'<span style="color:{BLUE}">○</span> verified {tree.candidates - len(tree.accepted)}')
    for why, (sign, colour, words) in DEAD.items():
        count = int((tree.reason == why).sum())
        if count:
            items.append(f'<span style="color:{colour}">{sign}</span> {words} {count}')
    return f'<div style="{STYLE}">{" &nbsp; ".join(items)}</div>'


def generation_html(generation: Generation) -> str:
    """New text with accepted tokens underlined in green and bonus tokens dotted, and the sums in one line."""
    kinds = [(event.index, k < len(event.path)) for event in generation.steps for k in range(len(event.tokens))]
    spans = []
    for text, (step, accepted) in zip(_token_texts(generation), kinds):
        style = f"border-bottom:3px solid {GREEN}" if accepted else f"border-bottom:3px dotted {GREY}"
        spans.append(f'<span style="{style}" title="step {step}">{escape(text)}</span>')
    legend = (
        f'<span style="border-bottom:3px solid {GREEN}">guessed by the draft, accepted</span> &nbsp; '
        f'<span style="border-bottom:3px dotted {GREY}">given by the target</span>'
    )
    body = f'<div style="white-space:pre-wrap;line-height:1.8;font-size:14px">{"".join(spans)}</div>'
    sums = escape(str(generation.stats))
    return f'<div style="{STYLE}">{body}<p style="margin-top:.8em">{legend}</p><p>{sums}</p></div>'


def _token_texts(generation: Generation) -> list[str]:
    """What each token adds to the text: differences of growing prefixes, since a character may span tokens."""
    tokens = generation.tokens
    if generation.tokenizer is None:
        return [f"{token} " for token in tokens]
    out, before = [], ""
    for end in range(1, len(tokens) + 1):
        text = generation.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        text = text if end == len(tokens) else text.rstrip("\ufffd")  # half a character waits for its other half
        out.append(text[len(before) :])
        before = text if len(text) > len(before) else before
    return out
