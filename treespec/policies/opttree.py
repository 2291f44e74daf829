"""Grow while a level adds enough expected tokens: OPT-Tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treespec.policies.base import (
    Decision,
    Frontier,
    Policy,
    number,
    over_budget,
    present_children,
    reasons,
    top_children,
    top_nodes,
    whole,
)
from treespec.policies.space import Real, Space, Whole


@dataclass(frozen=True)
class OptTree(Policy):
    """Keep the ``budget`` nodes of largest path probability; draw levels while they add enough (Wang et al. 2024).

    E is the sum of the ``budget`` largest path probabilities, the expected number of accepted tokens if the draft is
    calibrated (the paper's section 3). Each level offers its own ``budget`` best nodes; when it raises E by no more
    than ``delta``, drafting stops. That last level has been paid for, so its nodes stay in the choice.
    Here, too, a node that can no longer be among the best is not expanded, which changes no tree.
    Cost per step: at most ``depth`` draft forwards over at most ``budget`` nodes, one target forward over at most
    budget + 1 nodes.

    Args:
        budget: most candidate nodes in one verification, root excluded.
        delta: expected tokens that a level must add for another to be drawn; what a draft forward is worth, in tokens.
        depth: most draft levels.
    """

    name: ClassVar[str] = "opttree"
    source: ClassVar[str] = "Wang et al. 2024 (OPT-Tree, algorithm 1), arXiv 2406.17276"
    space: ClassVar[Space] = {"budget": Whole(1, 64, log=True), "delta": Real(0.02, 0.9), "depth": Whole(1, 10)}

    budget: int = 50
    delta: float = 0.5
    depth: int = 10

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        number("delta", self.delta, 0, 1)
        whole("depth", self.depth, 1, 64)

    @property
    def levels(self) -> int:
        """Most draft levels."""
        return min(self.depth, self.budget)

    @property
    def width(self) -> int:
        """Most children of a node that could matter."""
        return min(self.budget, 64)

    def decide(self, frontier: Frontier) -> Decision:
        """Take the level's best; go on from them if they raised the expected tokens by more than ``delta``."""
        path = frontier.child_log_path()
        proposed = top_children(path, present_children(frontier, self.width), self.budget)
        over = over_budget(frontier, path, proposed, self.budget)
        kept = proposed & ~over
        gain = self._expected(frontier, path.masked_fill(~kept, -torch.inf)) - self._expected(frontier)
        return Decision(reasons(proposed, over_budget=over), kept & (gain > self.delta)[:, None, None])

    def _expected(self, frontier: Frontier, new: Tensor | None = None) -> Tensor:
        """``[B]`` sum of the ``budget`` largest path probabilities so far, with those of ``new`` ``[B, F, K]``."""
        pool = frontier.pool if new is None else torch.cat([frontier.pool, new.flatten(1)], dim=-1)
        best: Tensor = pool.topk(min(self.budget, pool.shape[-1]), dim=-1).values
        return best.exp().sum(-1)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The ``budget`` nodes of largest path probability."""
        return top_nodes(score, kept, self.budget)
