"""How far a model's positions may run, and where its rotary frequencies change under way.

Three kinds of trouble hide here. Learned positions end: a lookahead past the table is an index error although the
remaining tokens would fit. ``dynamic`` rotary scaling changes its frequencies with every position past the trained
length, so nodes of different depth cannot share a forward there. ``longrope`` switches once, and transformers' own
generation recomputes the whole text when it does.

Both kinds keep their present frequencies in the model, so texts that are decoded at the same time would get each
other's: there a forward has the model to itself and begins with the frequencies of its own text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from treespec.errors import InputError

NO_LIMIT = 1 << 30
Angles = list[tuple[Tensor, int, float]]  # per rotary module: frequencies, longest text seen, scale

_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # holds no model alive
_MAKING = threading.Lock()


def lock_of(model: Any) -> threading.RLock:
    """The one lock of a model, for what changes it for a moment."""
    with _MAKING:
        return _LOCKS.setdefault(model, threading.RLock())


def _rope(config: Any) -> dict[str, Any]:
    """The rope parameters (of the first layer type that has a changing kind, else of the first)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict) and "rope_type" in p]
    if not nested:
        return dict(parameters)
    return next((p for p in nested if p["rope_type"] in ("dynamic", "longrope")), nested[0])


@dataclass
class Limits:
    """Position limits of one model.

    Attributes:
        context: most positions the model was made for.
        hard: positions past ``context`` do not exist (learned or tabulated positions).
        one_by_one: from this position on only one token per forward is exact (dynamic rotary scaling).
        switch: number of tokens at which longrope changes to its long factors.
        recompute: the model's own generation recomputes the cache at the switch.
    """

    model: Any
    context: int = NO_LIMIT
    hard: bool = False
    one_by_one: int = NO_LIMIT
    switch: int = NO_LIMIT
    recompute: bool = False

    @classmethod
    def of(cls, model: Any) -> Limits:
        """Read the limits from a model's config and class."""
        config = model.config.get_text_config(decoder=True)
        context = int(getattr(config, "max_position_embeddings", None) or NO_LIMIT)
        rope = _rope(config)
        kind = rope.get("rope_type")
        limits = cls(model, context=context, hard=not rope and context != NO_LIMIT)
        if kind == "dynamic":
            limits.context, limits.one_by_one = NO_LIMIT, context
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            limits.switch = int(original or getattr(config, "original_max_position_embeddings", None) or context)
            limits.recompute = "prepare_inputs_for_generation" in type(getattr(model, "_orig_mod", model)).__dict__
        return limits

    def check_prompt(self, prompt: int, new: int) -> None:
        """Refuse what cannot be decoded, before any forward.

        Args:
            prompt: prompt length in tokens.
            new: most new tokens.

        Raises:
            InputError: if the prompt exceeds the context, or (learned positions) prompt and new tokens do.
        """
        if prompt > self.context:
            raise InputError(
                f"the prompt has {prompt:,} tokens but the model's context is {self.context:,}; shorten the prompt"
            )
        room = self.context - prompt + 1  # the last new token is never fed back
        if self.hard and new > room:
            raise InputError(
                f"a prompt of {prompt:,} tokens leaves room for {room:,} new tokens in the model's context of "
                f"{self.context:,}; lower max_new_tokens from {new:,} or shorten the prompt"
            )

    def depth_room(self, length: int) -> int:
        """Levels a tree may have when the committed text, root included, has ``length`` tokens."""
        room = self.context - length if self.hard else NO_LIMIT
        room = min(room, max(self.one_by_one - length, 0))
        if length <= self.switch:
            room = min(room, self.switch - length)
        return max(room, 0)

    def restart_needed(self, cached: int, total: int) -> bool:
        """Whether a cache of ``cached`` tokens must be recomputed before the text reaches ``total`` tokens."""
        return self.recompute and 0 < cached <= self.switch < total

    @property
    def has_moving_angles(self) -> bool:
        """Whether a forward changes the frequencies that the next one finds."""
        return self.one_by_one != NO_LIMIT or self.switch != NO_LIMIT

    @contextmanager
    def own_angles(self, text: Any) -> Iterator[None]:
        """Around a forward: the frequencies are those that its text has come to, whatever was read in between.

        Args:
            text: the text's cache, which keeps them in ``angles``; None for a text of one forward.
        """
        if not self.has_moving_angles:
            yield
            return
        with lock_of(self.model):
            self._turn_to(getattr(text, "angles", None))
            yield
            if text is not None:
                text.angles = [
                    (m.inv_freq, m.max_seq_len_cached, m.attention_scaling) for m in rotary_modules(self.model)
                ]

    def forget_previous_text(self) -> None:
        """Dynamic rotary layers remember the longest text they saw; start from the trained frequencies again."""
        if self.one_by_one != NO_LIMIT:
            with lock_of(self.model):
                self._turn_to(None)

    def _turn_to(self, angles: Angles | None) -> None:
        # assigned, not copied into: a buffer that transformers made in inference mode cannot be written outside it
        for i, module in enumerate(rotary_modules(self.model)):
            if angles is not None:
                module.inv_freq, module.max_seq_len_cached, module.attention_scaling = angles[i]
            else:
                module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
                module.max_seq_len_cached = module.original_max_seq_len


def rotary_modules(model: nn.Module) -> Iterator[Any]:
    """Rotary embedding modules whose frequencies depend on the length of the text."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "original_inv_freq"):
            yield module
