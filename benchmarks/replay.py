"""How fast a replay is: 3,000 positions under a new setting, and 300,000, against which it should grow linearly.

Positions are drawn from a trace with replacement, as texts of the trace's own lengths would come; nodes are shared, so
memory is the replay's own. Every repetition has another threshold, so nothing can be remembered from the one before.

    .venv/bin/python -m benchmarks.replay [--trace data/traces/greedy.parquet] [--rounds 9]

With ``--live 10`` instead: is the replay what the live engine does? Ten of the trace's prompts, every policy, step for
step and node for node, on the models of the trace.

    .venv/bin/python -m benchmarks.replay --live 10 [--draft mix] [--fast cpu]
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from treespec.api import generate
from treespec.pairs import Pair, chat_ids, load_pair
from treespec.policies import POLICIES, DynamicTreePruner, Policy, Throughput, parse_policy
from treespec.prompts import data_dir, mixed_prompts, read_prompts
from treespec.trace import Sampling, Trace, replay
from treespec.trace.fixed import fits

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


def live_steps(pair: Pair, policy: Policy, ids: list[int], trace: Trace) -> dict[int, tuple[Any, ...]]:
    """By root position: tokens, accepted, nodes, draft forwards, and the verified token paths."""
    about = trace.about
    options = Sampling(*(about[k] for k in ("sample", "temperature", "top_p", "seed", "max_new_tokens"))).options()
    result = generate(pair.target, pair.draft, ids, policy=policy, **options)
    out = {}
    for event in result.steps[1:]:
        kept, _ = event.tree.kept()
        out[event.position] = (
            list(event.tokens),
            len(event.path),
            len(kept),
            len(event.draft_forwards),
            {tuple(kept.token[kept.path(i)[1:]].tolist()) for i in range(1, len(kept))},
        )
    return out


def against_live(trace: Trace, pair: Pair, count: int) -> None:
    """Compare every policy of the package on some of the trace's prompts, and print what differs."""
    texts = {p.id: p.turns[:1] for p in read_prompts(mixed_prompts())}
    chosen = [k * len(trace.prompts) // count for k in range(count)]
    for name in POLICIES:
        policy = parse_policy(name)
        result, same, cut, other, unnamed = replay(trace, policy), 0, 0, 0, 0
        fixed = policy.shape is not None and fits(trace.index, policy.shape)
        for number in chosen:
            info = trace.prompts[number]
            want = live_steps(pair, policy, chat_ids(pair.tokenizer, texts[info.id]), trace)
            text = trace.tokens(number)
            for step in np.flatnonzero(trace.prompt[result.rows] == number).tolist():
                row, size = int(result.rows[step]), int(result.tokens[step])
                at = int(trace.positions[row]) - info.prompt_tokens
                tree, _ = result.tree(step).kept()
                nodes = {tuple(tree.token[tree.path(i)[1:]].tolist()) for i in range(1, len(tree))}
                found = want.get(int(trace.positions[row]))
                accepted, levels = int(result.grown.accepted[step]), int(result.grown.levels[step])
                figures = (text[at + 1 : at + 1 + size], accepted, int(result.grown.nodes[step]), levels)
                if bool(result.grown.truncated[step]):
                    cut += 1
                elif found is not None and found[:4] == figures and (nodes <= found[4] if fixed else nodes == found[4]):
                    same += 1
                    unnamed += nodes != found[4]
                else:
                    other += 1
        print(
            f"{name}: {same} steps the same ({unnamed} with nodes that were not recorded), {other} not, {cut} truncated"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=str(data_dir() / "traces" / "greedy.parquet"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--live", type=int, default=0, metavar="PROMPTS")
    parser.add_argument("--draft", default="mix")
    parser.add_argument("--fast", default="cpu")
    arguments = parser.parse_args()
    start = perf_counter()
    trace = Trace.load(arguments.trace)
    if arguments.live:
        against_live(trace, load_pair(draft=arguments.draft, fast=arguments.fast), arguments.live)
        return
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
