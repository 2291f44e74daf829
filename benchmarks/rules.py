"""Tokens per step by acceptance rule: what a rule makes of the same draft, whatever the machine.

Every prompt is decoded under every pair of a rule and a policy, at every temperature, with the same seeds. Tokens per
step are all emitted tokens over all steps (prefill left out); intervals are bootstraps over prompts, and so is the gain
over ``match`` with the same policy, whose children are the draft's first ones. Pairs that would be biased are named and
left out. The result is written after every prompt; Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm
from transformers.utils import logging as hf_logging

from benchmarks.tally import spread
from benchmarks.versus import at_least
from treespec.api import generate
from treespec.errors import InputError, PolicyError, TreespecError
from treespec.files import write_whole
from treespec.pairs import Pair, chat_ids, load_pair
from treespec.policies import Policy, parse_policies
from treespec.prompts import Prompt, mixed_prompts, read_prompts
from treespec.verify import RULES

BASE = "match"
EXAMPLES = """examples:
  python -m benchmarks.rules --limit 24 --max-new-tokens 64 --out rules.json
  python -m benchmarks.rules --temperatures 1.0 --rules match,rrs,traversal --policies uniform:depth=3,width=3 \\
      --draft lm --out rules.json
  (the tables go to stdout and to rules.md)"""


@dataclass
class Row:
    """One pair at one temperature: emitted tokens and steps by prompt id, the prefill left out."""

    temperature: float
    rule: str
    policy: Policy
    tokens: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    def run(self, pair: Pair, name: str, ids: list[int], new: int, seeds: Sequence[int]) -> None:
        """Decode one prompt with every seed; a refusal is noted."""
        options: dict[str, Any] = {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": 0,
            "max_new_tokens": new,
        }
        tokens = steps = 0
        try:
            for seed in seeds:
                done = generate(
                    pair.target, pair.draft, ids, policy=self.policy, rule=self.rule, seed=seed, **options
                ).stats
                tokens, steps = tokens + done.step_tokens, steps + done.steps
        except PolicyError as error:
            self.refused = str(error)
            return
        self.tokens[name], self.steps[name] = tokens, steps

    def counts(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and steps per prompt."""
        return np.array([self.tokens[n] for n in names], float), np.array([self.steps[n] for n in names], float)


def interval(counts: Sequence[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """``sum(a) / sum(b)`` of two arrays over prompts, or (a/b) / (c/d) of four, and its 95 % bootstrap interval."""

    def ratio(*arrays: np.ndarray, axis: int = -1) -> np.ndarray:
        sums = [a.sum(axis=axis) for a in arrays]
        out: np.ndarray = sums[0] / sums[1] if len(sums) == 2 else sums[0] / sums[1] / (sums[2] / sums[3])
        return out

    value = float(ratio(*counts))
    if len(counts[0]) < 2:
        return value, value, value
    found = stats.bootstrap(
        tuple(counts),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return value, float(found.low), float(found.high)


def measure(
    rows: list[Row], pair: Pair, ids: dict[str, list[int]], args: argparse.Namespace, bar: Any
) -> Iterator[list[str]]:
    """Fill the rows prompt by prompt; yields the finished prompts."""
    finished: list[str] = []
    for name, prompt in ids.items():
        for row in rows:
            bar.set_description_str(f"{row.rule} {row.policy.spec()} T={row.temperature:g} on {name}", refresh=False)
            if not row.refused:
                row.run(pair, name, prompt, args.max_new_tokens, range(args.seeds))
            bar.update(1)
        finished.append(name)
        yield finished


def summary(rows: list[Row], names: list[str], args: argparse.Namespace, planned: int) -> dict[str, Any]:
    """Everything over the finished prompts."""
    base = {(r.temperature, r.policy): r for r in rows if r.rule == BASE and not r.refused}
    out = []
    for row in rows:
        if row.refused:
            continue
        value, low, high = interval(row.counts(names))
        line = {"temperature": row.temperature, "rule": row.rule, "policy": row.policy.spec()}
        line |= {"tokens_per_step": round(value, 4), "ci": [round(low, 4), round(high, 4)]}
        line |= {"tokens": sum(row.tokens[n] for n in names), "steps": sum(row.steps[n] for n in names)}
        if (same := base.get((row.temperature, row.policy))) is not None:
            gain, least, most = interval([*row.counts(names), *same.counts(names)])
            line |= {f"over_{BASE}": round(gain, 4), f"over_{BASE}_ci": [round(least, 4), round(most, 4)]}
        out.append(line)
    refused = {(r.rule, r.policy.spec()): r.refused for r in rows if r.refused}
    return {
        "rows": out,
        "refused": [{"rule": rule, "policy": policy, "reason": why} for (rule, policy), why in refused.items()],
        "prompts": len(names),
        "finished": len(names) == planned,
        **{k: getattr(args, k) for k in ("target", "draft", "dtype", "max_new_tokens", "seeds")},
    }


def markdown(result: dict[str, Any]) -> str:
    """The rows as a table, best first within each temperature and policy."""
    lines = [
        f"{result['prompts']} prompts × {result['seeds']} seed(s) × {result['max_new_tokens']} tokens, target "
        f"{result['target']}, draft {result['draft']}, {result['dtype']}",
        "",
        f"| temperature | policy | rule | tokens/step (95 %) | over {BASE} (95 %) |",
        "|---:|---|---|---:|---:|",
    ]
    for r in sorted(result["rows"], key=lambda r: (r["temperature"], r["policy"], -r["tokens_per_step"])):
        gain = "–"
        if f"over_{BASE}" in r:
            gain = f"{r[f'over_{BASE}']:.3f}× ({r[f'over_{BASE}_ci'][0]:.3f}–{r[f'over_{BASE}_ci'][1]:.3f})"
        lines.append(
            f"| {r['temperature']:g} | {r['policy']} | {r['rule']} | {r['tokens_per_step']:.3f} "
            f"({r['ci'][0]:.3f}–{r['ci'][1]:.3f}) | {gain} |"
        )
    lines += ["", *(f"- refused: {r['reason']}" for r in result["refused"])]
    return "\n".join(lines).rstrip() + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.rules",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = out.add_argument
    add("--out", type=Path, required=True, help="JSON result; the tables go beside it, with the ending .md")
    add("--prompts", default="", help="JSON Lines with id, category, turns (default: the repo's own)")
    add("--limit", type=at_least(0), default=0, help="only that many prompts, spread evenly over categories; 0 is all")
    add("--max-new-tokens", type=at_least(2), default=64, metavar="N", help="per prompt (default: %(default)s)")
    add("--seeds", type=at_least(1), default=1, metavar="N", help="texts per prompt and pair (default: %(default)s)")
    add("--temperatures", default="0.7,1.0", help="above 0, comma-separated (default: %(default)s)")
    add("--rules", default=",".join(RULES), help="default: %(default)s")
    add("--policies", default="linear:gamma=4,uniform:depth=3,width=2", help="default: %(default)s")
    add("--target", default="smollm2", help="'smollm2' (embedded), 'toy', a folder or a hub id")
    add("--draft", default="auto", help="head, mix, lm, ngram, model or a folder")
    add("--dtype", default="float32", help="float32 or bfloat16")
    add("--fast", choices=("cpu", "off"), default="cpu", help="the target's forward; it changes no law")
    return out


def make_rows(args: argparse.Namespace) -> list[Row]:
    """Temperatures × policies × rules.

    Raises:
        InputError: for an unknown rule or a temperature that is not above zero.
    """
    try:
        temperatures = [float(t) for t in args.temperatures.split(",")]
    except ValueError:
        raise InputError(f"--temperatures must be numbers such as 0.7,1.0; got {args.temperatures!r}") from None
    if min(temperatures) <= 0:
        raise InputError("--temperatures must be above 0: greedy decoding makes the rules one")
    rules = args.rules.split(",")
    if unknown := set(rules) - set(RULES):
        raise InputError(f"unknown acceptance rule {sorted(unknown)[0]!r}; known: {', '.join(RULES)}")
    return [Row(t, rule, p) for t in temperatures for p in parse_policies(args.policies) for rule in rules]


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; the exit code."""
    rows = make_rows(args)
    if not args.out.parent.is_dir():
        raise InputError(f"cannot write {args.out}: there is no folder {args.out.parent}")
    prompts: list[Prompt] = spread(read_prompts(args.prompts or mixed_prompts()), args.limit)
    pair = load_pair(args.target, args.draft, args.dtype, args.fast)
    ids = {p.id: chat_ids(pair.tokenizer, p.turns[:1]) for p in prompts}
    text = ""
    with tqdm(total=len(rows) * len(ids), unit="run", file=sys.stderr) as bar:
        try:
            for names in measure(rows, pair, ids, args, bar):
                result = summary(rows, names, args, len(ids))
                text = markdown(result)
                write_text(args.out, json.dumps(result, indent=1) + "\n")
                write_text(args.out.with_suffix(".md"), text)
        except KeyboardInterrupt:
            bar.close()
            print(text, end="")
            print(f"rules: interrupted; {args.out if text else 'nothing'} holds what is finished", file=sys.stderr)
            return 130
    print(text, end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code says how it went."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        return run(parser().parse_args(argv))
    except TreespecError as error:
        print(f"rules: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
