"""Which settings? A search over replays of a trace, and a recommendation with an interval.

The search (:mod:`treespec.search`) sees one half of the prompts; the recommended setting's speed-up and its bootstrap
interval come from the other half, so it is not the luckiest of thousands that is quoted. Plain decoding and chains are
always candidates: "do not speculate" and "a chain" are answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from treespec.cost import CostModel, load_cost
from treespec.errors import InputError, PolicyError
from treespec.files import write_json
from treespec.policies import POLICIES, Policy
from treespec.scoring import priced
from treespec.search import TRUNCATED, Search
from treespec.trace import Trace

if TYPE_CHECKING:
    from treespec.compare import Progress


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Args:
        recommended: the best setting's row over all prompts; ``search`` and ``held_out`` hold its speed-up on the two
            halves, the latter with ``speedup_ci``, its 95 % bootstrap interval over prompts.
        front: rows of the settings that no other one beats in both tokens per step and milliseconds of verification.
        candidates: one row per setting that was replayed whole; ``search`` is the speed-up on the search's half of the
            prompts, ``held_out`` on the other.
        by_policy: the best row of every policy.
        about: trace, cost model, seed, prompts, settings tried, seconds, settings a minute.
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
            **self.about,
        }

    def save(self, path: str | Path, **more: Any) -> None:
        """Write JSON that ``treespec export`` reads; ``more`` goes in beside it."""
        write_json(path, {**self.as_dict(), **more})


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
    search = Search(trace, priced(given, trace, context, batch), policy_types(policies), settings, seed, progress)
    search.run()
    seconds = perf_counter() - began
    about = {
        "trace": trace.path,
        "cost": {"name": str(given), "provenance": getattr(given, "provenance", "")},
        "context": search.cost.context,
        "batch": batch,
        "seed": seed,
        "prompts": {"search": len(search.halves[0]), "held_out": len(search.halves[1])},
        "settings": len(search.tried),
        "seconds": round(seconds, 2),
        "settings_per_minute": round(60 * len(search.tried) / max(seconds, 1e-9)),
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


def pareto(table: pd.DataFrame, price: str = "verify_ms") -> pd.DataFrame:
    """Rows that no other one beats in both ``tokens_per_step`` and the column ``price``, cheapest first."""
    order = table.sort_values([price, "tokens_per_step"], ascending=[True, False], kind="stable")
    better = order["tokens_per_step"] > order["tokens_per_step"].cummax().shift(fill_value=-np.inf)
    return order[better].reset_index(drop=True)
