"""A static tree with one width per level: SpecInfer's expansion configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from treespec.errors import PolicyError
from treespec.policies.base import MAX_NODES, Decision, Frontier, Policy, present_children, reasons, whole
from treespec.policies.shape import StaticTree, level_tree
from treespec.policies.space import Choice, Space


@dataclass(frozen=True)
class SpecInfer(Policy):
    """Every node of level d gets ``expansion[d]`` children (Miao et al. 2024, section 3, expansion-based trees).

    Assumes that the branching pays at the same depth whatever the text. The default <1,1,3,1,1,1,1,1> is the paper's:
    one fork of three at the third token. Cost per step: ``len(expansion)`` draft forwards over as many nodes as the
    level above holds, one target forward over 1 + sum of products = 21 nodes by default.

    Args:
        expansion: children of each node, level by level; on the command line ``1/1/3/1``.
    """

    name: ClassVar[str] = "specinfer"
    source: ClassVar[str] = "Miao et al. 2024 (SpecInfer, section 3), arXiv 2305.09781"
    predictable: ClassVar[bool] = True
    space: ClassVar[Space] = {
        "expansion": Choice(
            (
                (1, 1),
                (2,),
                (2, 1),
                (2, 1, 1),
                (2, 2),
                (3, 1, 1),
                (2, 2, 1),
                (3, 2, 1),
                (4, 2, 1, 1),
                (1, 1, 3, 1, 1, 1, 1, 1),
            )
        )
    }

    expansion: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)

    def __post_init__(self) -> None:
        if not isinstance(self.expansion, (tuple, list)) or not 1 <= len(self.expansion) <= 64:
            raise PolicyError(f"expansion must be 1 to 64 whole numbers such as 1/1/3/1; got {self.expansion!r}")
        for value in self.expansion:
            whole("expansion", value, 1, 1024)
        object.__setattr__(self, "expansion", tuple(self.expansion))
        nodes = sum(math.prod(self.expansion[: d + 1]) for d in range(len(self.expansion)))
        if nodes > MAX_NODES:
            raise PolicyError(
                f"specinfer:{self.spec().partition(':')[2]} grows {nodes:,} nodes; at most {MAX_NODES:,} are allowed"
            )

    @property
    def levels(self) -> int:
        """One level per entry of ``expansion``."""
        return len(self.expansion)

    @property
    def width(self) -> int:
        """The widest level's."""
        return max(self.expansion)

    @property
    def shape(self) -> StaticTree:
        """The same at every position."""
        return level_tree(self.expansion)

    def decide(self, frontier: Frontier) -> Decision:
        """Take the first ``expansion[depth]`` children of every node."""
        kept = present_children(frontier, self.expansion[frontier.depth])
        return Decision(reasons(kept), kept)
