"""A token tree beside the attention mask and the position ids that its verification takes."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w
import numpy as np
import traitlets

from treespec.draw import STYLE, tree_html
from treespec.errors import InputError
from treespec.events import StepEvent
from treespec.marks import BLUE, GREEN, GREY, short
from treespec.tree import TokenTree
from treespec.widgets.base import Panel

HERE = Path(__file__).parent
LABELLED_UP_TO = 80  # nodes; beyond, rows carry no text
CELL, SMALL = 18, 5  # pixels of a cell, with labels and without
NAMES, CONTEXT = 150, 64  # pixels of the row names, of the text before the tree
HEAD = 40


class MaskCanvas(anywidget.AnyWidget):
    """Draws tree and mask side by side; hovering or choosing a node lights its row, and the other way round.

    Attributes:
        tree: SVG of the tree; its groups are the nodes, in order.
        mask: SVG of the mask; its groups of class ``row`` are the nodes, in order.
        parent: per node, -1 at the root: for the keys.
        said: per node, what it sees, in words.
        selected: the node that is lit, -1 for none.
    """

    _esm = HERE / "mask.js"
    _css = HERE / "mask.css"
    tree = traitlets.Unicode().tag(sync=True)
    mask = traitlets.Unicode().tag(sync=True)
    parent = traitlets.List(traitlets.Int()).tag(sync=True)
    said = traitlets.List(traitlets.Unicode()).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)

    def still(self) -> str:
        """Tree and mask as they are."""
        return f"{self.tree}{self.mask}"


class MaskView(Panel):
    """The tree, its attention mask and its position ids: which token may look at which?

    Mask and positions are those of the engine: the nodes that a step verifies, ``TokenTree.ancestors`` and
    ``TokenTree.positions``. Nodes that the policy pruned are left out, since the target never sees them.

    Args:
        tree: a tree, or a step with its tree.
        position: absolute position of the root, that is the number of tokens before it; a step knows its own.

    Attributes:
        tree: the verified nodes.
        visible: ``[n, n]`` bool, row i marks the nodes that node i attends to.
        positions: ``[n]`` int64 position ids.

    Raises:
        InputError: for something that is no tree, or a negative position.
    """

    def __init__(self, tree: TokenTree | StepEvent, position: int | None = None) -> None:
        if isinstance(tree, StepEvent):
            position = tree.position if position is None else position
            tree = tree.tree
        if not isinstance(tree, TokenTree):
            raise InputError(f"MaskView shows a TokenTree or a StepEvent; got a {type(tree).__name__}")
        start = 0 if position is None else position
        if start < 0:
            raise InputError(f"position must be 0 or more; got {start}")
        super().__init__()
        accepted = set(tree.accepted)
        self.tree, origin = tree.kept()
        self.tree.accepted = [i for i, old in enumerate(origin) if old in accepted]
        self.visible = self.tree.ancestors()
        self.positions = self.tree.positions(start)
        self.canvas = MaskCanvas(
            tree=tree_html(self.tree),
            mask=mask_svg(self.tree, self.visible, self.positions.tolist()),
            parent=self.tree.parent.tolist(),
            said=[sees(self.tree, self.visible, start, i) for i in range(len(self.tree))],
        )
        self.table = w.HTML(table_html(self.tree, self.visible, self.positions.tolist()))
        self.lay_out(self.canvas, self.table)

    @property
    def selected(self) -> int:
        """The node that is lit, -1 for none; set it to light another."""
        return int(self.canvas.selected)

    @selected.setter
    def selected(self, node: int) -> None:
        self.canvas.selected = node


def sees(tree: TokenTree, visible: np.ndarray, start: int, node: int) -> str:
    """What a node attends to, in words, not escaped."""
    chain = [tree.label(int(i)) for i in np.flatnonzero(visible[node])]
    hidden = len(tree) - len(chain)
    before = f"the {start} tokens before and " if start else ""
    return (
        f"{tree.label(node)} stands at position {start + int(tree.depth[node])} and sees {before}{' → '.join(chain)}; "
        f"{hidden} of the {len(tree)} nodes are hidden from it."
    )


def mask_svg(tree: TokenTree, visible: np.ndarray, positions: list[int]) -> str:
    """Nodes × (the text before, nodes): a filled cell where the row's node attends to the column's.

    Args:
        tree: of the n verified nodes.
        visible: ``[n, n]`` bool.
        positions: of the nodes; the root's is the number of tokens before it.
    """
    n, labelled = len(tree), len(tree) <= LABELLED_UP_TO
    cell = CELL if labelled else SMALL
    left = NAMES if labelled else 8
    grid, top = left + CONTEXT + 8, HEAD if labelled else 22
    width, height = grid + n * cell + 8, top + n * cell + 8
    heads = [
        f'<text x="{left + CONTEXT / 2}" y="12" text-anchor="middle">text before</text>',
        f'<text x="{grid}" y="12">nodes</text>',
    ]
    if labelled:
        heads.append(f'<text x="{left - 10}" y="12" text-anchor="end">node · position id</text>')
        heads += [
            f'<text x="{grid + (i + 0.5) * cell:.1f}" y="{top - 6}" text-anchor="middle" class="number">{i}</text>'
            for i in range(n)
        ]
    rows = [_row(tree, visible[i], positions, i, (left, grid, top + i * cell, cell, width)) for i in range(n)]
    light = f'<rect class="column" y="{top}" width="{cell}" height="{n * cell}" x="{grid}" data-step="{cell}"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="{STYLE}" role="img" class="mask" '
        f'aria-label="attention mask of {n} nodes">{"".join(heads)}{light}{"".join(rows)}</svg>'
    )


def _row(tree: TokenTree, visible: np.ndarray, positions: list[int], i: int, at: tuple[int, int, int, int, int]) -> str:
    left, grid, y, cell, width = at
    names = ""
    if left == NAMES:
        names = (
            f'<text x="{left - 44}" y="{y + cell - 5}" text-anchor="end">{escape(short(tree.label(i)))}</text>'
            f'<text x="{left - 38}" y="{y + cell - 5}" fill="{GREY}" class="number">{i}</text>'
            f'<text x="{left - 8}" y="{y + cell - 5}" text-anchor="end" class="position">{positions[i]}</text>'
        )
    before = ""
    if positions[0]:
        before = f'<rect x="{left}" y="{y + 1}" width="{CONTEXT}" height="{cell - 2}" fill="{GREY}" opacity=".55"/>'
    cells = "".join(
        f'<rect x="{grid + j * cell + 1}" y="{y + 1}" width="{cell - 2}" height="{cell - 2}" '
        f'fill="{GREEN if j == i else BLUE}" data-column="{j}" class="sees"/>'
        for j in np.flatnonzero(visible).tolist()
    )
    back = f'<rect class="back" x="0" y="{y}" width="{width}" height="{cell}"/>'
    return f'<g class="row" data-node="{i}">{back}{names}{before}{cells}</g>'


def table_html(tree: TokenTree, visible: np.ndarray, positions: list[int]) -> str:
    """The same as a table, folded away."""
    head = "".join(f"<th>{name}</th>" for name in ("node", "token", "parent", "position id", "sees nodes"))
    rows = ["".join(f"<td>{escape(str(c))}</td>" for c in cells) for cells in _cells(tree, visible, positions)]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<details style="{STYLE}"><summary>as a table</summary><table class="dataframe"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></details>"
    )


def _cells(tree: TokenTree, visible: np.ndarray, positions: list[int]) -> list[tuple[Any, ...]]:
    return [
        (i, tree.label(i), p if p >= 0 else "–", positions[i], ", ".join(map(str, np.flatnonzero(visible[i]).tolist())))
        for i, p in enumerate(tree.parent.tolist())
    ]
