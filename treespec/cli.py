"""The command line: the same calls as the library. Results on stdout, progress and notes on stderr.

Exit codes: 0, 2 for bad input (one sentence, no traceback), 1 for a failure, 130 for an interrupt.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from treespec.commands.options import (
    Draft,
    Dtype,
    Fast,
    Json,
    NewTokens,
    Seed,
    Target,
    Temperature,
    Where,
    finite,
    loaded,
    notes,
    progress_bar,
)
from treespec.commands.placing import doctor, plan
from treespec.commands.pricing import bench, measure, table
from treespec.commands.reporting import report
from treespec.commands.tracing import merge, record, replay
from treespec.commands.tuning import export, tune
from treespec.console import plain_console
from treespec.errors import DownloadError, InputError, OutOfMemoryError, PeerError, TreespecError, one_line
from treespec.launch import first, leave, lost, peer_error, rank

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tree-based speculative decoding with dynamic topology pruning.\n\nThe output is always the target's own "
    "text; what changes is how many of its tokens one forward gives. Try: treespec generate "
    "--prompt 'Why is the sky blue?'",
    rich_markup_mode=None,
)
for _command in (record, merge, replay, measure, tune, table, bench, export, report, plan, doctor):
    app.command()(_command)


@app.callback()
def _setup() -> None:
    bars = rank() == 0 and sys.stderr.isatty()  # a person who waits for a large model sees how far it is
    if not bars:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" not in sys.modules:  # it will read this if a command needs it; to import it takes seconds
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="What to ask; goes through the target's chat template.")],
    target: Target = "smollm2",
    draft: Draft = "auto",
    policy: Annotated[
        str, typer.Option(help="NAME[:key=value,…], e.g. dynamic:tau=0.05,budget=32. See 'treespec policies'.")
    ] = "",
    rule: Annotated[
        str, typer.Option(help="Acceptance rule: match, coupled, rrs, hybrid, block or traversal.")
    ] = "match",
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    fast: Fast = "off",
    device: Where = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming the text; the sums follow on stderr.

    Example: treespec generate --prompt "List three fruits." --policy dynamic:tau=0.05,budget=32 --max-new-tokens 48
    """
    from transformers import TextStreamer

    from treespec.api import make_policy
    from treespec.policies import parse_policy
    from treespec.prompts import is_text
    from treespec.verify import check_rules

    chosen = parse_policy(policy) if policy else None  # a typo should not wait for a model to load
    check_rules([rule])
    if not prompt.strip() or not is_text(prompt):
        raise InputError("the prompt is empty or no text; give some with --prompt")
    pair = loaded(target, draft, dtype, fast, device)
    streamer = (
        None if as_json or rank() > 0 else TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    result = pair.generate(
        prompt, policy=chosen, rule=rule, seed=seed, streamer=streamer, max_new_tokens=max_new_tokens, **sampling
    )
    if as_json:
        used = chosen or make_policy(None, pair.draft)
        row = {"text": result.text, "tokens": result.tokens, "policy": used.spec(), "stats": result.stats.as_dict()}
        print(json.dumps(row, ensure_ascii=False))
    elif rank() == 0:
        notes.print(f"[dim]{result.stats}[/dim]", highlight=False)


@app.command()
def compare(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with id, category, turns. Default: the repo's own.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Comma-separated, or 'all'; plain is always added.")
    ] = "plain,linear,uniform,threshold,dynamic",
    rules: Annotated[
        str, typer.Option(help="Comma-separated: match coupled rrs hybrid block traversal, each with every policy.")
    ] = "coupled",
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Repetitions of everything.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="Only that many prompts, spread over the file; 0 is all.")] = 0,
    target: Target = "smollm2",
    draft: Draft = "auto",
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    fast: Fast = "off",
    device: Where = "auto",
    as_json: Json = False,
) -> None:
    """Run policies on the same prompts, interleaved, one row each, with speed-ups against plain decoding.

    With --rules and --temperature, one row per rule and policy; pairs that would bias the text are named, not run.

    Example: treespec compare --policies plain,linear:gamma=3,dynamic:tau=0.05,budget=16 --limit 8 --rounds 3
    """
    from treespec.compare import compare as run
    from treespec.compare import print_table
    from treespec.policies import parse_policies
    from treespec.prompts import mixed_prompts, read_prompts
    from treespec.verify import check_rules

    chosen, named = parse_policies(policies), [rule.strip() for rule in rules.split(",") if rule.strip()]
    check_rules(named)
    rows = read_prompts(prompts or mixed_prompts())
    if limit and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    pair = loaded(target, draft, dtype, fast, device)
    with progress_bar() as tell:
        result = run(
            pair,
            rows,
            chosen,
            rules=named,
            rounds=rounds,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            progress=tell,
        )
    print(json.dumps(result)) if as_json else print_table(result)


@app.command()
def policies(as_json: Json = False) -> None:
    """List the policies with their parameters, defaults and sources."""
    from rich.table import Table

    from treespec.policies import POLICIES
    from treespec.policies.base import shown

    rows: list[dict[str, Any]] = [
        {"name": name, "parameters": cls().parameters(), "source": cls.source} for name, cls in POLICIES.items()
    ]
    if as_json:
        print(json.dumps({"policies": rows}))
        return
    table = Table("policy", "parameters and defaults", "source")
    for row in rows:
        table.add_row(row["name"], ", ".join(f"{k}={shown(v)}" for k, v in row["parameters"].items()), row["source"])
    plain_console(160).print(table)


@app.command()
def distill(
    out: Annotated[Path, typer.Option(help="Folder of the draft to make; an unfinished one is gone on with.")],
    target: Annotated[str, typer.Option(help="Target: 'smollm2' (embedded), a local folder or a hub id.")] = "smollm2",
    kind: Annotated[str, typer.Option(help="'head' (feature head, EAGLE family) or 'lm' (small model).")] = "head",
    answers: Annotated[int, typer.Option(min=1, help="How many training prompts the target answers.")] = 4096,
    answers_dir: Annotated[
        Path | None,
        typer.Option(help="Where answers are kept, to share them between drafts. Default: OUT/answers."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Your own prompt file. Default: the repo's templates.")] = None,
    epochs: Annotated[float, typer.Option(min=0.01, max=1e6, callback=finite, help="Passes over the answers.")] = 4.0,
    rate: Annotated[float, typer.Option(min=0.0, callback=finite, help="Highest learning rate.")] = 5e-4,
    unroll: Annotated[int, typer.Option(min=1, max=8, help="Levels a head is trained for, on its own outputs.")] = 3,
    vocabulary: Annotated[int, typer.Option(min=16, help="Tokens that a head can propose.")] = 8192,
    start: Annotated[Path | None, typer.Option(help="Folder of a head to go on from, e.g. with more answers.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=4, max=1_000_000, help="Most tokens per answer.")
    ] = 144,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Answers under way at once.")] = 64,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of prompts, answers, weights and order.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished draft in OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Train a draft for a target: the target answers prompts, the draft learns from its answers.

    Ctrl-C loses nothing but the answers under way and the steps since the last checkpoint; the same command goes on.
    The draft is then ready for --draft OUT.

    Example: treespec distill --out my-head --target my-model --kind head --answers 4096
    """
    from treespec.distill.loop import Plan
    from treespec.distill.pipeline import KINDS, Recipe, check_recipe
    from treespec.distill.pipeline import distill as run
    from treespec.files import check_folder
    from treespec.pairs import load_model
    from treespec.placement.devices import chosen_devices
    from treespec.placement.precision import dtype_name

    if kind not in KINDS:
        raise InputError(f"unknown kind of draft {kind!r}; known: {', '.join(KINDS)}")
    if os.path.lexists(out / "training.json") and not force:
        raise InputError(f"{out} holds a finished draft; give another --out, or --force to replace it")
    recipe = Recipe(
        kind=kind,
        answers=answers,
        new_tokens=max_new_tokens,
        slots=slots,
        unroll=unroll,
        draft_vocabulary=vocabulary,
        start=None if start is None else str(start),
        plan=Plan(epochs=epochs, rate=rate, seed=seed),
    )
    check_recipe(recipe, prompts)
    place = chosen_devices(device)[0].name
    for folder in (out, answers_dir or out):
        check_folder(folder)
    dtype = dtype_name(dtype)
    model, tokenizer = load_model(target, dtype)
    model.to(place)
    command = "treespec " + shlex.join(sys.argv[1:])
    report = run(model, tokenizer, target, out, recipe, answers=answers_dir, prompts=prompts, command=command)
    print(json.dumps(report)) if as_json else print((out / "README.md").read_text(encoding="utf-8"))


def main() -> None:
    """Run the command line; the exit code says how it went."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a sign gets its escape
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == 130:  # typer turns an interrupt into a return value
            raise KeyboardInterrupt
        leave()
        sys.exit(code or 0)
    except (DownloadError, OutOfMemoryError, PeerError) as error:
        _fail(error, 1)
    except TreespecError as error:
        if not first():
            sys.exit(2)
        _fail(error, 2)
    except RuntimeError as error:
        if not lost(error):
            raise
        _fail(peer_error(error), 1)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} See treespec --help", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; so be it
        sys.exit(1)


def _fail(what: object, code: int) -> None:
    notes.print(f"treespec: {one_line(str(what))}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
