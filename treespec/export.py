"""Tuned settings for other engines: the exact flags or JSON, and what each engine cannot express, said aloud.

A tuning names the best setting of every policy. An engine that only knows chains gets the best *chain*, not a tree cut
down to one; an engine with a beam and a budget gets the best ``eagle2``; an engine with static trees the best static
one. Where the tuning has none that fits, the recommended policy's depth, width and budget are taken, and that is said.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treespec.drafters.growth import grow
from treespec.errors import InputError
from treespec.files import read_json, real
from treespec.policies import Autoregressive, Eagle2, Linear, Policy, Sequoia, SpecInfer, Uniform, parse_policy
from treespec.proposals import Proposals
from treespec.tree import Reason

STATIC = (Uniform, SpecInfer, Sequoia)
LOST_SIGNALS = "entropy bands and cumulative confidence export nowhere: no other engine stops or prunes by them"


@dataclass(frozen=True)
class Export:
    """Settings for one engine.

    Args:
        engine: its name.
        text: the flags or the JSON, to be copied.
        policy: the setting that was exported, in treespec's form.
        notes: what the engine cannot express, and what else to know; one sentence each.
    """

    engine: str
    text: str
    policy: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Tree:
    """What engines know of a tree: most levels, most children of a node, most candidates (root excluded)."""

    depth: int
    width: int
    budget: int

    @classmethod
    def of(cls, policy: Policy) -> Tree:
        """The bounds of a policy's trees."""
        budget = getattr(policy, "budget", None)
        if isinstance(policy, Eagle2):
            budget = policy.total - 1
        if budget is None:
            budget = len(choices(policy))
        return cls(policy.levels, min(policy.width, budget), budget)


def choices(policy: Policy) -> list[list[int]]:
    """The largest tree of a policy as lists of sibling ranks, EAGLE's and Medusa's form, shallower nodes first.

    The draft here is endlessly sure of everything in turn (every child has the same probability), so no threshold cuts.
    """

    def expand(growth: Any, nodes: list[int]) -> Proposals:
        shape = (len(nodes), max(policy.width, 1))
        return Proposals(torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(len(nodes)))

    tree, _ = grow(policy, 0, policy.levels, expand)
    paths: list[list[int]] = [[]]
    for node in range(1, len(tree)):
        paths.append([*paths[int(tree.parent[node])], int(tree.rank[node])])
    kept = [path for node, path in enumerate(paths) if node and tree.reason[node] == Reason.KEPT]
    return sorted(kept, key=lambda path: (len(path), path))


Tuned = list[tuple[Policy, float | None]]  # settings with their speed-up, None if unknown; the recommended first


def load_tuning(path: str | Path) -> Tuned:
    """The settings of a tuning, the recommended first, then the best setting of every policy, best first.

    Args:
        path: what ``treespec tune --out`` wrote, or a policy's command-line form such as ``linear:gamma=4``.

    Raises:
        InputError: if it is neither.
    """
    if not os.path.lexists(path) and not str(path).endswith(".json"):
        return [(parse_policy(str(path)), None)]
    content = read_json(path)
    try:
        rows = sorted(content["by_policy"].values(), key=lambda row: -real(row["speedup"]))
        return [(parse_policy(row["policy"]), real(row["speedup"])) for row in (content["recommended"], *rows)]
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no tuning: expected what treespec tune --out writes") from None


def export(tuned: Tuned, engine: str) -> Export:
    """The settings of a tuning for another engine.

    Args:
        tuned: as :func:`load_tuning` gives them.
        engine: one of :data:`ENGINES`.

    Raises:
        InputError: for an unknown engine.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    fits, write = ENGINES[engine]
    recommended = tuned[0][0]
    if isinstance(recommended, Autoregressive):
        note = "the tuning recommends plain decoding: leave speculation off, every setting was slower"
        return Export(engine, "", recommended.spec(), (note,))
    policy, speedup = next((pair for pair in tuned if isinstance(pair[0], fits)), tuned[0])
    text, notes = write(policy)
    said = []
    if not isinstance(policy, fits):
        said.append(
            f"the tuning has no setting that {engine} can run as it is ({' or '.join(p.name for p in fits)}); only "
            f"bounds of {policy.spec()} are kept: tune again with --policy {fits[0].name}"
        )
    elif policy != recommended:
        said.append(f"{engine} cannot run the recommended {recommended.spec()}; this is the best that it can run")
    if speedup is not None and speedup < 1:
        said.append(f"by the tuning it is slower than plain decoding ({speedup:.2f}×): leave speculation off")
    return Export(engine, text, policy.spec(), (*said, *notes, LOST_SIGNALS))


def _transformers(policy: Policy) -> tuple[str, tuple[str, ...]]:
    fields = {
        "num_assistant_tokens": policy.levels,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": getattr(policy, "confidence", 0.0),
    }
    return json.dumps(fields), (
        "set these on the assistant's generation_config; the draft is a chain, a tree cannot be expressed",
        *_chain_losses(policy),
    )


def _vllm(policy: Policy) -> tuple[str, tuple[str, ...]]:
    return json.dumps({"num_speculative_tokens": policy.levels}), (
        "goes into --speculative-config beside method and model; a chain of fixed length: trees were removed in 2026",
        *_chain_losses(policy, confidence=False),
    )


def _llama_cpp(policy: Policy) -> tuple[str, tuple[str, ...]]:
    least = getattr(policy, "confidence", 0.0)
    return f"--spec-draft-n-max {policy.levels} --spec-draft-n-min 0 --spec-draft-p-min {least:g}", (
        "a chain; p-min is a token's own probability, not the path's, so a cumulative threshold cannot be expressed",
        *_chain_losses(policy),
    )


def _chain_losses(policy: Policy, confidence: bool = True) -> tuple[str, ...]:
    stops = [s for s in ("confidence", "cumulative", "svip") if getattr(policy, s, 0.0) > 0]
    lost = [s for s in stops if s != "confidence" or not confidence]
    return (f"lost: the chain's early stop by {' and '.join(lost)}",) if lost else ()


def _sglang(policy: Policy) -> tuple[str, tuple[str, ...]]:
    tree = Tree.of(policy)
    total = tree.budget + 1
    pool = 1 + tree.width + (tree.depth - 1) * tree.width**2
    total = tree.depth + 1 if tree.width == 1 else min(total, pool)
    flags = {
        "algorithm": "EAGLE",
        "num-steps": tree.depth,
        "eagle-topk": tree.width,
        "num-draft-tokens": total,
    }
    text = " ".join(f"--speculative-{key} {value}" for key, value in flags.items())
    return text, (
        "num-draft-tokens counts the root; write EAGLE3 or STANDALONE for such a head or an independent draft model",
        "every step drafts all levels: the beam's early end cannot be expressed",
    )


def _tensorrt_llm(policy: Policy) -> tuple[str, tuple[str, ...]]:
    tree = Tree.of(policy)
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {tree.depth}"]
    if isinstance(policy, STATIC):
        lines.append(f"  eagle_choices: {json.dumps(choices(policy))}")
    else:
        lines += [
            "  use_dynamic_tree: true",
            f"  dynamic_tree_max_topK: {tree.width}",
            f"  max_total_draft_tokens: {tree.budget}",
        ]
    return "\n".join(lines), (
        "needs an EAGLE-3 draft; max_total_draft_tokens leaves the root out",
        "every step drafts all levels: the beam's early end cannot be expressed",
    )


def _openvino(policy: Policy) -> tuple[str, tuple[str, ...]]:
    tree = Tree.of(policy)
    fields: dict[str, Any] = {
        "branching_factor": tree.width,
        "tree_depth": tree.depth,
        "num_assistant_tokens": tree.budget,
    }
    if isinstance(policy, Linear):
        fields = {"num_assistant_tokens": policy.gamma, "assistant_confidence_threshold": policy.confidence}
    return json.dumps(fields), ("one width for every node: a width per level or per node cannot be expressed",)


def _eagle(policy: Policy) -> tuple[str, tuple[str, ...]]:
    notes = [
        "a static tree: one shape for every step, whatever the draft's confidence",
        "the same lists are Medusa's medusa_choices",
    ]
    if not isinstance(policy, (*STATIC, Linear)):
        tree = Tree.of(policy)
        policy = Sequoia(budget=tree.budget, depth=tree.depth)
        notes.insert(0, f"the shape is that of {policy.spec()}, of the same budget and depth")
    return json.dumps(choices(policy)), tuple(notes)


Writer = Callable[[Policy], tuple[str, tuple[str, ...]]]
# what each engine can run as it is, and who writes its settings
ENGINES: dict[str, tuple[tuple[type[Policy], ...], Writer]] = {
    "transformers": ((Linear,), _transformers),
    "sglang": ((Eagle2, Linear), _sglang),
    "tensorrt-llm": ((Eagle2, Linear, *STATIC), _tensorrt_llm),
    "vllm": ((Linear,), _vllm),
    "llama.cpp": ((Linear,), _llama_cpp),
    "openvino": ((Eagle2, Linear), _openvino),
    "eagle": ((*STATIC, Linear), _eagle),
}
