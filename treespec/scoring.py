"""What a policy would have reached on a trace under a cost model: sums by prompt, and the row they give.

The steps come from the replay, which is exact; the seconds come from the cost model. Everything that is searched,
tabled or recommended from a trace goes through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from treespec.cost import At, CostModel, plain_seconds
from treespec.intervals import ratio_interval
from treespec.policies import Policy
from treespec.trace import Replay, Trace, replay

SUMS = ["steps", "tokens", "nodes", "verify", "draft", "truncated"]


@dataclass(frozen=True)
class Score:
    """One policy on a trace.

    Args:
        policy: the setting.
        prompts: :attr:`treespec.trace.Replay.by_prompt`: sums by prompt number.
        cost: what the seconds are from.
        most: nodes of the largest verification.
    """

    policy: Policy
    prompts: pd.DataFrame
    cost: CostModel
    most: int

    @classmethod
    def of(cls, found: Replay, cost: CostModel) -> Score:
        """The sums of a replay that was priced with ``cost``."""
        return cls(found.policy, found.by_prompt, cost, int(found.grown.nodes.max()))

    def seconds(self, among: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """``[prompts]`` seconds of plain decoding, and with this policy; ``among`` takes some prompts by number."""
        own = self.prompts if among is None else self.prompts.loc[among]
        outside = own["steps"] * self.cost.overhead
        if self.policy.levels == 0:
            outside = own["tokens"] * plain_seconds(self.cost) - own["verify"]  # the engine does less around it
        plain = own["tokens"] * plain_seconds(self.cost)
        return plain.to_numpy(float), (own["verify"] + own["draft"] + outside).to_numpy(float)

    @property
    def truncated_share(self) -> float:
        """Of all steps."""
        return float(self.prompts["truncated"].sum() / self.prompts["steps"].sum())

    def speedup(self, among: np.ndarray | None = None) -> float:
        """Seconds of plain decoding over seconds with this policy."""
        plain, own = self.seconds(among)
        return float(plain.sum() / own.sum())

    def row(self, among: np.ndarray | None = None, seed: int | None = None) -> dict[str, Any]:
        """The sums as :func:`treespec.compare.compare` names them; with a seed, an interval over prompts too."""
        own = self.prompts if among is None else self.prompts.loc[among]
        total, steps = own[SUMS].sum(), max(int(own["steps"].sum()), 1)
        plain, seconds = self.seconds(among)
        row = {
            "policy": self.policy.spec(),
            "nodes": float(total["nodes"] / steps),
            "verify_ms": float(1e3 * total["verify"] / steps),
            "draft_ms": float(1e3 * total["draft"] / steps),
            "step_ms": float(1e3 * seconds.sum() / steps),
            "tokens_per_step": float(total["tokens"] / steps),
            "speedup": float(plain.sum() / seconds.sum()),
            "truncated_share": float(total["truncated"] / steps),
        }
        if seed is not None:
            row["speedup_ci"] = list(ratio_interval(plain, seconds, seed))
        return row


def score(trace: Trace, policy: Policy, cost: CostModel) -> Score:
    """Replay one policy.

    Args:
        trace: recorded supertrees.
        policy: within what the trace's caps allow; beyond, steps count as truncated.
        cost: seconds by nodes.
    """
    return Score.of(replay(trace, policy, cost), cost)


def priced(cost: CostModel, trace: Trace, context: float | None = None, batch: int = 1) -> At:
    """The cost model at the trace's mean context, or at another.

    Args:
        cost: any.
        trace: whose positions are averaged.
        context: cached tokens to assume instead.
        batch: trees in one forward.
    """
    return At(cost, float(trace.positions.mean()) if context is None else context, batch)


def some_prompts(trace: Trace, numbers: np.ndarray) -> Trace:
    """The trace of some of its prompts, by number; their numbers stay."""
    mine = np.isin(trace.prompt, numbers)
    size = np.diff(trace.root, append=len(trace.nodes["node"]))
    rows = np.repeat(mine, size)
    return Trace(
        about=trace.about,
        prompts=trace.prompts,
        nodes={name: values[rows] for name, values in trace.nodes.items()},
        root=np.cumsum(size[mine]) - size[mine],
        prompt=trace.prompt[mine],
        left=trace.left[mine],
        path=trace.path,
    )
