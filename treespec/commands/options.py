"""Options that several commands share, and what goes to stderr."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from treespec.errors import InputError, printable
from treespec.launch import end_with_the_others, follow_quietly, own_device, rank, world

if TYPE_CHECKING:
    from treespec.compare import Progress
    from treespec.pairs import Pair

notes = Console(stderr=True)
BRIEF = 80  # characters of a progress bar's description

Target = Annotated[str, typer.Option(help="Target: 'smollm2' (embedded), 'toy', a local folder or a hub id.")]
Draft = Annotated[
    str,
    typer.Option(
        help="Draft: 'mix' (shipped feature head and n-grams), 'head', 'lm' (shipped small model), 'ngram', 'none', "
        "'self', a folder or a hub id. 'auto': mix for smollm2, ngram for others."
    ),
]
Fast = Annotated[
    str,
    typer.Option(
        help="Faster forwards, checked against the model's own: 'cpu' (packed products), 'lean', 'compile', 'off'."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32 (exact), bfloat16, float16, or int8 and int4 for the target (bitsandbytes).")
]
Where = Annotated[
    str,
    typer.Option(
        "--device",
        help="'auto' (GPUs, then CPU and disk for what does not fit), 'cpu', 'cuda:1' or 'cuda:0,cuda:1'. Under "
        "torchrun the target is divided among the processes.",
    ),
]
Parallel = Annotated[
    str,
    typer.Option(
        help="Under torchrun: 'data' (each process takes its share of the work) or 'tensor' (the target is divided)."
    ),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, max=1_000_000, help="Most new tokens per prompt.")]


def finite(value: float) -> float:
    """An option's number; typer's ranges let NaN and, above, infinity through.

    Raises:
        BadParameter: for these.
    """
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Temperature = Annotated[float, typer.Option(min=0.0, callback=finite, help="0 is greedy; above, tokens are drawn.")]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of everything random.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]
Cost = Annotated[
    str,
    typer.Option(
        help="Cost model: 'measured', 'article', a file of treespec measure, hardware such as a100x4:70b or "
        "rtx4090:8b+1b@int4, or a table in ms such as '1:24.5 36:28.1; draft 1:3.1; overhead 0.5'."
    ),
]
Settings = Annotated[int, typer.Option(min=1, max=1_000_000, help="Settings to try.")]
Context = Annotated[
    int, typer.Option(min=0, max=1_000_000_000, help="Cached tokens to price at; 0 is the trace's own mean.")
]
Batch = Annotated[int, typer.Option(min=1, max=1_000_000, help="Trees in one verification.")]


def loaded(target: str, draft: str, dtype: str, fast: str, device: str = "auto", parallel: str = "tensor") -> Pair:
    """The pair of a command.

    Under ``torchrun``, with ``parallel="tensor"``, the target is divided among the processes, and only the first one
    prints and writes; with ``"data"`` each process has the whole pair on its own device.

    Raises:
        InputError: for another ``parallel``.
    """
    from treespec.pairs import load_pair

    divided = check_parallel(parallel) == "tensor" and world() > 1
    if world() > 1:
        end_with_the_others()
    if divided and rank() > 0:
        follow_quietly()
    if world() > 1 and not divided and device == "auto":
        device = own_device()
    pair = load_pair(target, draft, dtype, fast, device=device, tensor_parallel=divided)
    if fast != "off":
        notes.print(f"[dim]target: {pair.forward}[/dim]", highlight=False)
    return pair


def check_parallel(parallel: str) -> str:
    """Either ``"data"`` or ``"tensor"``.

    Raises:
        InputError: for anything else.
    """
    if parallel not in ("data", "tensor"):
        raise InputError(f"--parallel must be data or tensor; got {parallel!r}")
    return parallel


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, as the function that moves it: done, total, what is running; of the first process alone."""
    if rank() > 0:
        yield lambda done, total, what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=_brief(what))


def _brief(what: str) -> str:
    """What is running, short enough for a line: ids of prompts are anybody's text."""
    return printable(what if len(what) <= BRIEF else what[: BRIEF - 1] + "…")
