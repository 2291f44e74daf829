"""A beam over path probabilities, then the best of all that was seen: EAGLE-2's dynamic tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from treespec.policies.base import (
    Decision,
    Frontier,
    Policy,
    over_budget,
    present_children,
    reasons,
    top_children,
    top_nodes,
    whole,
)
from treespec.policies.space import Space, Whole


@dataclass(frozen=True)
class Eagle2(Policy):
    """Expand the ``top_k`` most probable nodes of each level, then re-rank (Li et al. 2024, sections 4.1 and 4.2).

    Every beam node gets ``top_k`` children; all of them join a pool, of which the ``total`` - 1 of largest path
    probability are verified. Assumes that the draft's probabilities are close to acceptance rates (the paper's
    figure 6). Here a beam node that can no longer be among the verified is not expanded: this changes no tree and
    saves draft work that the published code spends.
    Cost per step: at most ``depth`` draft forwards over at most ``top_k`` nodes, one target forward over at most
    ``total`` nodes.

    Args:
        total: most nodes of one verification, the root *included*, as the authors count (``total_token``).
        depth: levels of the tree. The authors' code counts the forwards after the first, so its 5 is our 6.
        top_k: width of the beam, and children of each of its nodes.
    """

    name: ClassVar[str] = "eagle2"
    source: ClassVar[str] = "Li et al. 2024 (EAGLE-2, section 4), arXiv 2406.16858"
    space: ClassVar[Space] = {"total": Whole(2, 64, log=True), "depth": Whole(1, 10), "top_k": Whole(1, 10)}

    total: int = 60
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        whole("total", self.total, 2)
        whole("depth", self.depth, 1, 64)
        whole("top_k", self.top_k, 1, 1024)

    @property
    def levels(self) -> int:
        """Most draft levels."""
        return self.depth

    @property
    def width(self) -> int:
        """``top_k`` children of every beam node."""
        return self.top_k

    def decide(self, frontier: Frontier) -> Decision:
        """All children join the pool; the level's best ``top_k`` are the next beam."""
        proposed = present_children(frontier, self.top_k)
        path = frontier.child_log_path()
        beam = top_children(path, proposed, self.top_k)
        over = over_budget(frontier, path, proposed, self.total - 1)
        return Decision(reasons(proposed, over_budget=over), beam & ~over)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The ``total`` - 1 candidates of largest path probability."""
        return top_nodes(score, kept, self.total - 1)
