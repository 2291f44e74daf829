"""``treespec distill``: answers, then a draft trained on them, then a folder that says how it was made.

Both halves can be stopped and go on where they were: answers are kept part by part, training by checkpoints.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from treespec.distill import train_head, train_lm
from treespec.distill.collect import collect, make_jobs
from treespec.distill.loop import Plan, held_out, train
from treespec.distill.prompts import training_prompts
from treespec.errors import InputError
from treespec.files import write_json, write_whole
from treespec.head import HeadConfig, load_head
from treespec.prompts import read_prompts

POOL = 12_000  # so that asking for more answers later adds to those there are
KINDS = ("head", "lm")
ALONE = 0.6  # share of a head's training on true features only
DEPTHS = 6  # measured levels below the root


@dataclass(frozen=True)
class Recipe:
    """What ``treespec distill`` does.

    Attributes:
        kind: ``"head"`` or ``"lm"``.
        answers: how many prompts the target answers.
        new_tokens: most tokens per answer.
        longest: prompts of more tokens are left out.
        slots: answers under way at once.
        unroll: levels of a head's later training; each after the first reads its own outputs.
        draft_vocabulary: tokens that a head can propose.
        start: folder of a head to go on from, with its vocabulary; None starts anew.
        plan: epochs, batch, rate, seed.
        shape: sizes of a language model.
    """

    kind: str = "head"
    answers: int = 4096
    new_tokens: int = 144
    longest: int = 512
    slots: int = 64
    unroll: int = 3
    draft_vocabulary: int = 8192
    start: str | None = None
    plan: Plan = field(default_factory=Plan)
    shape: train_lm.LmShape = field(default_factory=train_lm.LmShape)


def distill(
    target: Any,
    tokenizer: Any,
    name: str,
    out: str | Path,
    recipe: Recipe,
    *,
    answers: str | Path | None = None,
    prompts: str | Path | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Make a draft for a target.

    Args:
        target: a transformers causal LM.
        tokenizer: its tokenizer.
        name: of the target, for the card.
        out: folder of the draft.
        recipe: what to do.
        answers: folder of the target's answers; default ``out/answers``. Shared by drafts of one target.
        prompts: a prompt file instead of the repo's own training prompts.
        command: the command line, for the card.

    Returns:
        What the card says: data, steps, losses, agreement.

    Raises:
        InputError: for an unknown kind or unusable files.
    """
    out, seed = Path(out), recipe.plan.seed
    _check(recipe, target, tokenizer, prompts)
    asked = read_prompts(prompts) if prompts else training_prompts(POOL, seed)
    jobs = make_jobs(asked[: recipe.answers], tokenizer, recipe.longest, seed)
    about = {
        "target": name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": hashlib.sha256("\0".join(p.turns[0] for p in asked).encode()).hexdigest(),
        "new_tokens": recipe.new_tokens,
        "seed": seed,
    }
    store = collect(
        target, jobs, answers or out / "answers", about, slots=recipe.slots, new_tokens=recipe.new_tokens, seed=seed
    )
    wanted = {job.index for job in jobs}
    texts = [text for text in store.texts() if text.index in wanted]
    made = _train_head if recipe.kind == "head" else _train_lm
    report = {
        "kind": recipe.kind,
        "target": name,
        "command": command,
        "prompts": str(prompts) if prompts else "treespec's own",
        "data": _data_figures(texts),
        **made(target, name, texts, out, recipe),
        "recipe": asdict(recipe),
    }
    write_whole(out / "README.md", lambda path: path.write_text(card(report), "utf-8"))
    write_json(out / "training.json", report)
    (out / "checkpoint.pt").unlink(missing_ok=True)
    return report


def check_recipe(recipe: Recipe, prompts: str | Path | None) -> None:
    """What can be said before a target is loaded.

    Args:
        recipe: what is asked for.
        prompts: a prompt file, or None for the repo's own training prompts.

    Raises:
        InputError: for what cannot be done.
    """
    if recipe.kind not in KINDS:
        raise InputError(f"unknown kind of draft {recipe.kind!r}; known: {', '.join(KINDS)}")
    if recipe.start is not None and recipe.kind != "head":
        raise InputError("only a head can be gone on from; leave --start away for a language model")
    if recipe.start is not None:
        HeadConfig.read(recipe.start)
    if prompts is not None:
        read_prompts(prompts)
    elif recipe.answers > POOL:
        raise InputError(f"treespec's templates are used for at most {POOL:,} answers; got {recipe.answers:,}")


def _check(recipe: Recipe, target: Any, tokenizer: Any, prompts: Any) -> None:
    """What would only fail after hours of answers."""
    check_recipe(recipe, prompts)
    if tokenizer is None:
        raise InputError("the target's folder has no tokenizer, which its prompts need; save one beside it")
    config = target.config.get_text_config(decoder=True)
    width = target.get_input_embeddings().weight.shape[1]
    if width != config.hidden_size:
        raise InputError(
            f"the target's embedding is {width} wide and its hidden states {config.hidden_size}: not supported"
        )
    least = recipe.shape.hidden
    if recipe.kind == "lm" and (width < least or recipe.draft_vocabulary < least):
        raise InputError(
            f"a draft of width {least} needs a target at least as wide (this one: {width}) and as many frequent tokens "
            f"(asked for: {recipe.draft_vocabulary})"
        )


def _data_figures(texts: list[Any]) -> dict[str, Any]:
    held = [t for t in texts if held_out(t)]
    return {
        "answers": len(texts),
        "answer_tokens": sum(len(t.tokens) - t.prompt for t in texts),
        "prompt_tokens": sum(t.prompt for t in texts),
        "greedy_share": round(sum(t.temperature == 0 for t in texts) / max(len(texts), 1), 3),
        "held_out": len(held),
    }


def _head_data(target: Any, name: str, texts: list[Any], recipe: Recipe) -> train_head.HeadData:
    learnt = [t for t in texts if not held_out(t)]
    if not learnt:
        raise InputError("there are no answers to learn from; ask for more with --answers")
    if recipe.start is not None:
        head = load_head(recipe.start, target).train().requires_grad_(True)
    else:
        head = train_head.new_head(target, name, learnt, recipe.draft_vocabulary, recipe.plan.seed)
    return train_head.HeadData(head, texts)


def _train_head(target: Any, name: str, texts: list[Any], out: Path, recipe: Recipe) -> dict[str, Any]:
    data = _head_data(target, name, texts, recipe)
    head = data.head
    before = train_head.measure(head, data, DEPTHS)

    def loss(rows: list[int], share: float) -> tuple[torch.Tensor, dict[str, float]]:
        # what the target's features say is learnt first, at a third of the price; then to live with one's own
        steps = 1 if share < ALONE else recipe.unroll
        return train_head.unrolled_loss(head, data.batch([data.train[i] for i in rows]), steps)

    done = train(head, data.train, loss, recipe.plan, out, _about(recipe, name))
    head.save(out)
    after = train_head.measure(head, data, DEPTHS)
    covered = [data.targets(t)[2] for t in data.test if t.temperature == 0]
    share = float(torch.cat(covered).float().mean()) if covered else None
    return {**done, "vocabulary_coverage": share, "before_training": before, "agreement": after}


def _train_lm(target: Any, name: str, texts: list[Any], out: Path, recipe: Recipe) -> dict[str, Any]:
    head_data = _head_data(target, name, texts, recipe)
    data = train_lm.LmData(head_data)
    model = train_lm.new_lm(target, head_data.head.token_of, recipe.shape, recipe.plan.seed)

    def loss(rows: list[int], share: float) -> tuple[torch.Tensor, dict[str, float]]:
        return data.loss(model, [data.train[i] for i in rows])

    done = train(model, data.train, loss, recipe.plan, out, _about(recipe, name))
    train_lm.save_lm(model, out)
    return {**done, "agreement": train_lm.measure_lm(model, data)}


def _about(recipe: Recipe, name: str) -> dict[str, Any]:
    kept = {"kind": recipe.kind, "target": name, "vocabulary": recipe.draft_vocabulary}
    if recipe.kind == "head":
        return kept | {"unroll": recipe.unroll, "start": recipe.start}
    return kept | {"shape": str(recipe.shape)}


def card(report: dict[str, Any]) -> str:
    """The README of a draft folder."""
    data, agreement = report["data"], report["agreement"]
    kind = "A feature head (EAGLE family)" if report["kind"] == "head" else "A small independent language model"
    lines = [
        f"# Draft for {report['target']}",
        "",
        f"{kind}, trained by `treespec distill` on the target's own answers to " + _origin(report["prompts"]),
        "",
        f"- Data: {data['answers']:,} answers, {data['answer_tokens']:,} tokens ({data['greedy_share']:.0%} greedy, "
        f"the rest at temperatures 0.5 and 0.9); {data['held_out']} prompts held out for the figures below.",
        f"- Training: {report['steps']:,} steps; loss "
        + ", ".join(f"{v} at {s:,}" for s, v in _some(report["losses"])),
        f"- Made with: `{report['command']}`",
        "",
        "Share of positions, on held-out greedy answers, at which the target's token is among the first guesses:",
        "",
    ]
    if report["kind"] == "head":
        lines += ["| depth | top 1 | top 2 | top 4 | top 8 |", "|---|---|---|---|---|"]
        for depth, row in enumerate(agreement["recall_by_depth"], 1):
            lines.append(f"| {depth} | " + " | ".join(f"{row[f'top{k}']:.1%}" for k in (1, 2, 4, 8)) + " |")
        lines.append("")
        inside = report["vocabulary_coverage"]
        lines.append(
            "Depth 1 reads the target's true hidden state; each further depth reads the head's own output, on the true "
            "text. Tokens outside the draft vocabulary count as misses"
            + ("." if inside is None else f" ({inside:.1%} are inside).")
        )
    else:
        lines += ["| top 1 | top 2 | top 4 | top 8 |", "|---|---|---|---|"]
        lines.append("| " + " | ".join(f"{agreement[f'top{k}']:.1%}" for k in (1, 2, 4, 8)) + " |")
    if report["target"] == "smollm2":
        lines += ["", "Licence: Apache-2.0, like the target it was distilled from."]
    return "\n".join(lines) + "\n"


def _origin(prompts: str) -> str:
    if prompts == "treespec's own":
        return "treespec's training prompts (`data/training`, composed from templates; no benchmark's questions)."
    return f"the prompts of `{prompts}`."


def _some(losses: list[Any]) -> list[Any]:
    return losses if len(losses) <= 5 else [losses[i * (len(losses) - 1) // 4] for i in range(5)]
