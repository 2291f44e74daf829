"""One HTML file for a design review: what to deploy, how sure that is, and what was not measured.

Everything on the page is derived from a trace and a cost model: the article's table (:mod:`treespec.table`), a search
with a held-out half (:mod:`treespec.tune`), the steps of a replay. Nothing is run live, and the page says so.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespec.cost import At, CostModel, load_cost
from treespec.errors import InputError
from treespec.files import write_whole
from treespec.known import known_tokenizer
from treespec.page import Command, Section, Table, Tile, render
from treespec.provenance import not_measured, record_command, recorded, sha256
from treespec.scoring import priced
from treespec.table import COLUMNS, article_table, cells
from treespec.trace import Trace
from treespec.tune import Tuning, tune

if TYPE_CHECKING:
    from treespec.compare import Progress


@dataclass(frozen=True)
class Review:
    """What a report is made of.

    Args:
        trace: recorded supertrees.
        cost: the prices, at a context and a batch.
        table: of :func:`treespec.table.article_table`.
        tuning: of :func:`treespec.tune.tune`.
        tokenizer: the target's, for token texts; None shows ids.
        options: of the command line that makes the same page, in order.
    """

    trace: Trace
    cost: At
    table: dict[str, Any]
    tuning: Tuning
    tokenizer: Any
    options: dict[str, Any]

    @property
    def best(self) -> dict[str, Any]:
        """The recommended setting's row."""
        return self.tuning.recommended


def report(
    trace: Trace | str | Path,
    out: str | Path,
    cost: CostModel | str | Path = "measured",
    *,
    question: str = "",
    policies: str = "all",
    settings: int = 1000,
    context: float | None = None,
    batch: int = 1,
    seed: int = 0,
    tokenizer: Any = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a page for a design review: one HTML file that opens offline, whole or not at all.

    Args:
        trace: a trace or its file.
        out: the HTML file.
        cost: a cost model, its name or its file.
        question: the page's title; default: which tree the trace's draft should grow.
        policies: names to search, separated by commas, or ``"all"``.
        settings: how many the search tries.
        context: cached tokens to price verifications at; None for the trace's mean.
        batch: trees in one verification.
        seed: of the search, the split and the bootstrap.
        tokenizer: gives tokens their text; default the target's, if it is on this machine.
        force: replace ``out`` if it is there.
        progress: told before every replay.

    Returns:
        ``{"out", "bytes", "recommended", "held_out", "positions"}``.

    Raises:
        InputError: if ``out`` exists, plotly is missing, or the cost model is none.
        TraceError: for a trace that cannot be read.
        PolicyError: for an unknown policy.
    """
    path = Path(out)
    if path.exists() and not force:
        raise InputError(f"{path} exists; give another --out, or --force to replace it")
    _need_plotly()
    trace = trace if isinstance(trace, Trace) else Trace.load(trace)
    model = load_cost(cost) if isinstance(cost, (str, Path)) else cost
    common: dict[str, Any] = {"context": context, "batch": batch, "seed": seed, "progress": progress}
    options = {"cost": str(model), "policy": policies, "settings": settings, "context": int(context or 0)}
    review = Review(
        trace,
        priced(model, trace, context, batch),
        article_table(trace, model, **common),
        tune(trace, model, policies, settings=settings, **common),
        tokenizer or known_tokenizer(str(trace.about.get("target", ""))),
        {**options, "batch": batch, "seed": seed, "question": question},
    )
    page = render(question or _question(trace), _made(trace), sections(review))
    write_whole(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return {
        "out": str(path),
        "bytes": path.stat().st_size,
        "recommended": review.best["policy"],
        "held_out": review.best["held_out"],
        "positions": len(trace),
    }


def _need_plotly() -> None:
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise InputError("a report is drawn by plotly, which is not installed: pip install 'treespec[lab]'") from None


def _question(trace: Trace) -> str:
    about = trace.about
    draft, target = about.get("draft"), about.get("target")
    return f"Which tree should the draft {draft} grow for {target}, and is it worth its check?"


def _made(trace: Trace) -> str:
    from treespec import __version__

    today = datetime.date.today().isoformat()
    source = f" from {Path(trace.path).name} (SHA-256 {sha256(trace.path)[:16]}…)" if Path(trace.path).is_file() else ""
    return f"Made by treespec {__version__} on {today}{source}. One file, nothing is loaded from elsewhere."


def sections(review: Review) -> list[Section]:
    """The page's questions and answers, in the order a reviewer asks them."""
    from treespec.report_figures import picture_sections  # needs plotly

    return [
        recommendation(review),
        article(review),
        *picture_sections(review),
        Section("recorded", "What was recorded, and with which models?", facts=recorded(review.trace)),
        unmeasured(review),
        reproduction(review),
    ]


def recommendation(review: Review) -> Section:
    """The answer first: the setting, its interval, and what else came close."""
    best, held = review.best, review.best["held_out"]
    prompts = review.tuning.about["prompts"]["held_out"]
    low, high = held["speedup_ci"]
    interval = f"95 %: {low:.2f} to {high:.2f}, {prompts} held-out prompts"
    tiles = [
        Tile("predicted speed-up", f"{held['speedup']:.2f}×", interval),
        Tile("tokens per step", f"{best['tokens_per_step']:.2f}", "accepted + 1 bonus; plain decoding is 1.00"),
        Tile("nodes per verification", f"{best['nodes']:.1f}", "mean, the root included"),
        Tile("time of a step", f"{best['step_ms']:.1f} ms", f"plain decoding: {1e3 * review.cost.plain:.1f} ms"),
    ]
    rows = sorted(review.tuning.by_policy.values(), key=lambda row: -row["search"])
    table = Table(
        ("best setting of each policy", "tokens/step", "nodes", "verify ms", "draft ms", "speed-up, searched half",
         "speed-up, held-out half", "truncated"),
        [
            (row["policy"], *(f"{row[k]:.2f}" for k in ("tokens_per_step", "nodes", "verify_ms", "draft_ms")),
             f"{row['search']:.2f}×", f"{row['held_out']:.2f}×", f"{100 * row['truncated_share']:.1f} %")
            for row in rows
        ],
    )  # fmt: skip
    about = review.tuning.about
    how = (
        f"{about['settings']:,} settings of {review.options['policy']} policies were replayed on "
        f"{about['prompts']['search']} prompts; the figures quoted come from the {prompts} others. The interval is a "
        "bootstrap over prompts: it holds for prompts like these, and not for errors of the cost model."
    )
    return Section("answer", "Which setting, and how sure is that?", verdict(review), tiles, table=table, after=[how])


def verdict(review: Review) -> str:
    """The recommendation in one honest sentence or two."""
    best, held = review.best, review.best["held_out"]
    low, high = held["speedup_ci"]
    ratio = f"{held['speedup']:.2f}× plain decoding (95 %: {low:.2f} to {high:.2f})"
    at = f"at the cost of {review.cost}, context {review.cost.context:.0f}, batch {review.cost.batch}"
    if best["policy"] == "plain":
        return f"Do not speculate: {at}, no setting that was tried is faster than plain decoding."
    if low > 1:
        said = f"Use {best['policy']}: {ratio}, predicted on held-out prompts {at}."
    elif held["speedup"] > 1:
        said = (
            f"{best['policy']} came out best with {ratio} {at}, but these held-out prompts do not tell it apart from "
            "plain decoding."
        )
    else:
        said = (
            f"Do not rely on {best['policy']}: it was best where it was searched, yet gives only {ratio} on held-out "
            f"prompts {at}."
        )
    return f"{said} {_against_chain(review)}".strip()


def _against_chain(review: Review) -> str:
    """What a tree adds over the best chain: the rival that every engine can run."""
    chain = review.tuning.by_policy.get("linear")
    if chain is None or review.best["policy"].partition(":")[0] in ("linear", "plain"):
        return ""
    mine, its = round(review.best["held_out"]["speedup"], 2), round(chain["held_out"], 2)
    word = "more than" if mine > its else "less than" if mine < its else "as much as"
    return f"That is {word} the best chain, {chain['policy']}, gives on the same prompts: {its:.2f}×."


def article(review: Review) -> Section:
    """The article's table on this trace."""
    table = review.table
    return Section(
        "table",
        "What would the article's strategies give here?",
        table=Table(COLUMNS, [tuple(cells(row).values()) for row in table["rows"]]),
        after=[
            "nodes: root included. *: some verifications lie outside what the cost model was measured for or "
            "its GPUs hold. truncated: steps that asked for more than was recorded; †: too many of them, so the row is "
            "smaller and cheaper than the policy is."
        ],
        texts=[
            f"The article's five strategies with its own settings, the best of {table['rivals_tried']} rivals, and "
            "hindsight: the right path alone, known for free, which no policy can beat. Priced with "
            f"{table['cost']['name']} at {table['context']:.0f} cached tokens, batch {table['batch']}."
        ],
    )


def unmeasured(review: Review) -> Section:
    """What must not be read into the page."""
    points = not_measured(review.trace, review.cost, review.table["rows"], review.tuning.as_dict())
    return Section("unmeasured", "What was not measured?", points=points)


def reproduction(review: Review) -> Section:
    """The commands behind the page, in their order."""
    line, said = record_command(review.trace)
    name = Path(review.trace.path).name or "trace.parquet"
    best = review.best["policy"]
    common = [name, *_options(review, "cost", "context", "batch", "seed")]
    searched = [name, *_options(review, "cost", "policy", "settings", "context", "batch", "seed")]
    page = [*searched, *_options(review, "question"), "--out", "review.html"]
    commands = [
        Command("Record the trace:", line),
        Command("Measure the cost curve of the machine that will serve (then give --cost here.json):",
                "treespec measure --out here.json"),
        Command("The article's table:", _line("table", common)),
        Command("The search, and after it a live run of what it recommends:",
                _line("tune", [*searched, "--out", "tuned.json", "--confirm"])),
        Command("The steps of the recommended setting:",
                _line("replay", [name, "--policy", best, "--cost", review.options["cost"], "--out", "steps.csv"])),
        Command("Settings for another engine:", "treespec export tuned.json --to sglang"),
        Command("This page:", _line("report", page)),
    ]  # fmt: skip
    return Section("again", "How is this done again?", texts=said, commands=commands)


def _options(review: Review, *names: str) -> list[str]:
    return [word for name in names if review.options[name] != "" for word in (f"--{name}", str(review.options[name]))]


def _line(command: str, words: Sequence[str]) -> str:
    return f"treespec {command} {shlex.join(words)}"
