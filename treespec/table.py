"""The article's table on any trace and any cost model, with what it leaves out: a tuned rival, and a bound.

Rows are the article's five strategies with its own settings, the best rival of a small grid, and *hindsight*: what a
step could have been if the right path were known for free. Columns are the article's: mean nodes verified (here with
the root, as everywhere), milliseconds of a verification, tokens per step, net speed-up; behind them what it does not
print: draft time, the interval, and whether the recording or the cost curve was left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from treespec.console import plain_console
from treespec.cost import At, CostModel, plain_seconds
from treespec.intervals import ratio_interval
from treespec.policies import (
    Autoregressive,
    BestFirst,
    DynamicTreePruner,
    Eagle2,
    Linear,
    OptTree,
    Policy,
    Sequoia,
    SpecInfer,
    Threshold,
    Throughput,
    Uniform,
)
from treespec.scoring import Score, priced, score
from treespec.search import TRUNCATED, halves
from treespec.trace import Trace

if TYPE_CHECKING:
    from treespec.compare import Progress

STRATEGIES: dict[str, Policy] = {
    "plain": Autoregressive(),
    "A linear": Linear(5),
    "B uniform 4×3": Uniform(4, 3),
    "C threshold": Threshold(),
    "D entropy + threshold": DynamicTreePruner(),
}
COLUMNS = (
    "strategy",
    "nodes verified",
    "verify ms",
    "tokens/step",
    "net speed-up (95 %)",
    "held out",
    "draft ms",
    "truncated",
    "policy",
)
SIZES = (4, 8, 16, 32, 48)  # budgets of the rivals' grid


def article_table(
    trace: Trace,
    cost: CostModel,
    *,
    context: float | None = None,
    batch: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The table.

    Args:
        trace: recorded supertrees.
        cost: seconds by nodes.
        context: cached tokens to price verifications at; None for the trace's mean.
        batch: trees in one verification.
        seed: of the split and the bootstrap.
        progress: told before every replay.

    Returns:
        ``{"rows": [...], "trace", "cost", ...}``. The rival was chosen on half of the prompts: ``held_out`` is every
        row's speed-up on the other half, where the comparison with it is fair.
    """
    at = priced(cost, trace, context, batch)
    seen, held = halves(trace, np.random.default_rng(seed))
    grid = list(rivals(at))
    total = len(STRATEGIES) + len(grid)

    def scored(done: int, policy: Policy) -> Score:
        if progress is not None:
            progress(done, total, policy.spec())
        return score(trace, policy, at)

    named = {name: scored(i, policy) for i, (name, policy) in enumerate(STRATEGIES.items())}
    found = [scored(len(STRATEGIES) + i, policy) for i, policy in enumerate(grid)]
    inside = [s for s in found if s.truncated_share <= TRUNCATED] or found
    named["best rival"] = max(inside, key=lambda s: s.speedup(seen))
    rows = [{"strategy": name, **_row(s, at, held, seed)} for name, s in named.items()]
    return {
        "rows": [*rows, hindsight(trace, at, held, seed)],
        "trace": trace.path,
        "cost": {"name": str(cost), "provenance": getattr(cost, "provenance", "")},
        "context": at.context,
        "batch": batch,
        "rivals_tried": len(grid),
        "positions": len(trace),
    }


def rivals(cost: CostModel) -> Iterator[Policy]:
    """A small grid of every published policy that the article does not name, and ours."""
    for gamma in (1, 2, 3, 4, 8):
        yield Linear(gamma)
    for size in SIZES:
        yield BestFirst(budget=size)
        yield BestFirst(budget=size, grow=0.1)
        yield Eagle2(total=size + 1, depth=4, top_k=4)
        yield Eagle2(total=size + 1)
        yield OptTree(budget=size)
        yield OptTree(budget=size, delta=0.2)
        yield Sequoia(budget=size)
    yield SpecInfer()
    yield SpecInfer((2, 1, 1))
    yield Throughput(cost=cost)


def _row(found: Score, cost: At, held: np.ndarray, seed: int) -> dict[str, Any]:
    row = found.row(seed=seed)
    return {
        **row,
        "held_out": found.speedup(held),
        "extrapolated": cost.extrapolates(found.most),
        "most_nodes": found.most,
    }


def hindsight(trace: Trace, cost: At, held: np.ndarray, seed: int) -> dict[str, Any]:
    """The bound: every step verifies the right path alone, as long as serves best, and drafting costs nothing.

    No policy whose trees lie in the recording can be faster on this trace and cost model. The lengths are chosen by
    dynamic programming from the end of each text: least seconds to write what is left.

    Args:
        trace: recorded supertrees.
        cost: priced already.
        held: numbers of the prompts for ``held_out``.
        seed: of the bootstrap.
    """
    reach = np.maximum.reduceat(trace.nodes["depth"] * trace.nodes["is_true"], trace.root).astype(int)
    step = np.array([cost.verify(1 + k) + cost.overhead for k in range(int(reach.max(initial=0)) + 1)])
    step[0] = min(step[0], plain_seconds(cost))
    numbers = np.unique(trace.prompt)
    walks = [_cheapest(reach[trace.prompt == p], trace.left[trace.prompt == p], step) for p in numbers]
    seconds, lengths = np.array([w[0] for w in walks]), np.concatenate([w[1] for w in walks])
    plain = np.array([(trace.prompt == p).sum() for p in numbers]) * plain_seconds(cost)
    among = np.isin(numbers, held)
    return {
        "strategy": "hindsight",
        "policy": "the right path alone, for free",
        "nodes": float((1 + lengths).mean()),
        "verify_ms": float(1e3 * np.mean([cost.verify(1 + int(k)) for k in lengths])),
        "draft_ms": 0.0,
        "step_ms": float(1e3 * seconds.sum() / len(lengths)),
        "tokens_per_step": float((1 + lengths).mean()),
        "speedup": float(plain.sum() / seconds.sum()),
        "truncated_share": 0.0,
        "speedup_ci": list(ratio_interval(plain, seconds, seed)),
        "held_out": float(plain[among].sum() / seconds[among].sum()),
        "extrapolated": cost.extrapolates(1 + int(lengths.max())),
        "most_nodes": 1 + int(lengths.max()),
    }


def _cheapest(reach: np.ndarray, left: np.ndarray, step: np.ndarray) -> tuple[float, np.ndarray]:
    """Least seconds to write a text, and the accepted length of every step of that walk.

    Args:
        reach: ``[P]`` longest right path at each position.
        left: ``[P]`` tokens behind each position.
        step: seconds of a step whose path has k nodes.
    """
    best, choice = np.zeros(len(reach) + 1), np.zeros(len(reach), dtype=int)
    for at in range(len(reach) - 1, -1, -1):
        most = min(reach[at], left[at] - 1)
        options = step[: most + 1] + best[at + 1 : at + most + 2]
        choice[at] = int(options.argmin())
        best[at] = options[choice[at]]
    walk, at = [], 0
    while at < len(reach):
        walk.append(choice[at])
        at += choice[at] + 1
    return float(best[0]), np.array(walk)


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as people read it, by :data:`COLUMNS`; what it does not know is left empty."""
    far, outside = row.get("extrapolated", False), row.get("truncated_share", 0.0)
    ci = " ({:.2f} to {:.2f})".format(*row["speedup_ci"]) if row.get("speedup_ci") else ""
    return {
        "strategy": row.get("strategy", "") + (" †" if outside > TRUNCATED else ""),
        "nodes verified": f"{row['nodes']:.1f}",
        "verify ms": f"{row['verify_ms']:.1f}" + ("*" if far else ""),
        "tokens/step": f"{row['tokens_per_step']:.2f}",
        "net speed-up (95 %)": f"{row['speedup']:.2f}×{ci}",
        "held out": f"{row['held_out']:.2f}×" if "held_out" in row else "",
        "draft ms": f"{row['draft_ms']:.1f}",
        "truncated": f"{100 * outside:.1f} %" if "truncated_share" in row else "",
        "policy": str(row["policy"]),
    }


def print_table(result: dict[str, Any]) -> None:
    """The rows of :func:`article_table` on stdout."""
    table = Table(title=f"{result['trace']} at the cost of {result['cost']['name']}, context {result['context']:.0f}")
    for head in COLUMNS:
        left = head in ("strategy", "policy")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(*cells(row).values())
    plain_console(200).print(table)
    print(f"cost: {result['cost']['provenance']}")
    print("nodes: root included; *: some verifications lie outside what the cost curve was measured for or "
          "its GPUs hold; truncated: steps that asked for more than was recorded. †: too many of them, so the row is "
          "smaller and cheaper than the policy is: record with wider caps.")  # fmt: skip
