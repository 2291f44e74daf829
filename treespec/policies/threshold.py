"""A fixed cumulative-confidence threshold and nothing else: the article's strategy C."""

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
class Threshold(Policy):
    """Expand a node while its path probability is at least ``tau``.

    Cost per step: up to ``depth`` draft forwards over the nodes that passed (at most 1/tau of them a level, since
    path probabilities of one level sum to at most 1), one target forward over at most budget + 1 nodes.

    Args:
        tau: cumulative-confidence threshold in (0, 1]; a node with ``exp(log_path) < tau`` is pruned.
        width: most children of a node.
        depth: most draft levels.
        budget: most candidate nodes in one verification, root excluded.
    """

    name: ClassVar[str] = "threshold"
    source: ClassVar[str] = "the article, strategy C"
    space: ClassVar[Space] = {
        "tau": Real(0.005, 0.6, log=True),
        "width": Whole(1, 8),
        "depth": Whole(1, 10),
        "budget": Whole(2, 96, log=True),
    }

    tau: float = 0.08
    width: int = 4
    depth: int = 6
    budget: int = 68

    def __post_init__(self) -> None:
        number("tau", self.tau, 0, 1, open_low=True)
        whole("width", self.width, 1, 1024)
        whole("depth", self.depth, 1, 64)
        whole("budget", self.budget, 1)

    @property
    def levels(self) -> int:
        """Most draft levels."""
        return self.depth

    def decide(self, frontier: Frontier) -> Decision:
        """Keep children whose path probability reaches tau and that can still be within the budget."""
        proposed = present_children(frontier, self.width)
        path = frontier.child_log_path()
        below = proposed & (path < math.log(self.tau))
        over = over_budget(frontier, path, proposed & ~below, self.budget)
        return Decision(reasons(proposed, over_budget=over, below_tau=below), proposed & ~below & ~over)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The ``budget`` nodes of largest path probability."""
        return top_nodes(score, kept, self.budget)
