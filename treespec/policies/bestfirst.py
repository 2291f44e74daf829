"""The nodes of largest path probability, whatever the shape: DySpec's greedy heap for deterministic children."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from treespec.policies.base import (
    Decision,
    Frontier,
    Policy,
    number,
    over_budget,
    present_children,
    reasons,
    top_nodes,
    whole,
)
from treespec.policies.space import Real, Space, Whole


@dataclass(frozen=True)
class BestFirst(Policy):
    """The ``budget`` nodes of largest path probability among those above ``floor``.

    Among all trees of a size this one has the largest sum of path probabilities, so the most expected tokens if the
    draft is calibrated. Grown level by level: a node that can no longer be among the best is not expanded, and neither
    is one whose children could only fall below the floor, so that the last levels are not paid for in vain.
    Cost per step: at most ``depth`` draft forwards, one target forward over at most budget + 1 nodes.

    Args:
        budget: most candidate nodes in one verification, root excluded.
        floor: least path probability of a node.
        depth: most draft levels.
        grow: least path probability of a node that is expanded; what a draft forward has to be worth.
    """

    name: ClassVar[str] = "bestfirst"
    source: ClassVar[str] = "Xiong et al. 2024 (DySpec), arXiv 2410.11744"
    space: ClassVar[Space] = {
        "budget": Whole(1, 64, log=True),
        "floor": Real(0.001, 0.5, log=True),
        "depth": Whole(1, 10),
        "grow": Real(0.001, 0.8, log=True),
    }

    budget: int = 48
    floor: float = 0.005
    depth: int = 10
    grow: float = 0.0

    def __post_init__(self) -> None:
        whole("budget", self.budget, 1)
        number("floor", self.floor, 0, 1)
        whole("depth", self.depth, 1, 64)
        number("grow", self.grow, 0, 1)

    @property
    def levels(self) -> int:
        """Most draft levels."""
        return min(self.depth, self.budget)

    @property
    def width(self) -> int:
        """Most children of a node that could matter."""
        return min(self.budget, 64)

    def decide(self, frontier: Frontier) -> Decision:
        """Keep children above the floor that can still be within the budget."""
        proposed = present_children(frontier, self.width)
        path = frontier.child_log_path()
        below = proposed & (path < (math.log(self.floor) if self.floor > 0 else -math.inf))
        over = over_budget(frontier, path, proposed & ~below, self.budget)
        kept = proposed & ~below & ~over
        worth = path >= (math.log(max(self.grow, self.floor)) if max(self.grow, self.floor) > 0 else -math.inf)
        return Decision(reasons(proposed, over_budget=over, below_tau=below), kept & worth)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The ``budget`` nodes of largest path probability."""
        return top_nodes(score, kept, self.budget)
