"""Replaying policies whose tree is known before any draft, exact far beyond what was recorded.

Such a policy (:attr:`treespec.policies.Policy.shape`) looks at ranks alone. What it verifies and pays is the same at
every position but for the levels that there is room for, and what is accepted is read off the true continuation, which
is recorded with its ranks however improbable it is. So nothing depends on the improbable nodes that a recording leaves
out: they are counted, only their tokens are unknown. That needs a draft that has all these children at every node, a
head or a model over its whole vocabulary; an n-gram draft has not.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from treespec.policies.shape import StaticTree
from treespec.trace.index import Index


def fits(index: Index, tree: StaticTree) -> bool:
    """Whether every node of the recording was offered all the children that the tree takes."""
    return index.everywhere >= tree.slots.shape[1]


def lay(index: Index, rows: Tensor, tree: StaticTree, levels: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One static tree at the positions ``rows`` ``[B]``.

    Args:
        index: of a recording that :func:`fits`.
        rows: positions.
        tree: the policy's.
        levels: the policy's.

    Returns:
        ``accepted``, ``nodes``, ``widths``, ``truncated`` and ``kept`` as in :class:`treespec.trace.regrow.Grown`; what
        was not recorded is counted among the ``nodes`` only.
    """
    limit = index.room[rows].clamp(max=levels)
    below = torch.tensor(list(itertools.accumulate(torch.bincount(torch.tensor(tree.depth)).tolist())))
    drawn = torch.tensor(tree.drawn)
    widths = drawn * (torch.arange(len(drawn)) < limit[:, None])
    kept, deep = _recorded(index, rows, tree, limit)
    accepted = (index.is_true[kept.clamp(min=0)] & (kept >= 0)).sum(-1)
    truncated = (accepted >= index.caps.depth) & deep  # the text may go on where the recorder stopped
    return accepted, below[limit.clamp(max=len(below) - 1)], widths, truncated, kept


def _recorded(index: Index, rows: Tensor, tree: StaticTree, limit: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, M]`` the tree's recorded nodes, ascending, -1 for padding; ``[B]`` bool, it goes on below all of them."""
    nowhere = len(tree.parent)
    front, slot = index.root[rows][:, None], torch.zeros(len(rows), 1, dtype=torch.long)
    found = [front[:, :0]]
    deep = torch.zeros(len(rows), dtype=torch.bool)
    for depth in range(len(tree.drawn)):
        alive = (front >= 0) & (limit > depth)[:, None]
        own = front.clamp(min=0)
        count = torch.where(alive, index.count[own].long(), 0)
        child = index.first[own].long()[..., None] + torch.arange(max(int(count.max()), 1))  # [B, F, C]
        there = torch.arange(child.shape[-1]) < count[..., None]
        child = child.clamp(max=len(index.rank) - 1)
        rank = index.rank[child].long()
        inside = there & (rank < tree.slots.shape[1])
        where = tree.slots[slot[..., None], torch.where(inside, rank, 0)].masked_fill(~inside, nowhere)
        hit = (where < nowhere).flatten(1)
        width = max(int(hit.sum(-1).max()), 1)
        order = hit.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
        mine = hit.gather(-1, order)
        front = child.flatten(1).gather(-1, order).masked_fill(~mine, -1)
        slot = where.flatten(1).gather(-1, order).masked_fill(~mine, nowhere)
        found.append(front)
        if depth + 1 == index.caps.depth:
            deep = (limit > depth + 1) & (depth + 1 < len(tree.drawn))
            break
    kept = torch.cat(found, dim=-1)
    order = (kept >= 0).int().argsort(dim=-1, descending=True, stable=True)[:, : max(int((kept >= 0).sum(-1).max()), 0)]
    return kept.gather(-1, order), deep
