"""Policies and rules side by side on the same prompts: interleaved, tokens counted from ids, ratios with intervals.

Every round runs every prompt under every pair of a rule and a policy, the order rotating, so that a drifting machine
hits all alike. The speed-up of a row is the time of plain decoding with this very engine over its own time, prefill
included, summed over prompts (each the median over rounds); its interval is a bootstrap over prompts (scipy).
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.table import Table

from treespec.api import generate
from treespec.console import plain_console
from treespec.errors import InputError, PolicyError
from treespec.events import Stats, StepEvent
from treespec.intervals import ratio_interval
from treespec.model import input_device
from treespec.pairs import Pair, chat_ids
from treespec.policies import Autoregressive, Policy
from treespec.prompts import Prompt
from treespec.verify import check_rules

# under it texts are comparable token for token, whatever the policy
COMPARABLE = "coupled"
Progress = Callable[[int, int, str], None]  # done, total, what is running


@dataclass
class Tally:
    """What one pair of policy and rule did: sums, seconds per prompt and round, texts per prompt."""

    policy: Policy
    rule: str = COMPARABLE
    stats: Stats = field(default_factory=Stats)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    lossless: bool = True
    refused: str = ""


def compare(
    pair: Pair,
    prompts: list[Prompt],
    policies: list[Policy],
    *,
    rules: Sequence[str] = (COMPARABLE,),
    rounds: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
    watch: Callable[[Policy, StepEvent], None] | None = None,
) -> dict[str, Any]:
    """Run the comparison.

    Args:
        pair: target, draft and tokenizer.
        prompts: first turns are used.
        policies: plain decoding is added in front if it is not among them: it is the denominator.
        rules: acceptance rules, each with every policy. Greedy decoding makes them one; above temperature 0 only
            ``coupled`` keeps texts comparable token for token, so other rows have no ``lossless``.
        rounds: repetitions of everything, at least 1.
        max_new_tokens: per prompt.
        temperature: 0 is greedy.
        seed: of the sampling and of the bootstrap.
        progress: told before every generation.
        watch: told of every step that counts, between the steps; an exception of its own ends the comparison.

    Returns:
        ``{"rows": [...], "refused": [...], "prompts", "rounds", "max_new_tokens", "machine"}``; rows as in the
        README's table; ``refused`` holds the pairs that would be biased, each with ``rule``, ``policy``, ``reason``.

    Raises:
        InputError: for fewer than one round, or an unknown rule.
    """
    if rounds < 1:
        raise InputError(f"rounds must be at least 1; got {rounds}")
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0}
    options: dict[str, Any] = {"seed": seed, "max_new_tokens": max_new_tokens, **sampling}
    ids = {p.id: chat_ids(pair.tokenizer, p.turns[:1]) for p in prompts}
    everyone = _pairs(policies, rules)
    for tally in everyone:  # warm-up: allocations, threads, the self-check
        _warm_up(tally, pair, ids[prompts[0].id], options)
    tallies = [t for t in everyone if not t.refused]
    total = rounds * len(prompts) * len(tallies)
    for done, (tally, prompt) in enumerate(_schedule(tallies, prompts, rounds)):
        if progress is not None:
            progress(done, total, f"{tally.policy.spec()} on {prompt.id}")
        told = None if watch is None else functools.partial(watch, tally.policy)
        result = generate(
            pair.target, pair.draft, ids[prompt.id], policy=tally.policy, rule=tally.rule, on_step=told, **options
        )
        tally.stats.merge(result.stats)
        tally.seconds.setdefault(prompt.id, []).append(result.stats.seconds)
        first = tally.texts.setdefault(prompt.id, result.tokens)
        tally.lossless &= first == result.tokens
    if progress is not None:
        progress(total, total, "done")
    plain = next(t for t in tallies if isinstance(t.policy, Autoregressive))
    return {
        "rows": [make_row(tally, plain, seed, temperature) for tally in tallies],
        "refused": [{"rule": t.rule, "policy": t.policy.spec(), "reason": t.refused} for t in everyone if t.refused],
        "prompts": len(prompts),
        "rounds": rounds,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "target": pair.name,
        "machine": machine(pair.target),
    }


def _pairs(policies: list[Policy], rules: Sequence[str]) -> list[Tally]:
    """Every rule with every policy; plain decoding once, since without a tree there is nothing to accept."""
    check_rules(rules)
    plain = next((p for p in policies if isinstance(p, Autoregressive)), Autoregressive())
    trees = [Tally(p, rule) for rule in dict.fromkeys(rules) for p in policies if not isinstance(p, Autoregressive)]
    place = next((i for i, p in enumerate(policies) if isinstance(p, Autoregressive)), 0)
    return [*trees[:place], Tally(plain), *trees[place:]]


def _warm_up(tally: Tally, pair: Pair, ids: list[int], options: dict[str, Any]) -> None:
    short = {**options, "max_new_tokens": 8}
    try:
        generate(pair.target, pair.draft, ids, policy=tally.policy, rule=tally.rule, **short)
    except PolicyError as error:
        tally.refused = str(error)


def _schedule(tallies: list[Tally], prompts: list[Prompt], rounds: int) -> Iterator[tuple[Tally, Prompt]]:
    turn = 0
    for _ in range(rounds):
        for prompt in prompts:
            for k in range(len(tallies)):
                yield tallies[(turn + k) % len(tallies)], prompt
            turn += 1


def make_row(tally: Tally, plain: Tally, seed: int, temperature: float = 0.0) -> dict[str, Any]:
    """One policy's line of the table; ``plain`` is the denominator."""
    names = list(plain.seconds)
    base = np.array([np.median(plain.seconds[n]) for n in names])
    own = np.array([np.median(tally.seconds[n]) for n in names])
    low, high = ratio_interval(base, own, seed) if tally is not plain else (1.0, 1.0)
    sums = tally.stats
    comparable = temperature == 0 or tally.rule == COMPARABLE
    return {
        "rule": tally.rule,
        "policy": tally.policy.spec(),
        "parameters": tally.policy.parameters(),
        "nodes": round(sums.nodes, 2),
        "verify_ms": round(sums.per_step_ms("verify"), 3),
        "draft_ms": round(sums.per_step_ms("draft"), 3),
        "overhead_ms": round(sums.per_step_ms("overhead"), 3),
        "tokens_per_step": round(sums.tokens_per_step, 3),
        "tokens_per_s": round(sums.tokens_per_second, 2),
        "speedup": round(float(base.sum() / own.sum()), 3),
        "speedup_ci": [round(low, 3), round(high, 3)],
        "lossless": bool(tally.lossless and tally.texts == plain.texts) if comparable else None,
    }


def machine(model: Any) -> dict[str, Any]:
    """What a model's numbers were measured on."""
    device = input_device(model)
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def print_table(result: dict[str, Any]) -> None:
    """The rows of :func:`compare` as a table on stdout."""
    table = Table(
        title=f"{result['target']}: {result['prompts']} prompts × {result['max_new_tokens']} tokens × "
        f"{result['rounds']} round(s)"
    )
    ruled = len({row["rule"] for row in result["rows"]} | {row["rule"] for row in result["refused"]}) > 1
    heads = [
        *(["rule"] if ruled else []),
        "policy",
        "nodes",
        "verify ms",
        "draft ms",
        "overhead ms",
        "tokens/step",
        "tokens/s",
        "speed-up (95 %)",
        "same text",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head in ("rule", "policy") else "right", no_wrap=True)
    for row in result["rows"]:
        low, high = row["speedup_ci"]
        speed = f"{row['speedup']:.2f}×" + ("" if low == high else f" ({low:.2f}–{high:.2f})")
        cells = [
            *([row["rule"]] if ruled else []),
            row["policy"],
            *(f"{row[k]:.1f}" for k in ("nodes", "verify_ms", "draft_ms", "overhead_ms")),
        ]
        table.add_row(
            *cells,
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            speed,
            {True: "yes", False: "NO", None: "–"}[row["lossless"]],
        )
    for row in result["refused"]:
        table.add_row(*([row["rule"]] if ruled else []), row["policy"], *["–"] * 6, "refused")
    plain_console(200).print(table)  # tables take what they need; a narrow terminal scrolls rather than cuts
    for row in result["refused"]:
        print(f"refused: {row['reason']}.")
    if any(row["lossless"] is None for row in result["rows"]):
        print("same text –: this rule draws other tokens of the same law; only coupled repeats plain decoding's text.")
    print("nodes: per verification, root included; ms: per step; speed-up: against plain decoding by the same engine.")
