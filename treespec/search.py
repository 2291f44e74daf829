"""The tuner's search: an even spread over the policies' parameters, then ever closer around the best.

Every policy declares where its parameters may lie (:mod:`treespec.policies.space`). Half of the settings are a
scrambled Sobol sequence over these ranges, half are drawn around the best so far. Only half of the prompts is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treespec.cost import At, CostModel
from treespec.errors import PolicyError
from treespec.policies import Autoregressive, Linear, Policy
from treespec.scoring import Score, score, some_prompts
from treespec.trace import Trace

if TYPE_CHECKING:
    from treespec.compare import Progress

GENERATIONS = 5  # of the local search; the spread halves with each
SPREAD = 0.2  # of the first one, in the unit cube
TRUNCATED = 0.01  # a setting whose steps leave the recording more often than this is not recommended
CHAINS = 8  # chains of 1 to so many tokens are always tried
FEW = 200  # positions of the first, rough replay
KEEP = 10  # one in so many settings of a wave is replayed whole


class Search:
    """The settings that were tried, and what they scored.

    A setting is first replayed on a few prompts only; the best of every wave, and of every policy in it, are then
    replayed on all. A trace that is hardly larger than those few is replayed whole at once.

    Args:
        trace: all prompts are replayed, the search looks at half of them.
        cost: priced already.
        kinds: policies with a space.
        settings: how many to draw.
        seed: of everything random.
        progress: told before every setting.
    """

    def __init__(
        self,
        trace: Trace,
        cost: At,
        kinds: Sequence[type[Policy]],
        settings: int,
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        self.trace, self.cost, self.kinds, self.total = trace, cost, list(kinds), settings
        self.rng = np.random.default_rng(seed)
        self.halves = halves(trace, self.rng)
        self.few = _few(trace, self.halves[0])
        self.progress = progress
        self.tried: set[str] = set()
        self.scores: dict[str, Score] = {}
        self._drawn: dict[str, tuple[type[Policy], np.ndarray]] = {}  # by their place in the unit cube
        self._best: dict[str, float] = {}  # speed-up on the search's half, of some only on the few prompts

    def run(self) -> None:
        """Try what is always tried, then draw."""
        for policy in always(self.kinds, self.cost):
            if policy.spec() not in self.tried:
                self._begin(policy)
                self._add(policy)
        if not self.kinds:
            return
        self._wave(self._spread((self.total + 1) // 2))
        for generation in range(GENERATIONS):
            share = self.total // 2 // GENERATIONS + (generation < self.total // 2 % GENERATIONS)
            self._wave(self._around(share, SPREAD / 2**generation))

    def _begin(self, policy: Policy) -> None:
        if self.progress is not None:
            self.progress(min(len(self.tried), self.total), self.total, policy.spec())
        self.tried.add(policy.spec())

    def _add(self, policy: Policy) -> None:
        """Replay a setting on the whole trace."""
        spec = policy.spec()
        self.scores[spec] = found = score(self.trace, policy, self.cost)
        self._best[spec] = _worth(found, self.halves[0])

    def _wave(self, drawn: Iterable[tuple[Policy, np.ndarray]]) -> None:
        rough: list[tuple[float, Policy]] = []
        for policy, point in drawn:
            self._begin(policy)
            worth = 0.0 if self.few is None else _worth(score(self.few, policy, self.cost))
            self._drawn[policy.spec()] = type(policy), point
            self._best[policy.spec()] = worth
            rough.append((worth, policy))
        rough.sort(key=lambda entry: -entry[0])
        keep = len(rough) if self.few is None else -(-len(rough) // KEEP)
        best_of: set[str] = set()
        for rank, (_, policy) in enumerate(rough):
            if rank < keep or policy.name not in best_of:
                self._add(policy)
            best_of.add(policy.name)

    def _spread(self, count: int) -> Iterator[tuple[Policy, np.ndarray]]:
        from scipy.stats import qmc  # most of a second, which a table or a dashboard need not pay

        for i, kind in enumerate(self.kinds):
            share = count // len(self.kinds) + (i < count % len(self.kinds))
            power = max(share - 1, 0).bit_length()  # Sobol points are balanced in powers of two only
            points = qmc.Sobol(len(kind.space), rng=self.rng).random_base2(power)[:share]
            yield from self._new(kind, points)

    def _around(self, count: int, spread: float) -> Iterator[tuple[Policy, np.ndarray]]:
        """Settings near the best of every policy and the best of all, in turn."""
        ranked = sorted(self._drawn, key=lambda spec: -self._best[spec])
        parents = ranked[:8]
        for kind in self.kinds:
            parents += [spec for spec in ranked if self._drawn[spec][0] is kind][:2]
        for i in range(count if parents else 0):
            kind, point = self._drawn[parents[i % len(parents)]]
            moved = self.rng.random(len(point)) < 0.7
            moved[self.rng.integers(len(point))] = True
            near = point + moved * self.rng.normal(0, spread, len(point))
            yield from self._new(kind, np.abs(near)[None])

    def _new(self, kind: type[Policy], points: np.ndarray) -> Iterator[tuple[Policy, np.ndarray]]:
        """Settings of points ``[n, d]`` that are possible and were not tried."""
        for point in points:
            point = np.where(point < 1, point, 2 - point).clip(0, 1 - 1e-9)  # reflected at the upper end
            policy = setting(kind, point, self.cost)
            if policy is not None and policy.spec() not in self.tried:
                yield policy, point


def _worth(found: Score, among: np.ndarray | None = None) -> float:
    """Speed-up; nothing for a setting that leaves the recording."""
    return found.speedup(among) if found.truncated_share <= TRUNCATED else 0.0


def _few(trace: Trace, seen: np.ndarray) -> Trace | None:
    """Some of the search's prompts, of all categories, about ``FEW`` positions; None if that is much of the trace."""
    count = -(-FEW * len(trace.prompts) // len(trace))
    if len(trace) <= 3 * FEW or count >= len(seen):
        return None
    return some_prompts(trace, seen[np.linspace(0, len(seen) - 1, count).round().astype(int)])


def setting(kind: type[Policy], point: Sequence[float] | np.ndarray, cost: CostModel) -> Policy | None:
    """The policy at a point of the unit cube; None where its parameters contradict each other."""
    values: dict[str, Any] = {name: r.at(float(u)) for (name, r), u in zip(kind.space.items(), point)}
    try:
        return kind(**values, **_given(kind, cost))
    except PolicyError:  # low above high, deep above depth, a tree beyond all bounds
        return None


def always(kinds: Sequence[type[Policy]], cost: CostModel) -> list[Policy]:
    """What is tried whatever is searched: plain decoding, chains, and every policy's defaults."""
    defaults = [kind(**_given(kind, cost)) for kind in kinds]
    return [Autoregressive(), *(Linear(gamma) for gamma in range(1, CHAINS + 1)), *defaults]


def _given(kind: type[Policy], cost: CostModel) -> dict[str, Any]:
    return {"cost": cost} if any(f.name == "cost" for f in dataclasses.fields(kind)) else {}


def halves(trace: Trace, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the prompts that the search sees and of those held out, alike in categories.

    A single prompt is on both sides: there is nothing to hold out.
    """
    used = np.unique(trace.prompt)
    mixed = rng.permutation(used)
    order = mixed[np.argsort([trace.prompts[i].category for i in mixed], kind="stable")]
    return (order[::2], order[1::2]) if len(order) > 1 else (order, order)
