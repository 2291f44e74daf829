"""The live benchmark: many rounds over mixed prompts at one input length, kept line by line, resumable after a kill.

A round is one prompt under every policy. Everything about round i (prompt, the text before it, the order of policies)
follows from the seed and i, so a run that was killed goes on as if nothing had happened. A finished round is one JSON
line, written and synced at once; a line that was torn by a kill is dropped. Every line names the hash of its
configuration, so that rounds of different settings never meet in one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from treespec.api import generate
from treespec.compare import Progress, Tally, machine, make_row
from treespec.errors import InputError
from treespec.events import Stats
from treespec.files import parse_json, read_bytes, read_text, real, writable, write_whole
from treespec.pairs import Pair, chat_ids
from treespec.policies import Autoregressive, Policy, parse_policy
from treespec.prompts import Prompt, filler_ids, lengthened

BEGIN = b'{"round": '  # of every line; what is torn off begins so too


@dataclass(frozen=True)
class BenchPlan:
    """What a benchmark's content depends on.

    Args:
        policies: their command-line forms, plain first.
        prompt_hash: of the prompts' ids and texts.
        target, draft, dtype, fast: how the pair was loaded.
        input_length: tokens of every prompt, other text put before it; 0 leaves prompts as they are.
        max_new_tokens: per text.
        temperature: 0 is greedy; above, ``coupled`` sampling.
        seed: of the order, the text before prompts, and the sampling.
    """

    policies: tuple[str, ...]
    prompt_hash: str
    target: str = "smollm2"
    draft: str = "auto"
    dtype: str = "float32"
    fast: str = "off"
    input_length: int = 0
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    @property
    def hash(self) -> str:
        """Of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def make_plan(policies: Sequence[Policy], prompts: Sequence[Prompt], **settings: Any) -> BenchPlan:
    """A plan; plain decoding is added in front if it is not among the policies.

    Args:
        policies: to compare.
        prompts: first turns are used.
        **settings: the other fields of :class:`BenchPlan`.
    """
    specs = list(dict.fromkeys(["plain", *(p.spec() for p in policies)]))
    text = json.dumps([[p.id, p.category, p.turns[:1]] for p in prompts], ensure_ascii=False)
    return BenchPlan(tuple(specs), hashlib.sha256(text.encode()).hexdigest()[:16], **settings)


def bench(
    pair: Pair,
    prompts: list[Prompt],
    plan: BenchPlan,
    out: Path,
    rounds: int,
    *,
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run what is missing of ``rounds`` rounds, then sum up.

    Args:
        pair: loaded as the plan says.
        prompts: those of the plan; with an input length, those that are too long are left out.
        plan: settings.
        out: JSON lines; gone on with if it is there. See :func:`read_rounds` for what is refused.
        rounds: in all, those of earlier runs and of other processes included.
        share: which of how many processes this is; it takes every so-manieth round.
        progress: told before every generation.

    Returns:
        :func:`summary`.

    Raises:
        InputError: if ``out`` holds rounds of other settings, or no prompt fits the input length.
    """
    lines = read_rounds(out, plan, share)
    own = range(share[0], rounds, share[1])
    chosen = _fitting(prompts, pair, plan)
    policies = [parse_policy(p) for p in plan.policies]
    filler = filler_ids(prompts, pair.tokenizer, 2 * plan.input_length)
    if len(lines) < len(own):  # allocations, threads, the self-check
        for policy in policies:
            _run(pair, policy, chat_ids(pair.tokenizer, chosen[0].turns[:1]), plan, min(plan.max_new_tokens, 8))
    with _appending(out) as file:
        for index in own[len(lines) :]:
            line = _round(pair, chosen, policies, plan, index, filler, rounds, progress)
            lines.append(line)
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    if progress is not None:
        progress(rounds * len(policies), rounds * len(policies), "done")
    return {**summary(lines[: len(own)], plan), "machine": machine(pair.target)}


def _appending(out: Path) -> BinaryIO:
    try:
        return out.open("ab")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from None


def read_rounds(out: Path, plan: BenchPlan, share: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
    """The finished rounds of an earlier run, or of one process of several; a torn last line is cut off the file.

    Raises:
        InputError: if the file cannot be written, holds something else, or rounds of other settings.
    """
    if not os.path.lexists(out):
        writable(out, False)
        return []
    content = read_bytes(out)
    whole = content[: content.rfind(b"\n") + 1]
    torn = content[len(whole) :]
    if not (torn.startswith(BEGIN) or BEGIN.startswith(torn)):
        raise InputError(f"{out} ends with what is no finished round of treespec bench; give another --out")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(whole.splitlines()):
        try:
            line = parse_json(text.decode("utf-8"))
            at, config = line["round"], line["config"]
        except (ValueError, TypeError, KeyError):
            raise InputError(
                f"{out}, line {number + 1} is no finished round of treespec bench; give another --out"
            ) from None
        if config != plan.hash:
            raise InputError(
                f"{out} holds rounds of other settings{_difference(lines or [line], plan)}; give another --out, or "
                "--force to replace it"
            )
        if at != (expected := share[0] + number * share[1]):
            raise InputError(f"{out}, line {number + 1} is round {at}, not {expected}; give another --out")
        if not _is_round(line, plan):
            raise InputError(f"{out}, line {number + 1} is damaged; give another --out, or --force to replace it")
        lines.append(line)
    if torn:
        os.truncate(out, len(whole))
    return lines


def _is_round(line: dict[str, Any], plan: BenchPlan) -> bool:
    """Whether a line holds what :func:`summary` reads."""
    names = {f.name for f in dataclasses.fields(Stats)}
    try:
        rows = line["rows"]
        words = all(isinstance(line[key], str) for key in ("prompt", "category"))
        policies = [row["policy"] for row in rows] == list(plan.policies)
        full = all(row["stats"].keys() == names and isinstance(row["same_text"], bool) for row in rows)
        sums = [real(value) >= 0 for row in rows for value in row["stats"].values()]
        timed = all(Stats(**row["stats"]).seconds > 0 for row in rows)
        return words and policies and full and all(sums) and timed and real(line["input_tokens"]) > 0
    except (KeyError, TypeError, AttributeError):
        return False


def merge_rounds(paths: Sequence[Path], out: Path) -> int:
    """Put the rounds of several processes into one file, in their order; returns how many there are.

    Raises:
        InputError: if a file cannot be read, the settings differ, or a round is missing or there twice.
    """
    found: dict[int, tuple[str, str]] = {}
    for path in paths:
        lines = read_text(path).removesuffix("\n").split("\n")
        try:
            rounds = [(int(real(line["round"])), str(line["config"])) for line in map(parse_json, lines)]
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path} holds what is no finished round of treespec bench") from None
        for (number, config), line in zip(rounds, lines):
            if number in found:
                raise InputError(f"round {number} is in {path} and in another of the files; merge disjoint ones")
            found[number] = (config, line)
    if len({config for config, _ in found.values()}) > 1:
        raise InputError("the files hold rounds of different settings; merge those of one launch")
    missing = next((i for i in range(len(found)) if i not in found), None)
    if missing is not None or not found:
        raise InputError(f"round {missing or 0} is in none of the files; let every process finish its share first")
    text = "".join(found[i][1] + "\n" for i in range(len(found)))
    write_whole(out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return len(found)


def _difference(lines: list[dict[str, Any]], plan: BenchPlan) -> str:
    theirs = lines[0].get("configuration", {})
    mine = json.loads(json.dumps(asdict(plan)))
    named = [f"{k}={theirs[k]!r}, not {v!r}" for k, v in mine.items() if k in theirs and theirs[k] != v]
    return f" ({named[0]})" if named else ""


def _fitting(prompts: list[Prompt], pair: Pair, plan: BenchPlan) -> list[Prompt]:
    if not plan.input_length:
        return prompts
    fitting = [p for p in prompts if len(chat_ids(pair.tokenizer, p.turns[:1])) <= plan.input_length]
    if not fitting:
        raise InputError(f"no prompt has at most {plan.input_length} tokens; give a larger --input-length")
    return fitting


def _round(
    pair: Pair,
    prompts: list[Prompt],
    policies: list[Policy],
    plan: BenchPlan,
    index: int,
    filler: list[int],
    rounds: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """One prompt under every policy, in rotating order."""
    turn, place = divmod(index, len(prompts))  # every prompt once before any comes again
    prompt = prompts[np.random.default_rng([plan.seed, turn]).permutation(len(prompts))[place]]
    text = prompt.turns[0]
    if plan.input_length:
        shift = int(np.random.default_rng([plan.seed, index, 1]).integers(plan.input_length))
        text = lengthened(
            prompt,
            filler[shift:],
            pair.tokenizer,
            lambda turn: len(chat_ids(pair.tokenizer, [turn])),
            plan.input_length,
        )
    ids = chat_ids(pair.tokenizer, [text])
    found: dict[int, tuple[Stats, list[int]]] = {}
    for k in range(len(policies)):
        which = (index + k) % len(policies)
        if progress is not None:
            progress(index * len(policies) + k, rounds * len(policies), f"{policies[which].spec()} on {prompt.id}")
        found[which] = _run(pair, policies[which], ids, plan, plan.max_new_tokens)
    plain = next(i for i, p in enumerate(policies) if isinstance(p, Autoregressive))
    return {
        "round": index,
        "config": plan.hash,
        "prompt": prompt.id,
        "category": prompt.category,
        "input_tokens": len(ids),
        "text": hashlib.sha256(json.dumps(found[plain][1]).encode()).hexdigest()[:16],
        "rows": [
            {"policy": p.spec(), "same_text": found[i][1] == found[plain][1], "stats": asdict(found[i][0])}
            for i, p in enumerate(policies)
        ],
        **({"configuration": asdict(plan)} if index == 0 else {}),
    }


def _run(pair: Pair, policy: Policy, ids: list[int], plan: BenchPlan, new: int) -> tuple[Stats, list[int]]:
    sampling: dict[str, Any] = {"do_sample": False}
    if plan.temperature > 0:
        sampling = {"do_sample": True, "temperature": plan.temperature, "top_k": 0}
    result = generate(
        pair.target, pair.draft, ids, policy=policy, rule="coupled", seed=plan.seed, max_new_tokens=new, **sampling
    )
    return result.stats, result.tokens


def summary(lines: Sequence[dict[str, Any]], plan: BenchPlan) -> dict[str, Any]:
    """The rounds as :func:`treespec.compare.compare` reports prompts: a round is a prompt.

    ``speedup`` counts the whole text, its prefill included; ``decode_speedup`` the steps after it alone.
    """
    tallies = {spec: Tally(parse_policy(spec)) for spec in plan.policies}
    for line in lines:
        for row in line["rows"]:
            stats, tally = Stats(**row["stats"]), tallies[row["policy"]]
            tally.stats.merge(stats)
            tally.seconds[str(line["round"])] = [stats.seconds]
            tally.lossless &= row["same_text"]
    plain = tallies["plain"]
    rows = [make_row(t, plain, plan.seed) for t in tallies.values()] if lines else []
    for row, tally in zip(rows, tallies.values()):
        row["decode_speedup"] = round(plain.stats.step_seconds / max(tally.stats.step_seconds, 1e-12), 3)
    categories = sorted({line["category"] for line in lines})
    inputs = [line["input_tokens"] for line in lines]
    return {
        "rows": rows,
        "refused": [],
        "rounds": len(lines),
        "prompts": len({line["prompt"] for line in lines}),
        "categories": {c: sum(line["category"] == c for line in lines) for c in categories},
        "input_tokens": round(float(np.mean(inputs)), 1) if inputs else 0.0,
        "config": plan.hash,
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)},
    }
