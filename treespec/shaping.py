"""Logits processors away from the emitted text: on the draft's logits, and on every node of a tree.

A draft ranked at T = 1 while the target samples at T = 0.3, or unaware of a repetition penalty, proposes what the
target will never say. Only transformers' own processors that are functions of (ids, logits) are applied: a custom one
may keep state, and must not be advanced by branches that are rejected later.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

from treespec.drafters.base import Shape
from treespec.errors import InputError
from treespec.tree import TokenTree

STATELESS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
)


def draft_shape(processors: LogitsProcessorList) -> Shape | None:
    """The stateless processors as one function, or None if there are none."""
    mine = LogitsProcessorList([p for p in processors if _stateless(p)])
    return mine if len(mine) else None


def _stateless(processor: Any) -> bool:
    return any(type(processor) is getattr(transformers, name, None) for name in STATELESS)


def all_stateless(processors: LogitsProcessorList) -> bool:
    """Whether all processors are functions of (ids, logits)."""
    return all(map(_stateless, processors))


def check_stateless(processors: LogitsProcessorList, rule: str) -> None:
    """Refuse processors that may keep state, for a rule that asks about paths which may then be rejected.

    Raises:
        InputError: naming the processor.
    """
    for processor in processors:
        if not _stateless(processor):
            raise InputError(
                f"rule {rule!r} runs logits processors on branches that may be rejected, but "
                f"{type(processor).__name__} may keep state between calls; use rule match, coupled, rrs or hybrid"
            )


def node_scores(processors: LogitsProcessorList, ids: Tensor, tree: TokenTree, logits: Tensor) -> Tensor:
    """Processed scores of every node of a tree, each with its own prefix; one call per depth.

    Args:
        processors: functions of (ids, scores).
        ids: ``[1, L]`` the text so far, root included.
        tree: n nodes.
        logits: ``[n, V]`` float32 on the device of ``ids``.

    Returns:
        ``[n, V]`` float32; ``logits`` itself without processors.
    """
    if not len(processors):
        return logits
    paths: list[list[int]] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist()):
        paths.append([] if parent < 0 else [*paths[parent], token])
    scores = torch.empty_like(logits)
    for depth in range(int(tree.depth.max()) + 1):
        level = [i for i, path in enumerate(paths) if len(path) == depth]
        own = torch.tensor([paths[i] for i in level], dtype=torch.long, device=ids.device).view(len(level), depth)
        scores[level] = processors(torch.cat([ids.expand(len(level), -1), own], dim=1), logits[level])
    return scores
