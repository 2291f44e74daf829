"""The token tree as a live figure: what the draft grew, what was verified, and why the rest died."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from treespec.marks import (
    ACCEPTED,
    BLUE,
    BONUS,
    DARK,
    DEAD,
    GREEN,
    GREY,
    KEPT,
    PURPLE,
    ROOT,
    Mark,
    bonus_text,
    chances,
    hover_text,
    last_accepted,
    level_entropy,
    node_mark,
)
from treespec.plots.placing import FOOT, GUTTER, LETTER, Place, labels_of
from treespec.plots.style import INK, RULE, TITLE, Parts, figure, look, note, safe
from treespec.tree import Reason, TokenTree

QUESTION = "What did the draft grow here, and what died?"
FAINTNESS = (0.2, 0.4, 0.65, 1.0)  # of edges, by the node's own probability
STEPS = (0.1, 0.3, 0.6)  # where one ends and the next begins
KINDS: tuple[Mark, ...] = (ROOT, ACCEPTED, KEPT, *DEAD.values())


def tree_figure(
    tree: TokenTree,
    *,
    bonus: int | None = None,
    selected: int | None = None,
    title: str = QUESTION,
    width: int = 620,
    height: int = 430,
) -> go.Figure:
    """The tree: depth downwards, siblings left to right by draft rank.

    Area grows with path probability, edges fade with the node's own. At the left every draft step has the mean entropy
    of the nodes it expanded as a bar. Hover tells everything; up to 80 nodes the texts that have room are shown.
    Every point's ``customdata`` is its node's index.

    Args:
        tree: with reasons and accepted nodes, e.g. a :attr:`treespec.StepEvent.tree`.
        bonus: the bonus token, drawn as a star below the last accepted node.
        selected: a node to be ringed.
        title: of the figure.
        width: pixels that the figure will have; marks and labels are sized for it.
        height: pixels.
    """
    return figure(tree_parts(tree, bonus=bonus, selected=selected, title=title, width=width, height=height))


def tree_parts(
    tree: TokenTree,
    *,
    bonus: int | None = None,
    selected: int | None = None,
    title: str = QUESTION,
    width: int = 620,
    height: int = 430,
) -> Parts:
    """Traces and layout of :func:`tree_figure`; always as many traces, so that a figure can be redrawn in place."""
    at = Place(tree, bonus is not None, width, height)
    labels = labels_of(tree, at, bonus)
    traces = [
        *_edges(tree, at, labels),
        _star_edge(tree, at, labels, bonus),
        *_levels(tree, at),
        _caps(tree, at),
        _texts(at, labels),
        *(_nodes(tree, at, kind) for kind in KINDS),
        _star(tree, at, bonus),
        _ring(at, selected),
    ]
    deepest = int(at.depth.max())
    share = GUTTER / at.across
    layout = look(
        title,
        height,
        margin={"l": 8, "r": 8, "t": TITLE, "b": FOOT},
        annotations=[_legend(tree, bonus, at.across)],
        xaxis={"visible": False, "domain": [share, 1], "range": [-0.7, at.columns - 0.3], "fixedrange": False},
        xaxis2={"visible": False, "domain": [0, share], "range": [0, at.bits_range(tree)], "fixedrange": True},
        yaxis={"visible": False, "range": [deepest + 0.7, -0.45]},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": d, "y1": d, "line": {"color": RULE, "width": 1}}
            for d in range(1, int(tree.depth.max()) + 1)
        ],
        bargap=0,
    )
    return traces, layout


def _edges(tree: TokenTree, at: Place, labels: list[str]) -> list[dict[str, Any]]:
    """Lines by faintness, then the accepted path's."""
    lines: list[tuple[list[float | None], list[float | None]]] = [([], []) for _ in range(len(FAINTNESS) + 1)]
    bins = np.searchsorted(STEPS, chances(tree.logp), side="right").tolist()
    accepted = set(tree.accepted)
    stub = at.stub if any(labels) else 0.0
    for i, p in enumerate(tree.parent.tolist()):
        if p < 0:
            continue
        xs, ys = lines[len(FAINTNESS) if i in accepted else bins[i]]
        x1, x2, y1, y2 = at.x[p], at.x[i], float(at.depth[p]), float(at.depth[i])
        if stub and not labels[p]:
            xs.append(x1)
            ys.append(y1)
        xs.extend((x1, x2, None))
        ys.extend((y1 + stub, y2, None))
    looks = [(GREY, 1.2, faint) for faint in FAINTNESS] + [(GREEN, 3.5, 1.0)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": xs,
            "y": ys,
            "line": {"color": colour, "width": wide},
            "opacity": opacity,
            "hoverinfo": "skip",
        }
        for (xs, ys), (colour, wide, opacity) in zip(lines, looks)
    ]


def _star_edge(tree: TokenTree, at: Place, labels: list[str], bonus: int | None) -> dict[str, Any]:
    x, y = ([], []) if bonus is None else at.points([last_accepted(tree), len(tree)])
    if y and any(labels):
        y[0] += at.stub
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"color": GREY, "width": 1.2, "dash": "dot"},
        "hoverinfo": "skip",
    }


def _levels(tree: TokenTree, at: Place) -> list[dict[str, Any]]:
    """Names of the draft steps, and their entropies as bars."""
    bits = level_entropy(tree)
    steps = list(range(1, len(bits) + 1))
    said = [f"draft step {d}" + ("" if b != b else f" · {b:.1f} bit") for d, b in zip(steps, bits)]
    hover = [f"{s}: mean entropy of the nodes that this draft forward expanded" for s in said]
    bars = {
        "type": "bar",
        "orientation": "h",
        "xaxis": "x2",
        "x": [0.0 if b != b else b for b in bits],
        "y": [d + 4 / at.level for d in steps],
        "width": 6 / at.level,
        "marker": {"color": BLUE, "opacity": 0.6},
        "hovertext": hover,
        "hoverinfo": "text",
    }
    names = {
        "type": "scatter",
        "mode": "text",
        "xaxis": "x2",
        "x": [0] * len(steps),
        "y": steps,
        "text": said,
        "textposition": "top right",
        "textfont": {"size": 10, "color": INK},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }
    return [bars, names]


def _caps(tree: TokenTree, at: Place) -> dict[str, Any]:
    """The dash on every parent that was too uncertain to be expanded."""
    parents = sorted(set(tree.parent[tree.reason == Reason.ENTROPY_CAP].tolist()))
    x, y = at.points(parents)
    wide = [float(min(w + 9, max(4.0, 0.8 * at.gap))) for w in at.size[parents]]
    bits = tree.entropy.tolist()
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": {"symbol": "line-ew", "size": wide, "line": {"color": PURPLE, "width": 4}},
        "hovertext": [f"too uncertain to be expanded: {bits[p]:.2f} bits" for p in parents],
        "hoverinfo": "text",
        "customdata": parents,
    }


def _texts(at: Place, labels: list[str]) -> dict[str, Any]:
    shown = [i for i, text in enumerate(labels) if text]
    x, y = at.points(shown)
    half = (at.size[shown] / 2).tolist()
    if at.below:
        y = [v + (r + 9) / at.level for v, r in zip(y, half)]
    else:
        x = [v + (r + 4) / at.gap for v, r in zip(x, half)]
    return {
        "type": "scatter",
        "mode": "text",
        "x": x,
        "y": y,
        "text": [safe(labels[i]) for i in shown],
        "textposition": "middle center" if at.below else "middle right",
        "textfont": {"size": 11, "color": INK},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def _nodes(tree: TokenTree, at: Place, kind: Mark) -> dict[str, Any]:
    mine = [i for i in range(len(tree)) if node_mark(tree, i) is kind]
    x, y = at.points(mine)
    size = at.size[mine]
    thin = kind.symbol in ("x-thin", "line-ew")
    marker: dict[str, Any] = {"symbol": kind.symbol, "color": kind.colour, "opacity": 1.0}
    if kind is DEAD[Reason.ENTROPY_CAP]:
        marker["opacity"] = 0.45
    if kind is DEAD[Reason.TOO_DEEP] or kind is DEAD[Reason.NOT_PROPOSED]:
        size = np.minimum(size, 6)
    elif kind is not ACCEPTED and kind is not KEPT:
        size = np.minimum(np.maximum(size, 8), max(4.0, 0.9 * at.gap))
    marker["size"] = size.tolist()
    marker["line"] = {"width": 2.2 if thin else (2 if kind is KEPT else 0), "color": kind.colour}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": marker,
        "hovertext": [safe(hover_text(tree, i)).replace(": ", ":<br>", 1).replace("; ", "<br>") for i in mine],
        "hoverinfo": "text",
        "customdata": mine,
        "cliponaxis": False,
        "name": kind.words,
    }


def _star(tree: TokenTree, at: Place, bonus: int | None) -> dict[str, Any]:
    x, y = ([], []) if bonus is None else at.points([len(tree)])
    said = "" if bonus is None else safe(bonus_text(tree, bonus)).replace("; ", "<br>")
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": {
            "symbol": BONUS.symbol,
            "size": float(at.size[-1]),
            "color": BONUS.colour,
            "line": {"color": DARK, "width": 1},
        },
        "hovertext": [said] * len(x),
        "hoverinfo": "text",
        "cliponaxis": False,
        "name": BONUS.words,
    }


def _ring(at: Place, selected: int | None) -> dict[str, Any]:
    x, y = at.points([] if selected is None else [selected])
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": {"symbol": "circle-open", "size": 24, "color": INK, "line": {"color": INK, "width": 3}},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def _legend(tree: TokenTree, bonus: int | None, across: float) -> dict[str, Any]:
    """What occurs in this tree, with its number, in lines that fit."""
    counts = {kind: sum(node_mark(tree, i) is kind for i in range(1, len(tree))) for kind in KINDS[1:]}
    items = [(kind, f"{kind.words} {n}") for kind, n in counts.items() if n]
    if bonus is not None:
        items.insert(1, (BONUS, "bonus"))
    said = [f'<span style="color:{kind.ink}">{kind.sign}</span> {words}' for kind, words in items]
    letters = sum(len(words) + 5 for _, words in items)
    half = len(said) if letters * LETTER < across else (len(said) + 1) // 2
    lines = ["   ".join(line) for line in (said[:half], said[half:]) if line]
    return note("<br>".join(lines), x=0, y=0, xanchor="left", yanchor="bottom", yshift=-FOOT + 2, align="left")
