"""Soak: thousands of generations in one process, with changing policies, lengths and interruptions.

What must hold at the end: the memory is flat (within 2 % of what it was after the first tenth), the models' weights,
modes, hooks and configurations are as they were, and no global random generator has moved. Texts that were not
interrupted are compared with ``model.generate``.

    .venv/bin/python -m benchmarks.soak [--generations 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import treespec
from treespec.cost import load_cost
from treespec.errors import TreespecError
from treespec.policies import POLICIES, Policy
from treespec.search import setting
from treespec.verify import RULES

VOCABULARY = 97
FLAT = 0.02  # share by which the memory may have grown
WAYS = ("none", "none", "none", "streamer", "observer", "processor", "left")  # how a generation ends early


class Interruption(Exception):
    """What a caller's own code raises in the middle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--generations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = soak(args.generations, args.seed, progress=True)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["faults"]))


def soak(generations: int, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Run, and say what was found.

    Args:
        generations: how many.
        seed: of all choices.
        progress: show a bar.

    Returns:
        ``outcomes`` (counts), ``compared`` texts, ``memory`` in bytes (resident, after every tenth)
        and ``growth``, a share; ``faults``, sentences, empty if all is well.
    """
    targets = [_llama(1, 2), _gpt2(3)]
    draft = _llama(2, 1)
    before = [fingerprint(model) for model in (*targets, draft)]
    choose = np.random.default_rng(seed)
    dice = _dice()
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    compared, start = 0, time.perf_counter()
    held: list[int] = []  # bytes after every tenth
    for i in tqdm(range(generations), disable=not progress, desc="generations"):
        target = targets[int(choose.integers(2))]
        outcome, same = _one(target, draft, choose)
        outcomes[outcome] += 1
        compared += same is not None
        if same is False:
            faults.append(f"generation {i}: another text than model.generate's")
        if (i + 1) % max(generations // 10, 1) == 0:
            held.append(resident())
    faults += [f"model {i} was changed" for i, model in enumerate((*targets, draft)) if fingerprint(model) != before[i]]
    if _dice() != dice:
        faults.append("a global random generator moved")
    growth = held[-1] / held[0] - 1
    if growth > FLAT:
        faults.append(f"the memory grew by {growth:.1%}")
    memory = {"tenths": held, "growth": round(growth, 4)}
    seconds = round(time.perf_counter() - start, 1)
    return {"outcomes": dict(outcomes), "compared": compared, "memory": memory, "seconds": seconds, "faults": faults}


def _one(target: Any, draft: Any, choose: np.random.Generator) -> tuple[str, bool | None]:
    """One generation: how it ended, and whether a whole greedy text is the target's own."""
    ids = torch.from_numpy(choose.integers(3, VOCABULARY, (1, int(choose.integers(1, 40)))))
    new = int(choose.integers(1, 24))
    sample = bool(choose.integers(2))
    way, moment = str(choose.choice(WAYS)), int(choose.integers(0, 8))
    options: dict[str, Any] = {"do_sample": sample, "max_new_tokens": new, "pad_token_id": 0}
    bound: dict[str, Any] = {
        "policy": _policy(choose),
        "rule": str(choose.choice(RULES)) if sample else "match",
        "seed": int(choose.integers(1000)),
    }
    who = draft if choose.integers(3) else "ngram"
    try:
        if way == "left":
            for _, _ in zip(range(moment + 1), treespec.steps(target, who, ids, **bound, **options)):
                pass
            return "left", None
        out = treespec.generate(target, who, ids, **bound, **options, **_troubles(way, moment))
    except (Interruption, KeyboardInterrupt):
        return f"interrupted by the {way}", None
    except TreespecError:
        return "refused", None
    if sample:
        return "sampled", None
    expected = target.generate(ids, **options)
    return "greedy", bool(torch.equal(out.sequences, expected))


def _troubles(way: str, moment: int) -> dict[str, Any]:
    """Arguments of a generation that is interrupted at a moment."""

    def trip(*_: Any) -> None:
        nonlocal moment
        moment -= 1
        if moment < 0:
            raise KeyboardInterrupt if way == "observer" else Interruption

    class Streamer:
        put = staticmethod(trip)

        def end(self) -> None:
            pass

    def process(ids: Any, scores: Any) -> Any:
        trip()
        return scores

    if way == "streamer":
        return {"streamer": Streamer()}
    if way == "observer":
        return {"on_step": trip}
    return {"logits_processor": [process]} if way == "processor" else {}


def _policy(choose: np.random.Generator) -> Policy:
    """A random policy with random parameters."""
    while True:
        kind = POLICIES[str(choose.choice(list(POLICIES)))]
        with suppress(TreespecError):
            found = setting(kind, choose.random(len(kind.space)), load_cost("article"))
            if found is not None:
                return found


def fingerprint(model: Any) -> tuple[Any, ...]:
    """A model's weights, modes, hooks and configurations."""
    weights = tuple((name, p.data_ptr(), hash(p.detach().numpy().tobytes())) for name, p in model.state_dict().items())
    modes = tuple((m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules())
    named = tuple(sorted(vars(model)))
    return weights, modes, named, model.config.to_json_string(), model.generation_config.to_json_string()


def resident() -> int:
    """Bytes of this process in memory, after a collection and without what the C library keeps for later."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _dice() -> tuple[Any, ...]:
    numbers = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numbers[1].tobytes(), numbers[2], random.getstate()  # type: ignore[index]


def _llama(seed: int, layers: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


if __name__ == "__main__":
    main()
