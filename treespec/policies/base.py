"""What a policy sees and says. Policies are pure, model-free and written over a *batch* of trees.

The live engine calls them with a batch of one, a replay with thousands of trees at once: one implementation serves
both, so what a slider shows is what the engine does. Growth goes level by level. For each level the policy gets the
frontier and answers which children become nodes (with a reason) and which of them are expanded further; at the end
``trim`` decides what the budget keeps.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from treespec.errors import PolicyError
from treespec.policies.space import Space
from treespec.tree import Reason

if TYPE_CHECKING:
    from treespec.policies.shape import StaticTree

MAX_NODES = 8192  # a tree beyond this is a mistake in a parameter, not a strategy

P = TypeVar("P", bound="Policy")


@dataclass
class Frontier:
    """The nodes of one level that are about to be expanded, for B trees at once.

    Args:
        depth: depth of these nodes; 0 when the frontier is the root.
        log_path: ``[B, F]`` float32.
        entropy: ``[B, F]`` float32, bits.
        child_logp: ``[B, F, K]`` float32 log-probabilities of the draft's first K children, -inf where none.
        alive: ``[B, F]`` bool; False marks padding.
        score: ``[B, F]`` float32, what the policy ranks these nodes by (:attr:`Decision.score`); 0 at the root.
        pool: ``[B, N]`` float32 scores of the candidates kept so far, -inf where none.
        ranks: ``[B, F, depth]`` int64, sibling ranks on the way from the root: a node's address in a static tree.
        drawn: ``[B, depth + 1]`` int64, nodes expanded at each level so far, this one included: what was paid for.
        child_token: ``[B, F, K]`` int64, for the recorder of traces alone; a replay has none, so no strategy may look.
    """

    depth: int
    log_path: Tensor
    entropy: Tensor
    child_logp: Tensor
    alive: Tensor
    score: Tensor
    pool: Tensor
    ranks: Tensor
    drawn: Tensor
    child_token: Tensor | None = None

    def child_log_path(self) -> Tensor:
        """``[B, F, K]`` log of the children's cumulative confidence, -inf where there is no child."""
        path = self.log_path[..., None] + self.child_logp
        return path.masked_fill(~self.alive[..., None], -torch.inf)


@dataclass
class Decision:
    """A policy's answer for every child.

    Args:
        reason: ``[B, F, K]`` uint8 of :class:`treespec.tree.Reason`.
        expand: ``[B, F, K]`` bool.
        score: ``[B, F, K]`` float32, never above the parent's; None for the path log-probability.
    """

    reason: Tensor
    expand: Tensor
    score: Tensor | None = None


@dataclass
class Observation:
    """What one step cost and gave, for policies that adapt: tokens, nodes (root included), seconds."""

    tokens: int
    nodes: int
    seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Policy(abc.ABC):
    """Base of all strategies. Subclasses are frozen dataclasses whose fields are their parameters."""

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    deterministic: ClassVar[bool] = True  # children are the draft's top-k, not a sample
    predictable: ClassVar[bool] = False  # decides before it looks at a sampled child
    space: ClassVar[Space] = {}  # where a search may look; empty for what has nothing to set

    @property
    @abc.abstractmethod
    def levels(self) -> int:
        """Most draft levels a tree may have; 0 means no speculation."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """How many children of a node the draft has to rank."""

    @property
    def shape(self) -> StaticTree | None:
        """The whole tree, where it is known before any draft; None where it depends on the draft's probabilities."""
        return None

    @abc.abstractmethod
    def decide(self, frontier: Frontier) -> Decision:
        """Which children become nodes, and which of them grow on."""

    def trim(self, score: Tensor, kept: Tensor, drawn: Tensor) -> Tensor:
        """Which of the kept nodes are verified. Default: all of them.

        Args:
            score: ``[B, N]`` float32 per node, the root first.
            kept: ``[B, N]`` bool.
            drawn: ``[B, L]`` int64, nodes expanded at each level.

        Returns:
            ``[B, N]`` bool, a subset of ``kept``.
        """
        return kept

    def after_step(self: P, seen: Observation) -> P:
        """The policy for the next step; only adaptive policies differ from themselves."""
        return self

    def parameters(self) -> dict[str, Any]:
        """The public parameters by name, as JSON knows them; a curve or a calibration goes by its name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {name: v if isinstance(v, (int, float, tuple)) else str(v) for name, v in values.items()}

    def spec(self) -> str:
        """The form that the command line takes, e.g. ``dynamic:tau=0.05,budget=32``; defaults are left out."""
        changed = [
            f"{f.name}={shown(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if f.init and getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")


def shown(value: Any) -> str:
    """A parameter's value as the command line takes it."""
    return "/".join(str(v) for v in value) if isinstance(value, tuple) else str(value)


def present_children(frontier: Frontier, width: Tensor | int) -> Tensor:
    """``[B, F, K]`` bool: the first ``width`` children of living nodes that the draft really has."""
    rank = torch.arange(frontier.child_logp.shape[-1], device=frontier.child_logp.device)
    return (rank < width) & frontier.alive[..., None] & (frontier.child_logp > -torch.inf)


def reasons(proposed: Tensor, **why: Tensor) -> Tensor:
    """A reason tensor: KEPT where proposed, then each named reason (later ones win) where its mask holds."""
    out = torch.full_like(proposed, Reason.NOT_PROPOSED, dtype=torch.uint8).masked_fill_(proposed, Reason.KEPT)
    for name, mask in why.items():
        out.masked_fill_(mask, Reason[name.upper()])
    return out


def largest(score: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """``[B, N]`` bool: the ``count`` (an int, or ``[B, 1]``) entries of largest score in every row.

    Ties go to the earlier entry. Scores are compared in float32 (see the module docstring of :mod:`treespec.tree`).
    """
    order = score.float().masked_fill(~among, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    within = torch.arange(score.shape[-1], device=score.device) < count
    return torch.zeros_like(among).scatter_(-1, order, within.expand_as(order)) & among


def top_nodes(score: Tensor, kept: Tensor, budget: Tensor | int) -> Tensor:
    """``[B, N]`` bool: the root and the ``budget`` (an int, or ``[B, 1]``) kept nodes of largest score.

    Ties go to the earlier, hence shallower, node; since scores never grow down a path the result is ancestor-closed.
    """
    if isinstance(budget, int) and kept.shape[-1] - 1 <= budget:
        return kept
    score = score.float().index_fill(-1, torch.tensor([0], device=score.device), torch.inf)  # the root never leaves
    return largest(score, kept, budget + 1)


def top_children(path: Tensor, kept: Tensor, count: int) -> Tensor:
    """``[B, F, K]`` bool: the ``count`` kept children of largest score in the level of each tree."""
    return largest(path.flatten(1), kept.flatten(1), count).view_as(kept)


def over_budget(frontier: Frontier, path: Tensor, kept: Tensor, budget: int) -> Tensor:
    """Children that can no longer be among the ``budget`` best: the pool only grows, so they are out for good.

    Cutting them before they are expanded saves draft forwards and changes nothing that ``trim`` would keep.
    """
    new = path.masked_fill(~kept, -torch.inf)
    pool = torch.cat([frontier.pool, new.flatten(1)], dim=-1)
    if pool.shape[-1] <= budget:
        return torch.zeros_like(kept)
    threshold = torch.topk(pool, budget, dim=-1).values[:, -1]
    return kept & (path < threshold[:, None, None])


def whole(name: str, value: Any, low: int, high: int = MAX_NODES) -> None:
    """Check an integer parameter.

    Raises:
        PolicyError: with the parameter, its value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PolicyError(f"{name} must be a whole number from {low} to {high}; got {value!r}")


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Check a real parameter.

    Raises:
        PolicyError: with the parameter, its value and the range.
    """
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not (low < value if open_low else low <= value) or not value <= high:  # nor is NaN
        raise PolicyError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}]; got {value!r}")
