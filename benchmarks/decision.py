"""One pruning decision for 64 nodes over a vocabulary of 128,256, against the verification of those 64 nodes.

The decision starts from the draft's raw logits: log-softmax, entropy, top-k and the dynamic pruner. 128,256 is
Llama 3's vocabulary, so the verification is by a model of its smallest member's shape (1B, random weights: timing needs
no others), float32, context 256. The same decision over SmolLM2's 49,152 tokens stands beside SmolLM2's verification.

    .venv/bin/python -m benchmarks.decision [--rounds 7]
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import show
from treespec.model import TreeModel
from treespec.pairs import load_pair
from treespec.policies import DynamicTreePruner, Frontier
from treespec.proposals import propose

NODES, CONTEXT = 64, 256


def llama_1b() -> Any:
    """Llama-3.2-1B's shape with random weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.02, 0.02) if p.dim() > 1 else p.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def decide(logits: torch.Tensor, policy: DynamicTreePruner) -> None:
    """From raw logits ``[64, V]`` to the policy's answer."""
    got = propose(logits, policy.width)
    path = torch.zeros(1, len(logits)) - 1.0
    policy.decide(
        Frontier(
            depth=3,
            log_path=path,
            entropy=got.entropy[None],
            child_logp=got.logp[None],
            alive=torch.ones_like(path, dtype=torch.bool),
            score=path,
            pool=path[:, :32],
            ranks=torch.zeros(*path.shape, 3, dtype=torch.long),
            drawn=torch.ones(1, 4, dtype=torch.long),
        )
    )


@torch.no_grad()
def verification(owner: TreeModel) -> float:
    """Seconds of one tree forward over 64 nodes."""
    session = owner.session(CONTEXT + NODES)
    session.extend(list(range(10, 10 + CONTEXT)), logits="none")
    before = session.seconds
    session.tree(list(range(NODES)), list(range(NODES)), np.tril(np.ones((NODES, NODES), dtype=bool)))
    return session.seconds - before


def measure(name: str, model: Any, rounds: int) -> None:
    """Interleave decisions and verifications; print both and their ratio."""
    owner, policy = TreeModel.of(model), DynamicTreePruner(tau=0.001, low=1, high=30)
    logits = 4 * torch.randn(NODES, owner.vocabulary, generator=torch.Generator().manual_seed(0))
    decide(logits, policy), verification(owner)  # type: ignore[func-returns-value]
    decisions, verifications = [], []
    for _ in range(rounds):
        start = perf_counter()
        decide(logits, policy)
        decisions.append(perf_counter() - start)
        verifications.append(verification(owner))
    show(f"{name}: decision over V = {owner.vocabulary:,}", [1e3 * s for s in decisions], " ms")
    show(f"{name}: verification of {NODES} nodes", [1e3 * s for s in verifications], " ms")
    show(f"{name}: decision / verification", [100 * d / v for d, v in zip(decisions, verifications)], " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    measure("SmolLM2-135M", load_pair(draft="none").target, args.rounds)
    measure("Llama 3 1B shape", llama_1b(), args.rounds)


if __name__ == "__main__":
    main()
