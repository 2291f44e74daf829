"""The simplest trees: none, a chain (which may stop early), and the uniform tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treespec.errors import PolicyError
from treespec.policies.base import MAX_NODES, Decision, Frontier, Policy, number, present_children, reasons, whole
from treespec.policies.shape import StaticTree, level_tree
from treespec.policies.space import Choice, Space, Whole

SVIP_SCALE = 0.15  # the paper's c in sqrt(c * H), which estimates the total variation between draft and target


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
    space: ClassVar[Space] = {"depth": Whole(1, 5), "width": Whole(1, 4)}

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

    @property
    def shape(self) -> StaticTree:
        """The same at every position."""
        return level_tree((self.width,) * self.depth)

    def decide(self, frontier: Frontier) -> Decision:
        """Take the first ``width`` children of every node."""
        kept = present_children(frontier, self.width)
        return Decision(reasons(kept), kept)


@dataclass(frozen=True)
class Linear(Policy):
    """The draft's argmax chain of ``gamma`` tokens (Leviathan et al. 2023; the article's strategy A).

    The chain may end early. The token that gave the alarm is kept, it has been paid for; nothing is drafted after it.
    So a token never decides about itself, and the policy stays predictable. Several stops may be on; the first ends.
    Cost per step: at most ``gamma`` draft forwards over one node, one target forward over at most gamma + 1 nodes.

    Args:
        gamma: most tokens guessed per step.
        confidence: stop after a token whose own draft probability is below this (transformers'
            ``assistant_confidence_threshold``, there 0.4); 0 is off.
        cumulative: stop after a token whose path probability is below this; 0 is off.
        svip: stop after a token drawn where sqrt(0.15 * H) exceeds this, H in nats (Zhang et al. 2024, there 0.3:
            H > 0.6 nats or 0.87 bits); 0 is off.
    """

    name: ClassVar[str] = "linear"
    source: ClassVar[str] = (
        "Leviathan et al. 2023 (arXiv 2211.17192); the article, strategy A; svip: Zhang et al. 2024 (arXiv 2411.18462)"
    )
    predictable: ClassVar[bool] = True
    space: ClassVar[Space] = {
        "gamma": Whole(1, 12),
        "confidence": Choice((0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
        "cumulative": Choice((0.0, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)),
    }

    gamma: int = 5
    confidence: float = 0.0
    cumulative: float = 0.0
    svip: float = 0.0

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 256)
        number("confidence", self.confidence, 0, 1)
        number("cumulative", self.cumulative, 0, 1)
        number("svip", self.svip, 0, 10)

    @property
    def levels(self) -> int:
        """``gamma`` levels of one node."""
        return self.gamma

    @property
    def width(self) -> int:
        """One child each."""
        return 1

    def decide(self, frontier: Frontier) -> Decision:
        """Take the first child; go on from it unless a stop says no."""
        kept = present_children(frontier, 1)
        return Decision(reasons(kept), kept & ~self._stop(frontier))

    def _stop(self, frontier: Frontier) -> Tensor:
        """``[B, F, K]`` bool: nothing is drafted after these children."""
        stop = torch.zeros_like(frontier.child_logp, dtype=torch.bool)
        if self.confidence > 0:
            stop |= frontier.child_logp < math.log(self.confidence)
        if self.cumulative > 0:
            stop |= frontier.child_log_path() < math.log(self.cumulative)
        if self.svip > 0:
            uncertain = (SVIP_SCALE * math.log(2) * frontier.entropy).sqrt() > self.svip
            stop |= uncertain[..., None]
        return stop
