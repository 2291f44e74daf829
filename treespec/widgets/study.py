"""What the explorer knows of a trace under one cost model: scores, replays, the settings to compare with, a verdict.

No widgets here. Every number is :func:`treespec.trace.replay`'s or :class:`treespec.scoring.Score`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from treespec.cost import CostCurve, CostModel, load_cost
from treespec.errors import InputError
from treespec.policies import POLICIES, Autoregressive, Policy
from treespec.scoring import Score, priced
from treespec.search import TRUNCATED
from treespec.table import STRATEGIES, hindsight
from treespec.trace import Explained, Replay, Trace, explain, replay
from treespec.tune import Tuning, tune

if TYPE_CHECKING:
    from treespec.compare import Progress

REMEMBERED = 40  # replays; one holds all its trees, about 1 MB for 2,000 positions
FIRST, MORE = 24, 160  # settings of the cloud: a few at once, the rest when they are there
SEED = 0  # of the bootstrap and the searches: the same picture every time
Row = dict[str, Any]


class Study:
    """A trace, a cost model, and what was computed with them.

    Args:
        trace: recorded supertrees.
        cost: seconds by nodes.
        tokenizer: of the trace's target, if there is one.
        batch: trees in one verification.
    """

    def __init__(self, trace: Trace, cost: CostModel, tokenizer: Any = None, batch: int = 1) -> None:
        self.trace, self.tokenizer = trace, tokenizer
        self._lock = threading.Lock()
        self.price(cost, batch)

    def price(self, cost: CostModel, batch: int = 1) -> None:
        """Take another cost model; what was computed is forgotten."""
        with self._lock:
            self.at = priced(cost, self.trace, batch=batch)
            self._rows: dict[str, Row] = {}
            self._replays: OrderedDict[str, Replay] = OrderedDict()
        self.named: list[Row] = [self._named("plain", Autoregressive())]
        self.cloud: list[Row] = []
        self.tuning: Tuning | None = None

    def knows(self, policy: Policy) -> bool:
        """Whether :meth:`row` and :meth:`replay` answer at once."""
        return policy.spec() in self._rows and policy.spec() in self._replays

    def replay(self, policy: Policy) -> Replay:
        """The policy's steps on the whole trace."""
        spec, at = policy.spec(), self.at
        with self._lock:
            if spec in self._replays:
                self._replays.move_to_end(spec)
                return self._replays[spec]
            near = next(reversed(self._replays.values()), None)
        found = replay(self.trace, policy, at, near)
        row = Score.of(found, at).row(seed=SEED)
        row |= {"extrapolated": at.extrapolates(int(found.grown.nodes.max()))}
        with self._lock:
            if at is self.at:  # else another cost model was chosen meanwhile
                self._replays[spec], self._rows[spec] = found, row
                while len(self._replays) > REMEMBERED:
                    self._replays.popitem(last=False)
        return found

    def row(self, policy: Policy) -> Row:
        """The policy's row, with its interval over prompts."""
        if policy.spec() not in self._rows:
            self.replay(policy)
        return self._rows[policy.spec()]

    def _named(self, strategy: str, policy: Policy) -> Row:
        return {"strategy": strategy, **self.row(policy)}

    # --- what the setting in hand is compared with --------------------------------------------------------------------

    def survey(self, progress: Callable[[int, int, str], None]) -> None:
        """Fill :attr:`named` and :attr:`cloud`: the article's strategies, then a few tuned settings, then more.

        Args:
            progress: told before every setting, with the total of the stage; may raise to stop.
        """
        total = len(STRATEGIES) + 1
        for i, (name, policy) in enumerate(STRATEGIES.items()):
            progress(i, total, name)
            if name != "plain":
                self.named = [*self.named, self._named(name, policy)]
        at = self.at
        self.named = [*self.named, hindsight(self.trace, at, np.unique(self.trace.prompt), SEED)]
        for settings in (FIRST, MORE):
            self.search(settings, progress)

    def search(self, settings: int, progress: Progress, policies: str = "all") -> Tuning:
        """Tune, and show what was tried as the cloud, the best setting of every other policy by name."""
        at = self.at
        found = tune(
            self.trace,
            at.cost,
            self._searchable() if policies == "all" else policies,
            settings=settings,
            context=at.context,
            batch=at.batch,
            seed=SEED,
            progress=progress,
        )
        if at is not self.at:  # another cost model was chosen meanwhile
            return found
        self.tuning = found
        self.cloud = found.candidates.to_dict("records")
        taken = {str(row["policy"]) for row in self.named if row["strategy"] in (*STRATEGIES, "hindsight")}
        best = [{**row, "strategy": f"best {name}"} for name, row in found.by_policy.items() if name != "plain"]
        named = [row for row in self.named if not str(row["strategy"]).startswith("best ")]
        self.named = [*named, *(row for row in best if str(row["policy"]) not in taken)]
        return found

    def _searchable(self) -> list[str]:
        """All policies; without those that take a cost model where this one has no name to be typed."""
        try:
            load_cost(str(self.at.cost))
        except InputError:
            return [n for n, kind in POLICIES.items() if not any(f.name == "cost" for f in dataclasses.fields(kind))]
        return list(POLICIES)

    @property
    def settings(self) -> list[Row]:
        """All rows that are settings: not the bound of hindsight, nothing that left the recording too often."""
        rows = [*self.named, *self.cloud]
        return [r for r in rows if r.get("strategy") != "hindsight" and r.get("truncated_share", 0) <= TRUNCATED]

    def best(self, chains: bool = False) -> Row:
        """The fastest setting known, or the fastest chain."""
        rows = [r for r in self.settings if not chains or str(r["policy"]).startswith("linear")]
        return max(rows, key=lambda row: float(row["speedup"]), default=self.named[0])

    def verdict(self, row: Row) -> str:
        """The truth about a row in one sentence; says so when it loses to plain decoding or to a chain."""
        low, high = row["speedup_ci"]
        best, chain = self.best(), self.best(chains=True)
        said = [
            f"{row['tokens_per_step']:.2f} tokens/step",
            f"{row['nodes']:.1f} nodes",
            f"{row['speedup']:.2f}× ({low:.2f} to {high:.2f}) vs plain",
        ]
        if len(self.settings) > 1:
            said.append(f"best known {max(best['speedup'], row['speedup']):.2f}×")
        warnings = []
        if row["policy"] != "plain" and row["speedup"] < 1:
            sure = "" if high < 1 else ", though the interval holds 1"
            warnings.append(f"slower than plain decoding{sure}")
        if chain["policy"] != row["policy"] and chain["policy"] != "plain" and chain["speedup"] > row["speedup"]:
            warnings.append(f"a chain, {chain['policy']}, gives {chain['speedup']:.2f}×")
        if row.get("truncated_share"):
            warnings.append(
                f"{row['truncated_share']:.1%} of its steps left the recording, where it is cheaper than real"
            )
        if row.get("extrapolated"):
            warnings.append("some of its checks are larger than any that was timed, or than the GPUs hold")
        return " · ".join(said) + ("; " if warnings else "") + "; ".join(warnings)

    def provenance(self) -> str:
        """Where the seconds come from, in a few words."""
        cost = self.at.cost
        if not isinstance(cost, CostCurve):
            return f"{cost}: a formula from datasheets, not a measurement"
        return f"{cost}: {cost.provenance}" if cost.provenance else str(cost)

    # --- one position -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def rows_of(self) -> list[np.ndarray]:
        """``[prompts]`` numbers of each prompt's positions."""
        return [np.flatnonzero(self.trace.prompt == i) for i in range(len(self.trace.prompts))]

    def explain(self, policy: Policy, row: int) -> Explained:
        """The policy's tree at a position, with reasons."""
        return explain(self.trace, row, self._state(policy, row), self.tokenizer)

    def _state(self, policy: Policy, row: int) -> Policy:
        """An adaptive policy as it was at the step before or at this position of the text."""
        found = self._replays.get(policy.spec())
        if found is None or not found.policies:
            return policy
        step = int(np.searchsorted(found.rows, row, side="right")) - 1
        same = step >= 0 and self.trace.prompt[found.rows[step]] == self.trace.prompt[row]
        return found.policies[step] if same else policy

    def place(self, policy: Policy, row: int) -> str:
        """What the position is in the policy's walk through the text, once its replay is known."""
        found = self._replays.get(policy.spec())
        if found is None:
            return ""
        step = int(np.searchsorted(found.rows, row, side="right")) - 1
        if found.rows[step] == row:
            given = int(found.tokens[step])
            return f"here its step gives {given} {'token' if given == 1 else 'tokens'}"
        return "its steps pass over this token; the tree is what it would grow here"
