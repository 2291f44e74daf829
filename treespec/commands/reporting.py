"""The command that writes a page for a design review."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from treespec.commands.options import Batch, Context, Cost, Force, Json, Seed, Settings, progress_bar
from treespec.errors import InputError
from treespec.files import writable


def report(
    trace: Annotated[Path, typer.Argument(help="A trace of treespec record.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page, one HTML file that opens offline.")],
    cost: Cost = "measured",
    question: Annotated[str, typer.Option(help="The page's title: what the review has to decide.")] = "",
    policy: Annotated[str, typer.Option(help="Names of policies to search, comma-separated, or 'all'.")] = "all",
    settings: Settings = 1000,
    context: Context = 0,
    batch: Batch = 1,
    seed: Seed = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one HTML file for a design review: the recommendation with its interval, the article's table, figures.

    It says what was recorded, which cost curve the seconds are from, what was not measured, and how to do it all again.

    Example: treespec report t.parquet -o review.html --cost here.json
    """
    from treespec.report import report as run
    from treespec.tune import policy_types

    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out must end in .html; got {out}")
    writable(out, force)
    policy_types(policy)
    with progress_bar() as tell:
        result = run(
            trace,
            out,
            cost,
            question=question,
            policies=policy,
            settings=settings,
            context=context or None,
            batch=batch,
            seed=seed,
            force=force,
            progress=tell,
        )
    if as_json:
        print(json.dumps(result))
        return
    held = result["held_out"]
    low, high = held["speedup_ci"]
    print(
        f"{result['out']} ({result['bytes'] / 1e6:.1f} MB): {result['recommended']}, predicted "
        f"{held['speedup']:.2f}× ({low:.2f} to {high:.2f}) on held-out prompts"
    )
