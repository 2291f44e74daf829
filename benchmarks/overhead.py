"""The engine's own overhead per step, and its plain decoding against ``model.generate``. Interleaved, one run.

Overhead is everything outside the two models' forwards: log-softmax, top-k and entropy of the draft's logits, the
policy, masks, the acceptance walk, processors, criteria, cache moves. The draft here is a one-layer random model, so
its own forwards take almost nothing and the share shown is the worst case; a real draft only lowers it.

    .venv/bin/python -m benchmarks.overhead [--prompts 8] [--tokens 48] [--plain-only]
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import show
from treespec.api import generate
from treespec.drafters import NgramDrafter
from treespec.pairs import load_pair
from treespec.prompts import mixed_prompts, read_prompts

FULL = "threshold:tau=1e-30,width=4,depth=4,budget=48"  # nothing is below tau: every step verifies 48 candidates


def small_draft(vocabulary: int) -> Any:
    """A draft whose forwards cost next to nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--plain-only", action="store_true", help="only plain decoding against model.generate")
    args = parser.parse_args()
    pair = load_pair(draft="ngram")
    draft = small_draft(pair.target.config.vocab_size)
    chosen = [p for p in read_prompts(mixed_prompts()) if p.category != "long"]
    chosen = [chosen[i * len(chosen) // args.prompts] for i in range(args.prompts)]
    ids = [torch.tensor([pair.prompt_ids(p.turns[0])]) for p in chosen]
    runs = {"tiny model draft, budget 48": (draft, FULL), "n-gram draft, budget 48": (NgramDrafter(), FULL)}
    runs = {} if args.plain_only else runs
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": args.tokens}
    generate(pair.target, draft, ids[0], policy=FULL, **{**options, "max_new_tokens": 8})  # warm-up
    pair.target.generate(ids[0], **{**options, "max_new_tokens": 8})

    ratio, shares = [], {name: [] for name in (*runs, "plain")}  # type: ignore[var-annotated]
    milliseconds = {name: [] for name in shares}  # type: ignore[var-annotated]
    for turn, prompt in enumerate(ids):
        seconds: dict[str, float] = {}
        for who in ("plain", "generate") if turn % 2 else ("generate", "plain"):
            start = perf_counter()
            if who == "generate":
                theirs = pair.target.generate(prompt, **options)
            else:
                plain = generate(pair.target, None, prompt, **options)
            seconds[who] = perf_counter() - start
        assert torch.equal(theirs, plain.sequences)
        ratio.append(seconds["generate"] / seconds["plain"])
        shares["plain"].append(100 * plain.stats.overhead_seconds / plain.stats.step_seconds)
        milliseconds["plain"].append(plain.stats.per_step_ms("overhead"))
        for name, (who_drafts, policy) in runs.items():
            stats = generate(pair.target, who_drafts, prompt, policy=policy, **options).stats
            shares[name].append(100 * stats.overhead_seconds / stats.step_seconds)
            milliseconds[name].append(stats.per_step_ms("overhead"))
    show("plain decoding: time of model.generate / time of treespec", ratio, "×")
    for name, values in shares.items():
        show(f"overhead, {name}: share of a step", values, " %")
        show(f"overhead, {name}: per step", milliseconds[name], " ms")


if __name__ == "__main__":
    main()
