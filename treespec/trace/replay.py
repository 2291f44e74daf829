"""Exact replay: what a policy would have done on recorded texts, without a model.

The text does not depend on the tree (greedy, or ``coupled`` noise by position), so a text is walked from root to root:
at each the policy's tree is grown again out of the recorded supertree (:mod:`treespec.trace.regrow`), the accepted
length is read off the true continuation, and the next root lies accepted + 1 tokens further on.

A policy that adapts to measured seconds (``tau="auto"``, ``rate="auto"``) has a state, so its steps cannot be computed
side by side; it is replayed one step after the other, with the seconds that the cost model gives.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from treespec.cost import CostModel, load_cost, plain_seconds
from treespec.errors import TraceError
from treespec.policies import Policy, parse_policy
from treespec.policies.base import Observation
from treespec.trace.grown import Grown
from treespec.trace.regrow import regrow
from treespec.trace.store import Trace
from treespec.tree import Reason, TokenTree


@dataclass(eq=False)
class Replay:
    """The steps of one policy on one trace, the prefill of every text left out.

    Args:
        trace, policy: what was replayed.
        rows: ``[S]`` numbers of the visited positions, in order.
        tokens: ``[S]`` emitted by each step.
        grown: ``[S]`` the trees.
        verify, draft: ``[S]`` seconds of the target's forward and of the draft's; None without a cost model.
        plain, overhead: seconds of a step of plain decoding, and of a step outside both models' forwards.
        policies: ``[S]`` the policy as it was at every step, if it adapts; else empty.
    """

    trace: Trace
    policy: Policy
    rows: np.ndarray
    tokens: np.ndarray
    grown: Grown
    verify: np.ndarray | None = None
    draft: np.ndarray | None = None
    plain: float = 0.0
    overhead: float = 0.0
    policies: list[Policy] = field(default_factory=list)

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step: ``prompt`` (its number in the trace), ``position`` of the root, ``tokens`` emitted,
        ``accepted``, ``nodes`` of the verification with the root, ``levels`` (draft forwards), ``widths`` (nodes of
        each, such as ``"1/3/6"``), ``truncated``; with a cost model the seconds of ``verify`` and ``draft``.
        """
        columns = self._columns()
        widths = ["/".join(str(w) for w in row if w) for row in self.grown.widths.tolist()]
        columns = {"prompt": columns.pop("prompt"), "position": self.trace.positions[self.rows], **columns}
        at = list(columns).index("truncated")
        items = list(columns.items())
        return pd.DataFrame(dict([*items[:at], ("widths", widths), *items[at:]]))

    @functools.cached_property
    def by_prompt(self) -> pd.DataFrame:
        """Sums by prompt number: ``steps`` and the numeric columns of :attr:`steps`."""
        columns = self._columns()
        numbers, start = np.unique(columns.pop("prompt"), return_index=True)  # steps are in the prompts' order
        sums = {name: np.add.reduceat(values, start, dtype=_wide(values)) for name, values in columns.items()}
        sums = {"steps": np.diff(start, append=len(self.rows)), **sums}
        return pd.DataFrame(sums, index=pd.Index(numbers, name="prompt"))

    def _columns(self) -> dict[str, np.ndarray]:
        seconds = {} if self.verify is None or self.draft is None else {"verify": self.verify, "draft": self.draft}
        return {
            "prompt": self.trace.prompt[self.rows],
            "tokens": self.tokens,
            "accepted": self.grown.accepted.numpy(),
            "nodes": self.grown.nodes.numpy(),
            "levels": self.grown.levels.numpy(),
            "truncated": self.grown.truncated.numpy(),
            **seconds,
        }

    @property
    def seconds(self) -> float | None:
        """Of all steps, under the cost model."""
        if self.verify is None or self.draft is None:
            return None
        if self.policy.levels == 0:
            return self.plain * len(self.rows)
        return float(self.verify.sum() + self.draft.sum() + self.overhead * len(self.rows))

    @property
    def totals(self) -> dict[str, Any]:
        """``positions`` of the trace, ``steps``, means per step of tokens, nodes and levels, ``truncated_share`` of the
        steps; with a cost model the ``seconds`` of all steps and the ``speedup`` over plain decoding, else None.
        """
        seconds = self.seconds
        return {
            "policy": self.policy.spec(),
            "positions": len(self.trace),
            "steps": len(self.rows),
            "tokens_per_step": float(self.tokens.mean()),
            "nodes": float(self.grown.nodes.double().mean()),
            "levels": float(self.grown.levels.double().mean()),
            "truncated_share": float(self.grown.truncated.double().mean()),
            "seconds": seconds,
            "speedup": None if seconds is None else float(self.plain * self.tokens.sum() / seconds),
        }

    def tree(self, step: int) -> TokenTree:
        """The supertree of a step; what the policy did not verify is marked as not proposed."""
        row = int(self.rows[step])
        tree = self.trace.tree(row)
        kept = self.grown.kept[step]
        own = kept[kept >= 0] - int(self.trace.root[row])
        tree.reason = torch.full_like(tree.reason, Reason.NOT_PROPOSED)
        tree.reason[torch.cat([torch.tensor([0]), own])] = Reason.KEPT
        tree.accepted = [i for i in tree.accepted if int(tree.reason[i]) == Reason.KEPT]
        return tree

    def __repr__(self) -> str:
        t = self.totals
        speed = "" if t["speedup"] is None else f", {t['speedup']:.2f}x"
        return (
            f"Replay({t['policy']}: {t['steps']:,} steps, {t['tokens_per_step']:.2f} tokens a step, "
            f"{t['nodes']:.1f} nodes{speed}, {t['truncated_share']:.1%} truncated)"
        )


def _wide(values: np.ndarray) -> type:
    return float if values.dtype.kind == "f" else int


def replay(
    trace: Trace | str | Path,
    policy: Policy | str,
    cost: CostModel | str | None = None,
    near: Replay | None = None,
) -> Replay:
    """Replay a policy on a trace.

    Args:
        trace: a trace, or the file of one.
        policy: a policy or its command-line form.
        cost: a cost model, or the name or file of one; needed for seconds, and by policies that adapt to them.
        near: a replay of a similar setting on this trace. It changes no number: the positions that it visited are
            looked at first, and most others never, which saved a quarter of the time of 3,000 positions.

    Returns:
        The steps, exact but for those marked as truncated: there the policy wanted nodes beyond the trace's caps.

    Raises:
        TraceError: for an unreadable trace, or an adaptive policy without a cost model.
        TreespecError: for an unknown policy or cost model.
    """
    trace = trace if isinstance(trace, Trace) else Trace.load(trace)
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    cost = load_cost(cost) if isinstance(cost, str) else cost
    if policy.after_step(Observation(1, 1, 1.0, 1.0)) is policy:
        out = _side_by_side(
            trace, policy, near.rows if near is not None and near.trace is trace else np.arange(len(trace))
        )
    elif cost is None:
        raise TraceError(f"{policy.spec()} adapts to the seconds of its steps: give a cost model to replay it with")
    else:
        out = _adaptive(trace, policy, cost)
    return out if cost is None else _priced(out, cost)


def _side_by_side(trace: Trace, policy: Policy, first: np.ndarray) -> Replay:
    """The trees of the positions ``first``, then of those behind the first one that a text's walk misses."""
    tokens, place = np.zeros(len(trace), int), np.zeros(len(trace), int)
    parts: list[Grown] = []
    rows, missing = first[:0], first
    while len(missing):
        place[missing] = sum(len(part.nodes) for part in parts) + np.arange(len(missing))
        parts.append(regrow(trace.index, torch.from_numpy(missing), policy))
        tokens[missing] = np.minimum(parts[-1].accepted.numpy() + 1, trace.left[missing])
        rows, missing = _walk(trace, tokens)
    grown = Grown.stack(parts).at(torch.from_numpy(place[rows]))
    return Replay(trace, policy, rows, tokens[rows], grown)


def _walk(trace: Trace, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[S]`` visited positions, and those that have to be known (``tokens`` above 0) to walk on.

    A text's last step leads to the next text's first position.
    """
    ahead, left, at = tokens.tolist(), trace.left.tolist(), 0
    rows: list[int] = []
    missing: list[int] = []
    while at < len(ahead):
        if ahead[at]:
            rows.append(at)
            at += ahead[at]
        else:
            end = at + left[at]
            missing += [row for row in range(at, end) if not ahead[row]]
            at = end
    return np.array(rows, int), np.array(missing, int)


def _adaptive(trace: Trace, policy: Policy, cost: CostModel) -> Replay:
    """One step after the other; every text begins with the policy as it was given."""
    rows, tokens, parts, states = [], [], [], []
    at, prompt, current = 0, -1, policy
    while at < len(trace):
        if trace.prompt[at] != prompt:
            prompt, current = trace.prompt[at], policy
        grown = regrow(trace.index, torch.tensor([at]), current)
        emitted = min(int(grown.accepted) + 1, int(trace.left[at]))
        verify = cost.verify(int(grown.nodes))
        states.append(current)
        seconds = verify + sum(cost.draft(w) for w in grown.widths[0].tolist() if w) + cost.overhead
        current = current.after_step(Observation(emitted, int(grown.nodes), seconds, verify))
        rows.append(at)
        tokens.append(emitted)
        parts.append(grown)
        at += emitted
    return Replay(trace, policy, np.array(rows), np.array(tokens), Grown.stack(parts), policies=states)


def _priced(out: Replay, cost: CostModel) -> Replay:
    """With the seconds of every step."""

    def seconds(of: Any, count: Tensor) -> np.ndarray:
        sizes, where = torch.unique(count, return_inverse=True)
        table = np.array([of(n) if n else 0.0 for n in sizes.tolist()])
        priced: np.ndarray = table[where.numpy()]
        return priced

    out.verify = seconds(cost.verify, out.grown.nodes)
    out.draft = seconds(cost.draft, out.grown.widths).sum(-1)
    out.plain, out.overhead = plain_seconds(cost), cost.overhead
    return out
