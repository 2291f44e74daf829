"""Commands about cost: measure a curve, price the article's table, run the long benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from treespec.commands.options import (
    Batch,
    Context,
    Cost,
    Draft,
    Dtype,
    Fast,
    Force,
    Json,
    NewTokens,
    Seed,
    Target,
    Temperature,
    Where,
    loaded,
    progress_bar,
)
from treespec.console import plain_console
from treespec.errors import InputError
from treespec.files import writable
from treespec.launch import rank, world


def measure(
    out: Annotated[Path, typer.Option(help="Where the curve goes, a JSON file.")],
    target: Target = "smollm2",
    draft: Draft = "auto",
    dtype: Dtype = "float32",
    fast: Fast = "off",
    device: Where = "auto",
    sizes: Annotated[
        str, typer.Option(help="Nodes of a verification, comma-separated.")
    ] = "1,2,4,8,16,24,32,48,64,96,128",
    contexts: Annotated[str, typer.Option(help="Cached tokens before the tree, comma-separated.")] = "128,512",
    widths: Annotated[str, typer.Option(help="Nodes of a draft forward, comma-separated.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Repetitions of everything, after a warm-up.")] = 7,
    seed: Seed = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure what a verification of n nodes takes on this machine, a draft forward, and the rest of a step.

    The file then serves as --cost of replay, tune and table, and as throughput:cost=FILE.

    Example: treespec measure --out here.json --fast cpu --sizes 1,4,8,16,32,64 --contexts 128,512 --rounds 9
    """
    from treespec.measure import check_points
    from treespec.measure import measure as run

    numbers = {"--sizes": sizes, "--contexts": contexts, "--widths": widths}
    parsed = {name: _numbers(name, text) for name, text in numbers.items()}
    check_points(*parsed.values())
    writable(out, force)
    pair = loaded(target, draft, dtype, fast, device)
    with progress_bar() as tell:
        curve, more = run(
            pair,
            sizes=parsed["--sizes"],
            contexts=parsed["--contexts"],
            widths=parsed["--widths"],
            rounds=rounds,
            seed=seed,
            progress=tell,
        )
    curve.save(out, **more)
    if as_json:
        print(json.dumps({**curve.as_dict(), **more}, ensure_ascii=False))
        return
    shown = Table("forward", "context", "rows", "ms (median)", "95 %", title=curve.provenance)
    for kind in ("verify", "draft"):
        for point in more["points"][kind]:
            low, high = (1e3 * s for s in point["interval"])
            where = (str(point.get("context", "")), str(point["rows"]))
            shown.add_row(kind, *where, f"{1e3 * point['seconds']:.2f}", f"{low:.2f} to {high:.2f}")
    plain_console(120).print(shown)
    print(f"overhead {1e3 * curve.overhead:.2f} ms a step; plain {1e3 * (curve.plain or 0):.2f} ms a token; in {out}")


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{name} must be whole numbers such as 1,8,32; got {text!r}") from None


def table(
    trace: Annotated[Path, typer.Argument(help="A trace of treespec record.")],
    cost: Cost = "measured",
    context: Context = 0,
    batch: Batch = 1,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The article's table on a trace and a cost model: plain, A linear, B uniform, C threshold, D dynamic.

    Beside them the best rival of a small grid, and the hindsight bound: the right path alone, known for free.

    Example: treespec table t.parquet --cost article
    """
    from treespec.cost import load_cost
    from treespec.table import article_table, print_table
    from treespec.trace import Trace

    model, recorded = load_cost(cost), Trace.load(trace)
    with progress_bar() as tell:
        result = article_table(recorded, model, context=context or None, batch=batch, seed=seed, progress=tell)
    print(json.dumps(result)) if as_json else print_table(result)


def bench(
    out: Annotated[Path, typer.Option(help="JSON Lines, one a round; an unfinished file is gone on with.")],
    rounds: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Rounds in all, each a prompt under every policy.")
    ] = 100,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with id, category, turns. Default: the repo's dialogue and code.")
    ] = None,
    input_length: Annotated[
        int, typer.Option(min=0, help="Tokens of every prompt, other text put before it, e.g. 2048; 0 leaves it.")
    ] = 0,
    policies: Annotated[
        str, typer.Option(help="Comma-separated, or 'all'; plain is always added.")
    ] = "plain,linear,uniform,threshold,dynamic",
    target: Target = "smollm2",
    draft: Draft = "auto",
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    fast: Fast = "off",
    device: Where = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a file of other settings.")] = False,
    as_json: Json = False,
) -> None:
    """Run many rounds over mixed dialogue and code prompts, live; kill it at any time, the same command goes on.

    Under torchrun or accelerate launch each process takes its share of the rounds, on its own device, into
    ROUNDS.rank0-of-2.jsonl and so on; put these together with treespec merge.

    Example: treespec bench --rounds 10000 --input-length 2048 --policies linear,dynamic --out rounds.jsonl
    """
    from treespec.bench import bench as run
    from treespec.bench import make_plan, read_rounds
    from treespec.compare import print_table
    from treespec.policies import parse_policies
    from treespec.prompts import mixed_prompts, read_prompts
    from treespec.trace.shards import own_file

    chosen = parse_policies(policies)
    rows = read_prompts(prompts or mixed_prompts())
    if prompts is None:
        rows = [p for p in rows if p.category in ("dialogue", "code")]
    plan = make_plan(
        chosen,
        rows,
        target=target,
        draft=draft,
        dtype=dtype,
        fast=fast,
        input_length=input_length,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    share = (rank(), world())
    out = own_file(out, *share)
    try:
        read_rounds(out, plan, share)  # before a model is loaded
    except InputError:
        if not force or not out.is_file():
            raise
        out.unlink()
    pair = loaded(target, draft, dtype, fast, device, "data")
    with progress_bar() as tell:
        result = run(pair, rows, plan, out, rounds, share=share, progress=tell)
    print(json.dumps(result)) if as_json else print_table({**result, "prompts": result["rounds"], "rounds": 1})
