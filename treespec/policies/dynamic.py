"""The article's dynamic pruner: cumulative confidence, topological entropy, node budget. ALGORITHMS §1.1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from treespec.errors import PolicyError
from treespec.policies.base import (
    Decision,
    Frontier,
    Observation,
    Policy,
    number,
    over_budget,
    present_children,
    reasons,
    top_nodes,
    whole,
)
from treespec.policies.price import NodePrice
from treespec.policies.space import Choice, Real, Space, Whole


@dataclass(frozen=True)
class DynamicTreePruner(Policy):
    """Grow where the draft is sure, stop where it is not (the article's strategy D).

    For every frontier node v with entropy H(v) in bits and path probability P(v):

    1. H < ``low``: one child, and the path may go on to depth ``deep``;
       ``low`` <= H < ``high``: ``mid_widths[0]`` children in the lower half of the band, ``mid_widths[1]`` in the
       upper, to depth ``depth``; H >= ``high``: no child, the topology is capped here.
    2. A child with P < ``tau`` is cut at once and never grows.
    3. Of what is left, the ``budget`` nodes of largest P are verified.

    The root is a node like any other: a high-entropy root gives an empty tree, and the step falls back to plain
    decoding at the price of one draft forward. Cost per step: up to ``deep`` draft forwards, one target forward
    over at most budget + 1 nodes.

    Args:
        tau: threshold in (0, 1], or ``"auto"``: after every step the measured price of one more node
            (see :class:`treespec.policies.price.NodePrice`).
        low: bits below which the draft counts as certain.
        high: bits from which it counts as lost. The article's text says 2.5, its code 2.2.
        mid_widths: children in the lower and the upper half of the band.
        depth: most levels through nodes of medium entropy.
        deep: most levels through nodes of low entropy.
        budget: most candidate nodes in one verification, root excluded.
        scope: ``"node"`` decides by each node's own entropy (the article's text); ``"level"`` takes one entropy
            for the whole level, the P-weighted mean (the article's code).
    """

    name: ClassVar[str] = "dynamic"
    source: ClassVar[str] = "the article, strategy D"
    space: ClassVar[Space] = {
        "tau": Real(0.005, 0.6, log=True),
        "low": Real(0.1, 4.0),
        "high": Real(0.5, 9.0),
        "mid_widths": Choice(((1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (3, 4), (4, 6))),
        "depth": Whole(1, 6),
        "deep": Whole(3, 10),
        "budget": Whole(2, 64, log=True),
        "scope": Choice(("node", "level")),
    }

    tau: float | str = 0.08
    low: float = 1.0
    high: float = 2.5
    mid_widths: tuple[int, int] = (2, 3)
    depth: int = 4
    deep: int = 8
    budget: int = 48
    scope: str = "node"
    _price: NodePrice = field(default_factory=NodePrice, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tau != "auto":
            if isinstance(self.tau, str):
                raise PolicyError(f"tau must be a number in (0, 1] or 'auto'; got {self.tau!r}")
            number("tau", self.tau, 0, 1, open_low=True)
        number("low", self.low, 0, 64)
        number("high", self.high, 0, 64)
        if self.low > self.high:
            raise PolicyError(f"low must not exceed high; got low={self.low}, high={self.high} bits")
        if not isinstance(self.mid_widths, (tuple, list)) or len(self.mid_widths) != 2:
            raise PolicyError(f"mid_widths must be two whole numbers such as 2/3; got {self.mid_widths!r}")
        for value in self.mid_widths:
            whole("mid_widths", value, 1, 1024)
        object.__setattr__(self, "mid_widths", tuple(self.mid_widths))
        whole("depth", self.depth, 1, 64)
        whole("deep", self.deep, 1, 64)
        if self.deep < self.depth:
            raise PolicyError(f"deep must be at least depth; got deep={self.deep}, depth={self.depth}")
        whole("budget", self.budget, 1)
        if self.scope not in ("node", "level"):
            raise PolicyError(f"scope must be 'node' or 'level'; got {self.scope!r}")

    @property
    def levels(self) -> int:
        """Most draft levels: ``deep``, reached by certain paths only."""
        return self.deep

    @property
    def width(self) -> int:
        """The widest a node may grow."""
        return max(self.mid_widths)

    @property
    def threshold(self) -> float:
        """The tau in force: the parameter, or the current price of a node."""
        return self._price.tau if isinstance(self.tau, str) else float(self.tau)

    def decide(self, frontier: Frontier) -> Decision:
        """The article's state machine, for all frontier nodes at once."""
        bits = self._entropy(frontier)  # [B, F]
        certain, lost = bits < self.low, ~(bits < self.high)  # an unknown entropy counts as lost
        lower_half = bits < (self.low + self.high) / 2
        width = torch.where(lower_half, self.mid_widths[0], self.mid_widths[1])
        width = torch.where(certain, 1, width)[..., None]
        limit = torch.where(certain, self.deep, self.depth)[..., None]
        path = frontier.child_log_path()  # [B, F, K]

        proposed = present_children(frontier, width)
        capped = proposed & lost[..., None]
        below = proposed & (path < math.log(self.threshold))
        too_deep = proposed & (frontier.depth + 1 > limit)
        kept = proposed & ~capped & ~below & ~too_deep
        over = over_budget(frontier, path, kept, self.budget)
        why = reasons(proposed, over_budget=over, too_deep=too_deep, below_tau=below, entropy_cap=capped)
        return Decision(why, kept & ~over)

    def _entropy(self, frontier: Frontier) -> Tensor:
        if self.scope == "node":
            return frontier.entropy
        weight = frontier.log_path.exp().masked_fill(~frontier.alive, 0.0)
        bits = torch.where(frontier.alive, frontier.entropy, 0.0)
        mean = (weight * bits).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-30)
        return mean.expand_as(frontier.entropy)

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """The ``budget`` nodes of largest path probability."""
        return top_nodes(score, kept, self.budget)

    def after_step(self, seen: Observation) -> DynamicTreePruner:
        """With ``tau="auto"``: learn the price of a node from the step just measured."""
        if not isinstance(self.tau, str):
            return self
        new = replace(self)
        object.__setattr__(new, "_price", self._price.learn(seen))
        return new
