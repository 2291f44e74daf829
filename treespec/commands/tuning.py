"""Commands that answer "which settings?": search them on a trace, hand them to another engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

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
    Seed,
    Settings,
    Target,
    notes,
    progress_bar,
)
from treespec.console import plain_console
from treespec.files import writable


def tune(
    trace: Annotated[Path, typer.Argument(help="A trace of treespec record.")],
    cost: Cost = "measured",
    policy: Annotated[str, typer.Option(help="Names of policies to search, comma-separated, or 'all'.")] = "all",
    settings: Settings = 1000,
    out: Annotated[Path | None, typer.Option(help="Where the result goes, for treespec export.")] = None,
    context: Context = 0,
    batch: Batch = 1,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Run the recommended setting live and set it beside the prediction.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="What the trace was recorded from. Default: the repo's own.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Held-out prompts of --confirm.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Repetitions of --confirm.")] = 1,
    target: Target = "smollm2",
    draft: Draft = "auto",
    dtype: Dtype = "float32",
    fast: Fast = "off",
    seed: Seed = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Find the setting that gives the most tokens per second, by replaying a trace under thousands of them.

    Plain decoding and chains are always among them, so the answer may be "do not speculate". The speed-up that is
    quoted comes from prompts that the search did not see.

    Example: treespec tune t.parquet --cost measured --policy dynamic,bestfirst --out tuned.json
    """
    from treespec.confirm import confirm as check
    from treespec.confirm import held_prompts
    from treespec.cost import load_cost
    from treespec.pairs import load_pair
    from treespec.prompts import mixed_prompts, read_prompts
    from treespec.trace import Trace
    from treespec.tune import policy_types
    from treespec.tune import tune as run

    if out is not None:
        writable(out, force)
    policy_types(policy)
    rows = read_prompts(prompts or mixed_prompts()) if confirm else []  # a typo should not wait for the search
    model, recorded = load_cost(cost), Trace.load(trace)
    if confirm:
        held_prompts(recorded, rows, limit, seed)
    with progress_bar() as tell:
        found = run(
            recorded,
            model,
            policy,
            settings=settings,
            context=context or None,
            batch=batch,
            seed=seed,
            progress=tell,
        )
    result = found.as_dict()
    if confirm:
        pair = load_pair(target, draft, dtype, fast)
        with progress_bar() as tell:
            result["confirmed"] = check(
                found.recommended["policy"],
                recorded,
                model,
                pair,
                rows,
                limit=limit,
                rounds=rounds,
                seed=seed,
                progress=tell,
            )
    if out is not None:
        found.save(out, **({"confirmed": result["confirmed"]} if confirm else {}))
    print(json.dumps(result)) if as_json else _show(result)


def _show(result: dict[str, Any]) -> None:
    table = Table("policy", "tokens/step", "nodes", "verify ms", "draft ms", "speed-up", "held out", "truncated")
    for row in sorted(result["by_policy"].values(), key=lambda r: -r["search"]):
        numbers = [f"{row[k]:.2f}" for k in ("tokens_per_step", "nodes", "verify_ms", "draft_ms")]
        ratios = [f"{row[k]:.2f}×" for k in ("speedup", "held_out")]
        table.add_row(row["policy"], *numbers, *ratios, f"{100 * row['truncated_share']:.1f} %")
    table.title = f"best setting of each policy, {result['settings']} tried, cost {result['cost']['name']}"
    console = plain_console(180)
    console.print(table)
    best, held = result["recommended"], result["recommended"]["held_out"]
    low, high = held["speedup_ci"]
    console.print(
        f"recommended: {best['policy']}  {held['speedup']:.2f}× ({low:.2f} to {high:.2f}) on "
        f"{result['prompts']['held_out']} held-out prompts, {held['tokens_per_step']:.2f} tokens per step"
    )
    if best["speedup"] <= 1:
        console.print("no setting beats plain decoding at this cost: do not speculate")
    if "confirmed" in result:
        told, live = result["confirmed"]["predicted"], result["confirmed"]["measured"]
        low, high = live["speedup_ci"]
        console.print(
            f"on {len(result['confirmed']['prompts'])} of them, decoding alone: predicted "
            f"{told['decoding_speedup']:.2f}×, measured {live['decoding_speedup']:.2f}× "
            f"({result['confirmed']['ratio']:.2f} of it); tokens per step {told['tokens_per_step']:.2f} and "
            f"{live['tokens_per_step']:.2f}. Whole texts, prompts' forwards included: {live['speedup']:.2f}× "
            f"({low:.2f} to {high:.2f})"
        )


def export(
    tuned: Annotated[str, typer.Argument(help="A file of treespec tune --out, or a policy such as linear:gamma=4.")],
    to: Annotated[
        str, typer.Option(help="transformers, sglang, tensorrt-llm, vllm, llama.cpp, openvino or eagle.")
    ] = "transformers",
    as_json: Json = False,
) -> None:
    """Print settings for another engine: exact flags or JSON on stdout, what it cannot express on stderr.

    Example: treespec export tuned.json --to sglang
    """
    from treespec.export import export as run
    from treespec.export import load_tuning

    result = run(load_tuning(tuned), to)
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    if result.text:
        print(result.text)
    for note in result.notes:
        notes.print(f"- {note}", style="dim", highlight=False, markup=False)
