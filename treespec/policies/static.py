"""Trees whose shape does not depend on what the draft says: none, a chain, and the uniform tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treespec.errors import PolicyError
from treespec.policies.base import MAX_NODES, Decision, Frontier, Policy, present_children, reasons, whole


@dataclass(frozen=True)
class Autoregressive(Policy):
    """No speculation: the engine's own plain decoding, the denominator of every speed-up.

    Cost per step: one target forward over one node, no draft forward.
    """

    name: ClassVar[str] = "plain"
    source: ClassVar[str] = "plain autoregressive decoding"
    predictable: ClassVar[bool] = True

    @property
    def levels(self) -> int:
        """No draft levels."""
        return 0

    @property
    def width(self) -> int:
        """No children."""
        return 0

    def decide(self, frontier: Frontier) -> Decision:
        """Propose nothing."""
        none = present_children(frontier, 0)
        return Decision(reasons(none), none)


@dataclass(frozen=True)
class Uniform(Policy):
    """Every node gets ``width`` children down to ``depth``: Σ width^d nodes (4×3 = 120, 4×4 = 340).

    The article's strategy B. Cost per step: ``depth`` draft forwards (the last over width^(depth-1) nodes), one
    target forward over 1 + Σ width^d nodes.

    Args:
        depth: draft levels.
        width: children of every node; clipped to the vocabulary.
    """

    name: ClassVar[str] = "uniform"
    source: ClassVar[str] = "the article, strategy B"
    predictable: ClassVar[bool] = True

    depth: int = 4
    width: int = 3

    def __post_init__(self) -> None:
        whole("depth", self.depth, 1, 64)
        whole("width", self.width, 1, 1024)
        nodes = sum(self.width**d for d in range(1, self.depth + 1)) if self.width > 1 else self.depth
        if nodes > MAX_NODES:
            raise PolicyError(
                f"uniform:depth={self.depth},width={self.width} grows {nodes:,} nodes; at most {MAX_NODES:,} are "
                "allowed: lower depth or width"
            )

    @property
    def levels(self) -> int:
        """The tree's depth."""
        return self.depth

    def decide(self, frontier: Frontier) -> Decision:
        """Take the first ``width`` children of every node."""
        kept = present_children(frontier, self.width)
        return Decision(reasons(kept), kept)


@dataclass(frozen=True)
class Linear(Policy):
    """The draft's argmax chain of ``gamma`` tokens (Leviathan et al. 2023; the article's strategy A).

    Cost per step: ``gamma`` draft forwards over one node, one target forward over gamma + 1 nodes.

    Args:
        gamma: tokens guessed per step.
    """

    name: ClassVar[str] = "linear"
    source: ClassVar[str] = "Leviathan et al. 2023 (arXiv 2211.17192); the article, strategy A"
    predictable: ClassVar[bool] = True

    gamma: int = 5

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 256)

    @property
    def levels(self) -> int:
        """``gamma`` levels of one node."""
        return self.gamma

    @property
    def width(self) -> int:
        """One child each."""
        return 1

    def decide(self, frontier: Frontier) -> Decision:
        """Take the first child."""
        kept = present_children(frontier, 1)
        return Decision(reasons(kept), kept)
