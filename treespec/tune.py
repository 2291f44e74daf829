"""Which settings? A search of the policies' parameters over replays of a trace, and a recommendation with an interval.

Every policy declares where its parameters may lie (:mod:`treespec.policies.space`). Half of the settings are spread
over these ranges evenly (a scrambled Sobol sequence), half are drawn around the best so far, ever closer. The search
sees one half of the prompts; the recommended setting's speed-up and its bootstrap interval come from the other half, so
it is not the luckiest of thousands that is quoted. Plain decoding and chains are always candidates: "do not speculate"
and "a chain" are answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import qmc

from treespec.compare import Progress
from treespec.cost import CostModel, load_cost
from treespec.errors import InputError, PolicyError
from treespec.files import write_whole
from treespec.policies import POLICIES, Autoregressive, Linear, Policy
from treespec.scoring import Score, priced, score
from treespec.trace import Trace

GENERATIONS = 5  # of the local search; the spread halves with each
SPREAD = 0.2  # of the first one, in the unit cube
TRUNCATED = 0.01  # a setting whose steps leave the recording more often than this is not recommended
CHAINS = 8  # chains of 1 to so many tokens are always tried


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Args:
        recommended: the best setting's row over all prompts; ``search`` and ``held_out`` hold its speed-up on the two
            halves, the latter with ``speedup_ci``, its 95 % bootstrap interval over prompts.
        front: rows of the settings that no other one beats in both tokens per step and milliseconds of verification.
        candidates: one row per setting tried; ``search`` is the speed-up that the search saw, ``held_out`` the other.
        by_policy: the best row of every policy.
        about: trace, cost model, seed, prompts, seconds, settings a minute.
    """

    recommended: dict[str, Any]
    front: pd.DataFrame
    candidates: pd.DataFrame
    by_policy: dict[str, dict[str, Any]]
    about: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json`` and files."""
        return {
            "recommended": self.recommended,
            "by_policy": self.by_policy,
            "front": self.front.to_dict("records"),
            "settings": len(self.candidates),
            **self.about,
        }

    def save(self, path: str | Path, **more: Any) -> None:
        """Write JSON that ``treespec export`` reads; ``more`` goes in beside it."""
        text = json.dumps({**self.as_dict(), **more}, indent=1) + "\n"
        write_whole(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def tune(
    trace: Trace | str | Path,
    cost: CostModel | str | Path = "measured",
    policies: str | Sequence[str] = "all",
    *,
    settings: int = 1000,
    context: float | None = None,
    batch: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuning:
    """Search for the setting that gives the most tokens per second on a trace.

    Args:
        trace: a trace or its file.
        cost: a cost model, its name or its file.
        policies: names, as a list or separated by commas, or ``"all"``.
        settings: how many to try in all; those that are always tried come on top.
        context: cached tokens to price verifications at; None for the trace's mean.
        batch: trees in one verification.
        seed: of the search, the split and the bootstrap.
        progress: told before every setting.

    Raises:
        InputError: for a trace or a cost model that is none, or no settings.
        PolicyError: for an unknown policy.
    """
    trace = trace if isinstance(trace, Trace) else Trace.load(trace)
    given = load_cost(cost) if isinstance(cost, (str, Path)) else cost
    if settings < 1 or batch < 1:
        raise InputError(f"settings and batch must be at least 1; got {settings} and {batch}")
    began = perf_counter()
    search = Search(trace, priced(given, trace, context, batch), policy_types(policies), settings, seed)
    for done, policy in enumerate(search):
        if progress is not None:
            progress(min(done, search.total), search.total, policy.spec())
        search.add(policy)
    seconds = perf_counter() - began
    about = {
        "trace": trace.path,
        "cost": {"name": str(given), "provenance": getattr(given, "provenance", "")},
        "context": search.cost.context,
        "batch": batch,
        "seed": seed,
        "prompts": {"search": len(search.halves[0]), "held_out": len(search.halves[1])},
        "seconds": round(seconds, 2),
        "settings_per_minute": round(60 * len(search.scores) / max(seconds, 1e-9)),
    }
    return _tuning(search, about, seed)


def policy_types(names: str | Sequence[str]) -> list[type[Policy]]:
    """Policies by name, those with something to set.

    Raises:
        PolicyError: for an unknown one.
    """
    parts = [p.strip() for p in names.split(",")] if isinstance(names, str) else list(names)
    wanted = list(POLICIES) if parts == ["all"] else [p for p in parts if p]
    for name in wanted:
        if name not in POLICIES:
            raise PolicyError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}, or all")
    return [POLICIES[name] for name in wanted if POLICIES[name].space]


class Search:
    """The settings to try, in order, and what they scored; iterate and :meth:`add`.

    Args:
        trace: all prompts are replayed, the search looks at half of them.
        cost: priced already.
        kinds: policies with a space.
        settings: how many to draw.
        seed: of everything random.
    """

    def __init__(self, trace: Trace, cost: Any, kinds: Sequence[type[Policy]], settings: int, seed: int) -> None:
        self.trace, self.cost, self.kinds = trace, cost, list(kinds)
        self.rng = np.random.default_rng(seed)
        self.halves = halves(trace, self.rng)
        self.total = settings
        self.scores: dict[str, Score] = {}
        self._points: dict[str, np.ndarray] = {}  # of settings that were drawn: their place in the unit cube
        self._best: dict[str, float] = {}  # speed-up on the search's half

    def add(self, policy: Policy) -> None:
        """Replay a setting."""
        spec = policy.spec()
        self.scores[spec] = score(self.trace, policy, self.cost)
        found = self.scores[spec]
        exact = found.row()["truncated_share"] <= TRUNCATED
        self._best[spec] = found.speedup(self.halves[0]) if exact else 0.0

    def __iter__(self) -> Iterator[Policy]:
        for policy in always(self.kinds, self.cost):
            if policy.spec() not in self.scores:
                yield policy
        if not self.kinds:
            return
        yield from self._spread((self.total + 1) // 2)
        for generation in range(GENERATIONS):
            share = self.total // 2 // GENERATIONS + (generation < self.total // 2 % GENERATIONS)
            yield from self._around(share, SPREAD / 2**generation)

    def _spread(self, count: int) -> Iterator[Policy]:
        for i, kind in enumerate(self.kinds):
            share = count // len(self.kinds) + (i < count % len(self.kinds))
            size = len(kind.space)
            power = max(share - 1, 0).bit_length()  # Sobol points are balanced in powers of two only
            points = qmc.Sobol(size, rng=self.rng).random_base2(power)[:share]
            yield from self._new(kind, points)

    def _around(self, count: int, spread: float) -> Iterator[Policy]:
        """Settings near the best of every policy and the best of all, in turn."""
        ranked = sorted(self._points, key=lambda spec: -self._best[spec])
        names = {spec: type(self.scores[spec].policy) for spec in ranked}
        parents = ranked[:8] + [s for k in self.kinds for s in [r for r in ranked if names[r] is k][:2]]
        for i in range(count if parents else 0):
            parent = parents[i % len(parents)]
            point = self._points[parent]
            moved = self.rng.random(len(point)) < 0.7
            moved[self.rng.integers(len(point))] = True
            near = point + moved * self.rng.normal(0, spread, len(point))
            yield from self._new(names[parent], np.abs(near)[None])

    def _new(self, kind: type[Policy], points: np.ndarray) -> Iterator[Policy]:
        """Settings of points ``[n, d]`` that are possible and were not tried."""
        for point in points:
            point = np.where(point < 1, point, 2 - point).clip(0, 1 - 1e-9)  # reflected at the upper end
            policy = setting(kind, point, self.cost)
            if policy is not None and policy.spec() not in self.scores:
                self._points[policy.spec()] = point
                yield policy


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


def _tuning(search: Search, about: dict[str, Any], seed: int) -> Tuning:
    seen, held = search.halves
    rows = [
        {"name": s.policy.name, **s.row(), "search": s.speedup(seen), "held_out": s.speedup(held)}
        for s in search.scores.values()
    ]
    table = pd.DataFrame(rows).sort_values("search", ascending=False, kind="stable").reset_index(drop=True)
    exact = table[table["truncated_share"] <= TRUNCATED]
    best = exact.iloc[0]["policy"]  # plain is always among the exact ones
    found = search.scores[best]
    row, held_row = found.row(seed=seed), found.row(held, seed)
    recommended = {
        **row,
        "search": found.speedup(seen),
        "held_out": {k: held_row[k] for k in ("speedup", "speedup_ci", "tokens_per_step")},
        "parameters": found.policy.parameters(),
    }
    by_policy = {str(name): dict(group.iloc[0]) for name, group in exact.groupby("name", sort=False)}
    return Tuning(recommended, pareto(exact), table, {k: _json(v) for k, v in by_policy.items()}, about)


def _json(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()}


def pareto(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that no other one beats in both ``tokens_per_step`` and ``verify_ms``, cheapest first."""
    order = table.sort_values(["verify_ms", "tokens_per_step"], ascending=[True, False], kind="stable")
    better = order["tokens_per_step"] > order["tokens_per_step"].cummax().shift(fill_value=-np.inf)
    return order[better].reset_index(drop=True)
