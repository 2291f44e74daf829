"""The best static tree for an acceptance vector: Sequoia's dynamic programme, and the size that is fastest."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.cost import CostModel


@dataclass(frozen=True)
class StaticTree:
    """A tree known before any draft, root first, in breadth-first order.

    Args:
        parent: index of each node's parent, -1 at the root.
        rank: each node's place among its siblings.
        expected: accepted tokens per step plus the bonus, for the acceptance vector it was made for.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    expected: float

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Depth of each node."""
        depth = [0]
        for p in self.parent[1:]:
            depth.append(depth[p] + 1)
        return tuple(depth)

    @functools.cached_property
    def drawn(self) -> tuple[int, ...]:
        """Nodes expanded at each level: the widths of the draft forwards."""
        expanded = set(self.parent[1:])
        return tuple(np.bincount([self.depth[i] for i in expanded]).tolist()) if expanded else ()

    @functools.cached_property
    def slots(self) -> Tensor:
        """``[n + 1, width]`` int64: the child of node i with rank k, n where there is none; row n is that nowhere."""
        n = len(self.parent)
        table = torch.full((n + 1, max(self.rank) + 1), n, dtype=torch.long)
        parent, rank = torch.tensor([self.parent, self.rank])[:, 1:]
        table[parent, rank] = torch.arange(1, n)
        return table


@functools.lru_cache(maxsize=64)
def level_tree(widths: tuple[int, ...]) -> StaticTree:
    """The tree in which every node of level d has ``widths[d]`` children; what it would accept is not known."""
    parent, rank, level = [-1], [0], [0]
    for width in widths:
        below = []
        for node in level:
            for k in range(width):
                below.append(len(parent))
                parent.append(node)
                rank.append(k)
        level = below
    return StaticTree(tuple(parent), tuple(rank), math.nan)


class Programme:
    """Sequoia's recursion for all sizes and depths at once.

    ``value[l][m]`` is the largest expected number of tokens below and at a node that is certain to be reached, with m
    nodes (itself included) and at most l levels below it. A node of b children splits m - 1 among them; its b-th child
    with y nodes adds ``p[b] * value[l-1][y]`` and leaves the rest to the first b - 1. Time O(depth * ranks * budget²).

    Args:
        acceptance: ``p[rank]``, probability that a verified node's child of this rank is accepted.
        budget: most candidate nodes, root excluded.
        depth: most levels.
    """

    def __init__(self, acceptance: tuple[float, ...], budget: int, depth: int) -> None:
        size = budget + 1
        self.value = [np.minimum(np.arange(size + 1), 1).astype(float)]  # no nodes: 0; a node without children: 1
        self._children: list[np.ndarray] = []  # per level [m]: number of children
        self._share: list[np.ndarray] = []  # per level [b, m]: nodes of the b-th of b children
        left = np.arange(size + 1)[:, None] - np.arange(size + 1)  # m - y
        for _ in range(depth):
            exactly = [self.value[0]]  # [m], value with exactly b children; b = 0 is a leaf
            share = [np.zeros(size + 1, dtype=int)]
            for p in acceptance:
                options = np.where(left >= 1, exactly[-1][left.clip(min=0)] + p * self.value[-1], -np.inf)
                options[:, 0] = -np.inf  # a child has at least itself
                share.append(options.argmax(axis=1))
                exactly.append(options.max(axis=1))
            table = np.stack(exactly)
            table[:, 0] = 0.0  # no node, no value
            self._children.append(table.argmax(axis=0))
            self._share.append(np.stack(share))
            self.value.append(table.max(axis=0))

    def tree(self, budget: int, depth: int) -> StaticTree:
        """The best tree of at most ``budget`` candidates and ``depth`` levels."""
        parent, rank, todo = [-1], [0], [(0, budget + 1, depth)]
        for node, size, below in todo:  # grows while it is read: breadth first
            if below == 0:
                continue
            shares = []
            for b in range(int(self._children[below - 1][size]), 0, -1):
                shares.append(int(self._share[below - 1][b, size]))
                size -= shares[-1]
            for k, share in enumerate(reversed(shares)):
                todo.append((len(parent), share, below - 1))
                parent.append(node)
                rank.append(k)
        return StaticTree(tuple(parent), tuple(rank), float(self.value[depth][budget + 1]))


@functools.lru_cache(maxsize=64)
def best_tree(acceptance: tuple[float, ...], budget: int, depth: int) -> StaticTree:
    """The static tree of at most ``budget`` candidates and ``depth`` levels with the most expected tokens."""
    return Programme(acceptance, budget, depth).tree(budget, depth)


def best_size(acceptance: tuple[float, ...], cost: CostModel, budget: int = 64, depth: int = 12) -> tuple[int, int]:
    """The (budget, depth) whose best tree takes the least time per token (Sequoia, section 3.3).

    The time of a tree is its draft forwards at their widths, its verification and the overhead; (0, 0) means that
    plain decoding is faster than every tree.

    Args:
        acceptance: ``p[rank]``.
        cost: of the machine.
        budget: largest to try.
        depth: largest to try.
    """
    programme = Programme(acceptance, budget, depth)
    best, least = (0, 0), cost.verify(1) + cost.overhead
    for levels in range(1, depth + 1):
        for nodes in range(levels, budget + 1):
            tree = programme.tree(nodes, levels)
            seconds = sum(map(cost.draft, tree.drawn)) + cost.verify(len(tree.parent)) + cost.overhead
            if seconds / tree.expected < least * (1 - 1e-12):
                best, least = (nodes, levels), seconds / tree.expected
    return best
