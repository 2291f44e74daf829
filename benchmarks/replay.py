"""How fast a replay is: 3,000 positions under a new setting, and 300,000, against which it should grow linearly.

Positions are drawn from a trace with replacement, as texts of the trace's own lengths would come; nodes are shared, so
memory is the replay's own. Every repetition has another threshold, so nothing can be remembered from the one before.

    .venv/bin/python -m benchmarks.replay [--trace data/traces/greedy.parquet] [--rounds 9]
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from treespec.policies import DynamicTreePruner, Policy, Throughput, parse_policy
from treespec.prompts import data_dir
from treespec.trace import Trace
from treespec.trace.replay import replay

SIZES = (3_000, 30_000, 300_000)
OTHERS = ("threshold", "bestfirst", "eagle2", "opttree", "sequoia", "linear")


def resampled(trace: Trace, count: int, seed: int) -> Trace:
    """A trace of ``count`` positions: whole prompts of this one, drawn with replacement, the last one cut."""
    random = np.random.default_rng(seed)
    starts = np.flatnonzero(np.diff(trace.prompt, prepend=-1))
    ends = np.append(starts[1:], len(trace))
    rows: list[np.ndarray] = []
    while sum(map(len, rows)) < count:
        k = int(random.integers(len(starts)))
        rows.append(np.arange(starts[k], ends[k]))
    left = [np.arange(len(r), 0, -1, dtype=np.int32) for r in rows]
    cut = len(rows[-1]) - (sum(map(len, rows)) - count)
    rows[-1], left[-1] = rows[-1][:cut], np.arange(cut, 0, -1, dtype=np.int32)
    at = np.concatenate(rows)
    prompt = np.repeat(np.arange(len(rows), dtype=np.int32), list(map(len, rows)))
    infos = [trace.prompts[int(trace.prompt[r[0]])] for r in rows]
    out = replace(trace, prompts=infos, root=trace.root[at], prompt=prompt, left=np.concatenate(left))
    own = torch.from_numpy(at)
    index = trace.index
    out.index = replace(
        index, root=index.root[own], size=index.size[own], room=index.room[own], mark=index.mark[:, own]
    )
    return out


def median_seconds(trace: Trace, policies: list[Policy]) -> float:
    """The median over the settings; the first is a warm-up."""
    seconds = []
    for policy in policies:
        start = perf_counter()
        replay(trace, policy)
        seconds.append(perf_counter() - start)
    return float(np.median(seconds[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=str(data_dir() / "traces" / "greedy.parquet"))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    start = perf_counter()
    trace = Trace.load(arguments.trace)
    index = trace.index
    loading = perf_counter() - start
    print(f"{trace}: loaded and indexed in {loading:.2f} s, {len(index.logp) / len(trace):.0f} nodes a position")
    for size in SIZES:
        many = resampled(trace, size, seed=size)
        rounds = arguments.rounds if size < SIZES[-1] else min(arguments.rounds, 3)
        settings: list[Policy] = [DynamicTreePruner(tau=0.08 + 0.001 * i) for i in range(rounds + 1)]
        seconds = median_seconds(many, settings)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"dynamic, {size:,} positions: {1e3 * seconds:,.0f} ms (median of {rounds}), peak memory {peak:.2f} GB")
    few = resampled(trace, SIZES[0], seed=1)
    for spec in OTHERS:
        policy = parse_policy(spec)
        print(f"{spec}, {SIZES[0]:,} positions: {1e3 * median_seconds(few, [policy] * 4):,.0f} ms")
    print(f"throughput, {SIZES[0]:,} positions: {1e3 * median_seconds(few, [Throughput()] * 4):,.0f} ms")


if __name__ == "__main__":
    main()
