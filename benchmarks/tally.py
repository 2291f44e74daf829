"""What ``benchmarks.versus`` makes of its runs: tallies, divergences, rows, the summary and its Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.peers import Contestant, reason
from treespec.events import Stats
from treespec.intervals import ratio_interval
from treespec.prompts import Prompt

SIXTEEN = "bestfirst:budget=16"
Tell = Callable[[str], None]


@dataclass
class Tally:
    """What one contestant did, by prompt id."""

    contestant: Contestant
    seconds: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    steady: bool = True  # the same text in every round

    def add(self, name: str, seconds: float, tokens: list[int], stats: Stats | None) -> None:
        """Take in one generation."""
        self.seconds.setdefault(name, []).append(seconds)
        self.steady &= self.texts.setdefault(name, tokens) == tokens
        if stats is not None:
            self.stats.setdefault(name, Stats()).merge(stats)

    def medians(self, names: Sequence[str], per_token: bool = False) -> np.ndarray:
        """Seconds per prompt, or per token of each prompt."""
        out = np.array([np.median(self.seconds[n]) for n in names])
        return out / [max(len(self.texts[n]), 1) for n in names] if per_token else out

    def steps(self, names: Iterable[str]) -> Stats | None:
        """The sums over prompts, for contestants that count their steps."""
        total = Stats()
        for name in names:
            if name not in self.stats:
                return None
            total.merge(self.stats[name])
        return total


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """``limit`` prompts, as many of each category as of any other, evenly spaced within it; 0 is all."""
    if not limit or limit >= len(prompts):
        return list(prompts)
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt.category, []).append(index)
    quota = dict.fromkeys(members, 0)
    while sum(quota.values()) < limit:
        for name in members:
            if quota[name] < len(members[name]) and sum(quota.values()) < limit:
                quota[name] += 1
    chosen = {own[i * len(own) // quota[name]] for name, own in members.items() for i in range(quota[name])}
    return [prompts[i] for i in sorted(chosen)]


def measure(
    tallies: list[Tally], ids: dict[str, list[int]], rounds: int, n: int, left_out: dict[str, str], tell: Tell
) -> bool:
    """Fill the tallies, one whole turn (a prompt in a round) at a time; False if it was interrupted.

    A peer that fails is taken out and its reason noted; anything else that fails is raised.
    """
    turn = 0
    try:
        for _ in range(rounds):
            for name, prompt in ids.items():
                start = turn % len(tallies)
                shots = []
                for tally in [*tallies[start:], *tallies[:start]]:
                    tell(f"{tally.contestant.name} on {name}")
                    try:
                        shots.append((tally, *timed(tally.contestant, prompt, n)))
                    except Exception as error:
                        drop(tally, tallies, left_out, error)
                for tally, seconds, tokens in shots:
                    tally.add(name, seconds, tokens, tally.contestant.stats)
                turn += 1
    except KeyboardInterrupt:
        return False
    return True


def timed(contestant: Contestant, prompt: list[int], n: int) -> tuple[float, list[int]]:
    """Seconds and tokens of one generation."""
    start = perf_counter()
    tokens = contestant.run(prompt, n)
    return perf_counter() - start, tokens


def drop(tally: Tally, tallies: list[Tally], left_out: dict[str, str], error: Exception) -> None:
    """Take out a peer that failed and note why; raise what anything else raised."""
    if tally.contestant.group != "peer":
        raise error
    left_out[tally.contestant.name] = reason(error)
    tallies.remove(tally)


def divergences(
    base: Tally, tally: Tally, names: Sequence[str], margin: Callable[[str, int], float]
) -> list[dict[str, Any]]:
    """Prompts whose text differs from the baseline's: where first, and by how much the baseline preferred its token."""
    found = []
    for name in names:
        theirs, own = base.texts[name], tally.texts[name]
        if theirs == own:
            continue
        at = next((i for i, (a, b) in enumerate(zip(theirs, own)) if a != b), min(len(theirs), len(own)))
        found.append({"prompt": name, "position": at, "margin": round(margin(name, at), 6)})
    return found


def margins(model: Any, ids: dict[str, list[int]], base: Tally) -> Callable[[str, int], float]:
    """The difference of the model's two top logits at a position of the baseline's text: one forward each, kept."""
    known: dict[tuple[str, int], float] = {}

    def margin(name: str, at: int) -> float:
        if (name, at) not in known:
            prefix = torch.tensor([ids[name] + base.texts[name][:at]], device=model.device)
            with torch.no_grad():
                top = model(prefix, logits_to_keep=1).logits[0, -1].float().topk(2).values
            known[name, at] = float(top[0] - top[1])
        return known[name, at]

    return margin


def make_row(
    base: Tally, tally: Tally, names: list[str], category: dict[str, str], margin: Callable[[str, int], float]
) -> dict[str, Any]:
    """One contestant's line of the table."""
    differ = divergences(base, tally, names, margin)
    theirs, own = (t.medians(names, per_token=bool(differ)) for t in (base, tally))
    low, high = (1.0, 1.0) if tally is base else ratio_interval(theirs, own, seed=0)
    seconds, tokens = float(tally.medians(names).sum()), sum(len(tally.texts[n]) for n in names)
    who, steps = tally.contestant, tally.steps(names)
    by_category: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(category[n] for n in names):
        mine = np.array([category[n] == kind for n in names])
        part = tally.steps(n for n in names if category[n] == kind)
        by_category[kind] = {
            "prompts": int(mine.sum()),
            "speedup": round(float(theirs[mine].sum() / own[mine].sum()), 3),
            "tokens_per_step": _per_step(part),
        }
    return {
        "name": who.name,
        "group": who.group,
        "policy": who.policy,
        "fast": who.fast,
        "settings": who.settings,
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 3),
        "speedup": round(float(theirs.sum() / own.sum()), 3),
        "speedup_ci": [round(low, 3), round(high, 3)],
        "speedup_of": "seconds per token" if differ else "seconds",
        "tokens_per_step": _per_step(steps),
        "nodes": None if steps is None else round(steps.nodes, 2),
        **{
            f"{part}_ms": None if steps is None else round(steps.per_step_ms(part), 3)
            for part in ("verify", "draft", "overhead")
        },
        "lossless": not differ and tally.steady,
        "same_every_round": tally.steady,
        "divergences": differ,
        "by_category": by_category,
    }


def _per_step(steps: Stats | None) -> float | None:
    """None for those who do not count steps, and where every text ended with its first token."""
    return round(steps.tokens_per_step, 3) if steps is not None and steps.steps else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The headline numbers of the rows; None where there is nothing to compare."""
    own = [r for r in rows if r["group"] == "treespec"]
    best = max(own, key=lambda r: r["speedup"])
    others = [r for r in rows if r["group"] == "peer"]
    peer = max(others, key=lambda r: r["speedup"]) if others else None
    plain = next((r for r in own if r["policy"] == "plain" and r["fast"] == best["fast"]), None)
    sixteen = next((r for r in own if r["policy"] == SIXTEEN), None)
    kinds = [c["tokens_per_step"] for c in sixteen["by_category"].values() if c["tokens_per_step"]] if sixteen else []
    return {
        "best_treespec": best["name"],
        "best_speedup": best["speedup"],
        "speculation_only": plain and round(best["speedup"] / plain["speedup"], 3),
        "best_peer": peer and peer["name"],
        "best_peer_speedup": peer and peer["speedup"],
        "versus_best_peer": peer and round(best["speedup"] / peer["speedup"], 3),
        "tokens_per_step_16": round(float(np.mean(kinds)), 3) if kinds else None,
        "lossless": all(r["lossless"] for r in own),
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables, as Markdown."""

    def table(heads: list[str], cells: list[list[str]]) -> list[str]:
        rule = ["---", *["---:"] * (len(heads) - 1)]
        return ["| " + " | ".join(line) + " |" for line in [heads, rule, *cells]] + [""]

    def number(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    rows = result["rows"]
    kinds = list(rows[0]["by_category"])
    main_heads = ["", "speed-up (95 %)", "tokens/s", "tokens/step", "nodes", "verify ms", "draft ms", "overhead ms"]
    cells = [
        [
            r["name"],
            f"{r['speedup']:.2f}× ({r['speedup_ci'][0]:.2f}–{r['speedup_ci'][1]:.2f})",
            *(number(r[k], d) for k, d in (("tokens_per_s", 1), ("tokens_per_step", 2), ("nodes", 1))),
            *(number(r[f"{k}_ms"], 1) for k in ("verify", "draft", "overhead")),
            "yes" if r["lossless"] else "NO" if not r["divergences"] else f"{len(r['divergences'])} differ",
        ]
        for r in rows
    ]
    steps = [r for r in rows if r["tokens_per_step"] is not None]
    size = f"{result['prompts']} prompts × {result['max_new_tokens']} tokens × {result['rounds']} round(s)"
    lines = [f"{size}, {result['dtype']}, draft {result['draft']}, {result['machine']['threads']} thread(s)", ""]
    lines += table([*main_heads, "same text"], cells)
    lines += table(
        ["speed-up", *kinds], [[r["name"], *(number(r["by_category"][k]["speedup"], 2) for k in kinds)] for r in rows]
    )
    lines += table(
        ["tokens/step", *kinds],
        [[r["name"], *(number(r["by_category"][k]["tokens_per_step"], 2) for k in kinds)] for r in steps],
    )
    for r in rows:
        lines += [
            f"- {r['name']}: {d['prompt']} differs at {d['position']}, margin {d['margin']:.3g}"
            for d in r["divergences"]
        ]
    lines += [f"- left out: {name}: {why}" for name, why in result["left_out"].items()]
    return "\n".join(lines).rstrip() + "\n"
