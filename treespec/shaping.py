"""Which of the target's logits processors the draft should see through as well.

A draft ranked at T = 1 while the target samples at T = 0.3, or unaware of a repetition penalty, proposes what the
target will never say. Only transformers' own processors that are functions of (ids, logits) are applied: a custom one
may keep state, and must not be advanced by branches that are rejected later.
"""

from __future__ import annotations

import transformers
from transformers import LogitsProcessorList

from treespec.drafters.base import Shape

STATELESS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
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
    known = tuple(cls for name in STATELESS if (cls := getattr(transformers, name, None)) is not None)
    mine = LogitsProcessorList([p for p in processors if type(p) in known])
    return mine if len(mine) else None
