"""Where the nodes of a drawn tree lie, how large they are, and which of their texts have room."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from treespec.marks import CUT, LABELS_UP_TO, chances, level_entropy, places, short, token_text
from treespec.plots.style import TITLE
from treespec.tree import Reason, TokenTree

FOOT = 40  # pixels below, for the legend
GUTTER = 122  # pixels for the levels' names and entropies
LETTER = 6.6  # pixels of a label's letter
ROOMY = 44  # pixels between levels from which labels stand below their nodes, else beside


class Place:
    """Where nodes lie, in columns and levels, and how many pixels these are."""

    def __init__(self, tree: TokenTree, bonus: bool, width: int, height: int) -> None:
        self.x, self.depth = places(tree, bonus)
        self.columns = float(self.x.max()) + 1
        self.across = max(width - 16, GUTTER + 100)
        self.gap = (self.across - GUTTER) / (self.columns + 0.4)
        self.level = (height - TITLE - FOOT) / (float(self.depth.max()) + 1.15)
        path = chances(tree.log_path)
        most = max(2.5, min(18.0, 0.9 * self.gap, 0.5 * self.level))
        self.size = np.minimum(5 + 13 * np.sqrt(path), most)
        if bonus:
            self.size = np.append(self.size, max(9.0, min(15.0, 2 * self.gap)))
        self.below = self.level >= ROOMY
        # edges leave below the texts of their level
        self.stub = min(0.5, (float(self.size.max()) / 2 + 19) / self.level) if self.below else 0.0

    def bits_range(self, tree: TokenTree) -> float:
        """The scale of the entropy bars, in bits."""
        return max(6.0, *(b for b in level_entropy(tree) if b == b), 0.0)

    def points(self, nodes: Iterable[int]) -> tuple[list[float], list[float]]:
        """Their coordinates."""
        index = list(nodes)
        return self.x[index].tolist(), self.depth[index].astype(float).tolist()


def labels_of(tree: TokenTree, at: Place, bonus: int | None) -> list[str]:
    """Texts of nodes, and of the star behind them, where there is room, important ones first; the rest is on hover."""
    names = [tree.label(i) for i in range(len(tree))] if len(tree) <= LABELS_UP_TO else []
    if bonus is not None and names:
        names.append(token_text(tree, bonus))
    out = [""] * len(at.x)
    taken: dict[int, list[tuple[float, float]]] = {}
    pixels, half = at.x * at.gap, at.size / 2
    if not at.below:
        for x, r, d in zip(pixels, half, at.depth.tolist()):
            taken.setdefault(d, []).append((x - r, x + r))
    for i in sorted(range(len(names)), key=lambda i: _importance(tree, i)):
        row = taken.setdefault(int(at.depth[i]), [])
        for most in (CUT, 7, 5, 3):
            cut = short(names[i], most)
            wide = LETTER * len(cut) + 4
            left = pixels[i] - wide / 2 if at.below else pixels[i] + half[i] + 3
            if all(left + wide <= a or left >= b for a, b in row):
                out[i] = cut
                row.append((left, left + wide))
                break
    return out


def _importance(tree: TokenTree, i: int) -> tuple[int, float]:
    """What to sort by: root and accepted path, the star, verified nodes, dead ones; likely ones first."""
    if i == len(tree):
        return 1, 0.0
    kept = tree.reason[i] == Reason.KEPT
    return (0 if i == 0 or i in tree.accepted else 2 if kept else 3), -float(tree.log_path[i])
