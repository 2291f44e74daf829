"""Commands about traces: record one, merge several, replay policies on it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from treespec.commands.options import (
    Cost,
    Draft,
    Dtype,
    Fast,
    Force,
    Json,
    NewTokens,
    Parallel,
    Seed,
    Target,
    Where,
    check_parallel,
    loaded,
    notes,
    progress_bar,
)
from treespec.errors import InputError
from treespec.files import writable, write_whole
from treespec.launch import rank, world


def record(
    out: Annotated[
        Path, typer.Option(help="The trace, a Parquet file; an unfinished recording of it is gone on with.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with id, category, turns. Default: the repo's own.")
    ] = None,
    target: Target = "smollm2",
    draft: Draft = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Only that many prompts, spread over the file; 0 is all.")] = 0,
    max_new_tokens: NewTokens = 64,
    sample: Annotated[
        str, typer.Option(help="How the target writes: 'greedy', or 'coupled' (noise by seed and position).")
    ] = "greedy",
    temperature: Annotated[float, typer.Option(help="Of coupled sampling, above 0.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of coupled sampling, in (0, 1].")] = 1.0,
    seed: Seed = 0,
    floor: Annotated[float, typer.Option(help="Least path probability of a recorded node.")] = 1e-4,
    depth: Annotated[int, typer.Option(help="Most levels of a supertree.")] = 10,
    width: Annotated[int, typer.Option(help="Most children of a node.")] = 64,
    nodes: Annotated[int, typer.Option(help="Only nodes among so many most probable of their levels and above.")] = 64,
    narrow: Annotated[str, typer.Option(help="The same apart for trees of so many children per node.")] = "10/4",
    dtype: Dtype = "float32",
    fast: Fast = "off",
    device: Where = "auto",
    parallel: Parallel = "data",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Record what the draft would guess at every position of the target's answers, for exact replays.

    Ctrl-C, or a kill, loses no finished prompt; the same command goes on. Under torchrun or accelerate launch each
    process records its share into T.rank0-of-2.parquet and so on; put these together with treespec merge. With
    --parallel tensor the target is divided among them instead, and the first one writes T.

    Example: treespec record --prompts data/prompts/mixed.jsonl --out t.parquet --limit 8 --max-new-tokens 48
    """
    from treespec.prompts import mixed_prompts, read_prompts
    from treespec.trace import Caps, Sampling
    from treespec.trace import record as run
    from treespec.trace.record import check_out
    from treespec.trace.shards import launched

    caps = Caps(floor, depth, width, nodes, _numbers(narrow))
    sampling = Sampling(sample, temperature, top_p, seed, max_new_tokens)
    rows = read_prompts(prompts or mixed_prompts())
    if limit and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    if check_parallel(parallel) == "tensor" or world() < 2:
        check_out(out, force)  # before a model is loaded; a process of several has a file of its own
    pair = loaded(target, draft, dtype, fast, device, parallel)
    with launched(len(rows), out, share=parallel == "data") as shard:
        options: dict[str, Any] = {"sampling": sampling, "caps": caps, "about": {"draft": draft, "fast": fast}}
        try:
            with progress_bar() if shard.rank == 0 else nullcontext() as tell:
                infos = run(pair, rows, shard.out, share=shard.numbers, force=force, progress=tell, **options)
        except KeyboardInterrupt:
            notes.print("finished prompts are kept: the same command goes on from here", style="dim")
            raise
        if parallel == "tensor" and rank() > 0:
            return
        told = {"out": str(shard.out), "prompts": len(infos), "positions": sum(p.positions for p in infos)}
        told["bytes"] = shard.out.stat().st_size
        if as_json:
            print(json.dumps(told))
        else:
            print("{out}: {prompts} prompts, {positions:,} positions, {bytes:,} bytes".format(**told))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("/") if part)
    except ValueError:
        raise InputError(f"--narrow must be whole numbers such as 10/4; got {text!r}") from None


def merge(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Traces of disjoint prompts, or rounds of treespec bench, of the same settings."),
    ],
    out: Annotated[Path, typer.Option(help="The merged trace, a Parquet file; or rounds, if it ends with .jsonl.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Put traces that several processes recorded into one, in the prompts' order; or rounds of a benchmark.

    Example: treespec merge t.rank0-of-2.parquet t.rank1-of-2.parquet --out t.parquet
    """
    from treespec.trace import merge as run

    writable(out, force)
    if out.suffix == ".jsonl":
        from treespec.bench import merge_rounds

        rounds = merge_rounds(traces, out)
        print(json.dumps({"out": str(out), "rounds": rounds})) if as_json else print(f"{out}: {rounds} rounds")
        return
    infos = run(traces, out, force)
    told = {"out": str(out), "prompts": len(infos), "positions": sum(p.positions for p in infos)}
    print(json.dumps(told)) if as_json else print("{out}: {prompts} prompts, {positions:,} positions".format(**told))


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace of treespec record.")],
    policy: Annotated[
        str, typer.Option(help="NAME[:key=value,…], e.g. dynamic:tau=0.05,budget=32. See 'treespec policies'.")
    ],
    cost: Cost = "measured",
    out: Annotated[Path | None, typer.Option(help="Where every step goes: a .parquet or .csv file.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Replay a policy on a trace: exact tokens per step and nodes, in a blink, without a model.

    Steps for which the policy wants nodes beyond the trace's caps are counted as truncated, never guessed. Seconds and
    speed-up come from the cost model.

    Example: treespec replay t.parquet --policy dynamic:tau=0.05,budget=32 --cost measured
    """
    from treespec.policies import parse_policy
    from treespec.trace import replay as run

    chosen = parse_policy(policy)
    if out is not None:
        writable(out, force)
        if out.suffix not in (".parquet", ".csv"):
            raise InputError(f"--out must end in .parquet or .csv; got {out}")
    result = run(str(trace), chosen, cost)
    if out is not None:
        steps = result.steps
        write_whole(
            out, lambda to: steps.to_csv(to, index=False) if out.suffix == ".csv" else steps.to_parquet(to, index=False)
        )
    totals = result.totals
    if as_json:
        print(json.dumps(totals))
        return
    print(
        "{policy}: {steps:,} steps over {positions:,} positions, {tokens_per_step:.3f} tokens a step, {nodes:.1f} "
        "nodes and {levels:.1f} draft forwards each, {speedup:.2f}x plain decoding in {seconds:.2f} s".format(**totals)
    )
    if totals["truncated_share"] > 0:
        notes.print(f"{totals['truncated_share']:.1%} of the steps want nodes that this trace does not hold: for them")
        notes.print("the figures count recorded nodes alone. Record with a lower --floor or more --nodes.")
