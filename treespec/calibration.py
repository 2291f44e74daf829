"""Making the draft's probabilities true: what steps show about them, and a temperature per depth.

In a step the target says one token at every node it visits: the root and the accepted nodes. So all that the draft
proposed *there* has a known outcome, whether it was verified or pruned before: a child is right if its token is the one
emitted. Nothing is known about children of nodes that were not visited. This reads the target's own choice, so it
assumes the rules ``match`` or ``coupled``. What a policy did not let become a node was never recorded; a calibration
speaks about children as wide as the policy grew them.

The fitted map raises the draft's distribution q at a node to the power 1/T and normalises it:
log q_T(c) = log q(c) / T - log Z, with log Z = (1 - 1/T) * H to first order around T = 1, H the entropy in nats (exact
derivative; by convexity log Z is never smaller). So it needs nothing but a child's log-probability and its parent's
entropy, both of which every tree and every trace holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.files import read_json, reals, write_json

if TYPE_CHECKING:  # policies use this module, and events belong to the engine above them
    from treespec.events import StepEvent

LEAST = 200  # outcomes that a depth needs for a temperature of its own
SPAN = math.log(10)  # a fit looks for temperatures from 1/10 to 10
COLDEST, HOTTEST = 1e-3, 1e3  # beyond, float32 log-probabilities overflow or all become alike


@dataclass
class Outcomes:
    """Children of visited nodes, one entry each.

    Args:
        depth: ``[n]`` int64 of the child, from 1.
        rank: ``[n]`` int64 among its siblings.
        logp: ``[n]`` float32, draft log-probability given the parent, nats.
        entropy: ``[n]`` float32 of the draft at the parent, bits.
        accepted: ``[n]`` bool, the target chose this token.
        parent: ``[n]`` int64 number of the visited node, to count nodes rather than children.
    """

    depth: Tensor
    rank: Tensor
    logp: Tensor
    entropy: Tensor
    accepted: Tensor
    parent: Tensor

    def __len__(self) -> int:
        return len(self.depth)

    def select(self, where: Tensor) -> Outcomes:
        """Those of a mask ``[n]``."""
        return Outcomes(**{name: value[where] for name, value in vars(self).items()})

    @property
    def hit_rate(self) -> float:
        """Share of visited nodes one of whose proposed children was right."""
        nodes = len(torch.unique(self.parent))
        return float(self.accepted.sum()) / nodes if nodes else 0.0

    def acceptance(self, width: int = 8) -> tuple[float, ...]:
        """``p[rank]``: share of visited nodes whose child of this rank was right, for :class:`Sequoia`.

        A child that was not recorded counts as wrong: a static tree that asks for it would not get it either.
        """
        nodes = max(len(torch.unique(self.parent)), 1)
        hits = torch.bincount(self.rank[self.accepted], minlength=width)[:width]
        return tuple((hits / nodes).tolist())


def outcomes(events: Sequence[StepEvent]) -> Outcomes:
    """What the steps of one or more texts show (see the module's docstring)."""
    columns: list[list[Tensor]] = [[] for _ in range(6)]
    visited = 0
    for event in events:
        tree = event.tree
        # a text that ended inside the path says nothing at its last node
        for node, token in zip([0, *event.path], event.tokens):
            children = torch.nonzero(tree.parent == node).flatten()
            if len(children):
                same = torch.ones_like(children)
                found = tree.depth[children], tree.rank[children], tree.logp[children], tree.entropy[node] * same
                for column, value in zip(columns, (*found, tree.token[children] == token, visited * same)):
                    column.append(value)
                visited += 1
    kinds = (torch.long, torch.long, torch.float32, torch.float32, torch.bool, torch.long)
    return Outcomes(*(torch.cat([torch.empty(0, dtype=k), *c]).to(k) for k, c in zip(kinds, columns)))


def tempered(logp: Tensor, entropy: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at another temperature, to first order (see the module's docstring).

    Args:
        logp: any shape, nats; -inf stays -inf.
        entropy: broadcastable to it, bits.
        temperature: above 1 for a draft that is too sure of itself.
    """
    if temperature == 1.0:
        return logp
    power = 1.0 / temperature
    nats = torch.nan_to_num(entropy, nan=0.0, posinf=0.0) * math.log(2)  # a broken draft has no children to score
    return (power * logp - (1.0 - power) * nats).clamp(max=0.0)


@dataclass(frozen=True)
class Calibration:
    """Temperatures by depth; the last one holds for all that is deeper.

    Args:
        temperatures: of children at depth 1, 2, …
        hit_rates: share of visited nodes at depth 0, 1, … one of whose children was right; empty if unknown.
        name: how a policy's parameters show it.
        provenance: models, prompts, date.
    """

    temperatures: tuple[float, ...] = (1.0,)
    hit_rates: tuple[float, ...] = ()
    name: str = "none"
    provenance: str = ""

    def __post_init__(self) -> None:
        good = all(COLDEST <= t <= HOTTEST for t in self.temperatures)
        if not self.temperatures or not good or not all(0 <= h <= 1 for h in self.hit_rates):
            raise InputError(
                f"calibration {self.name}: temperatures must be positive, {COLDEST} to {HOTTEST}, hit_rates between "
                f"0 and 1; got {self.temperatures} and {self.hit_rates}"
            )

    def __str__(self) -> str:
        return self.name

    def apply(self, depth: int, logp: Tensor, entropy: Tensor) -> Tensor:
        """Calibrated log-probabilities of children at ``depth``; see :func:`tempered`."""
        return tempered(logp, entropy, self.temperatures[min(depth, len(self.temperatures)) - 1])

    def hit_rate(self, depth: int) -> float:
        """Chance that a visited node at ``depth`` has a right child; 1 if unknown."""
        return self.hit_rates[min(depth, len(self.hit_rates) - 1)] if self.hit_rates else 1.0

    def save(self, path: str | Path) -> None:
        """Write JSON that :meth:`load` reads."""
        content = {
            "temperatures": self.temperatures,
            "hit_rates": self.hit_rates,
            "provenance": self.provenance,
        }
        write_json(path, content)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote.

        Raises:
            InputError: if the file cannot be read or is not a calibration.
        """
        content = read_json(path)
        try:
            temperatures, hit_rates = reals(content["temperatures"]), reals(content.get("hit_rates", []))
        except (KeyError, TypeError):
            raise InputError(f"{path} is not a calibration: expected temperatures, a list of numbers") from None
        return cls(temperatures, hit_rates, str(path), str(content.get("provenance", "")))


def fit(seen: Outcomes, least: int = LEAST, provenance: str = "") -> Calibration:
    """The temperatures of largest likelihood, each child a yes or a no.

    Args:
        seen: outcomes.
        least: outcomes that a depth needs; from the first depth with fewer on, all deeper ones share one fit.
        provenance: kept in the result.

    Raises:
        InputError: for fewer than ``least`` outcomes in all.
    """
    if len(seen) < least:
        raise InputError(f"a calibration needs at least {least} outcomes; got {len(seen)}: decode more text")
    temperatures: list[float] = []
    hit_rates: list[float] = []
    deepest = int(seen.depth.max())
    for depth in range(1, deepest + 1):
        here = seen.depth == depth
        last = depth == deepest or int((seen.depth == depth + 1).sum()) < least
        group = seen.select(seen.depth >= depth if last else here)
        temperatures.append(_temperature(group))
        hit_rates.append(group.hit_rate)
        if last:
            break
    return Calibration(tuple(temperatures), tuple(hit_rates), "fitted", provenance)


def _temperature(seen: Outcomes) -> float:
    def loss(log_t: float) -> float:
        logq = tempered(seen.logp.double(), seen.entropy.double(), math.exp(log_t)).clamp(max=-1e-9)
        other = torch.log1p(-logq.exp())
        return -float(torch.where(seen.accepted, logq.clamp(min=-50), other).sum())

    from scipy.optimize import minimize_scalar  # half a second; most policies are never fitted

    found = minimize_scalar(loss, bounds=(-SPAN, SPAN), method="bounded")
    return round(math.exp(float(found.x)), 4)
