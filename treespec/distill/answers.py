"""The target answers many prompts at once: continuous batching over one preallocated cache.

A slot that finishes is given the next prompt, so the batch stays full to the end. Every answer comes with the target's
normalised last hidden states, which a feature head trains on, so that no second forward is needed. Greedy and sampled
answers share a batch; sampling uses one uniform number per (seed, prompt, position), so an answer does not depend on
what it was batched with, except through rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.cache import TreeCache, TreeLayer
from treespec.errors import InputError, NonFiniteLogitsError, UnsupportedModelError
from treespec.fast import checked_lean
from treespec.limits import NO_LIMIT
from treespec.model import TreeModel

READ_AT_ONCE = 8  # prompts per forward: their activations still fit a CPU's last cache level


@dataclass
class Job:
    """One prompt to answer: its number, its ids, its temperature (0 is greedy)."""

    index: int
    prompt: list[int]
    temperature: float = 0.0


@dataclass
class Answer:
    """A prompt and its answer.

    Attributes:
        job: what was asked.
        tokens: prompt and answer ids.
        features: ``[len(tokens) - 1, H]`` float16 on the CPU: the last hidden state at every token that was read.
    """

    job: Job
    tokens: list[int]
    features: Tensor


@dataclass
class _Slot:
    job: Job
    tokens: list[int]
    features: list[Tensor] = field(default_factory=list)


class _SlotLayer(TreeLayer):
    """One layer's keys and values ``[slots, heads, capacity, dim]``; every slot has its own length."""

    owner: SlotCache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per slot at its own length; returns the rows up to the longest."""
        assert self._keys is not None and self._values is not None
        device = self._keys.device
        rows, at = self.owner.rows.to(device), self.owner.lengths.to(device)
        self._keys[rows, :, at] = key_states[:, :, 0]
        self._values[rows, :, at] = value_states[:, :, 0]
        reach = self.owner.reach
        return self._keys[:, :, :reach], self._values[:, :, :reach]

    def place(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Copy a prompt's ``[heads, n, dim]`` rows to the front of a slot."""
        if not self.is_initialized:
            like = keys.new_empty(len(self.owner.rows), keys.shape[0], 1, keys.shape[2])
            self.lazy_initialization(like, like)
            assert self._keys is not None and self._values is not None
            self._keys.zero_(), self._values.zero_()  # masked rows are still multiplied: they must be finite
        assert self._keys is not None and self._values is not None
        self._keys[slot, :, : keys.shape[1]] = keys
        self._values[slot, :, : keys.shape[1]] = values


class SlotCache(TreeCache):
    """A cache of many texts, one per slot.

    Attributes:
        lengths: ``[slots]`` committed tokens.
        reach: rows that the next forward attends to.
    """

    def __init__(self, layers: int, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(["full"] * layers, capacity)
        made = []
        for _ in range(layers):
            layer = _SlotLayer(capacity)
            layer.owner = self
            made.append(layer)
        self.layers = made
        self.rows = torch.arange(slots, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.reach = 1


class AnswerWriter:
    """Answers prompts in a batch.

    Args:
        model: a transformers causal LM.
        slots: answers under way at once.
        new_tokens: most tokens per answer.
        seed: of the sampled answers.

    Raises:
        UnsupportedModelError: if the model cannot verify a tree, or its logits are not read from its last hidden state.
    """

    def __init__(self, model: Any, slots: int = 64, new_tokens: int = 144, seed: int = 0) -> None:
        self.own = TreeModel.of(model)
        self.slots, self.new_tokens, self.seed = slots, new_tokens, seed
        self.lean = checked_lean(model, pack=True)[0]
        self._check_output()
        eos = model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos]) - {None}
        limits = self.own.limits
        # past a window, or where rotary frequencies change with the length, texts of a batch would not be alone
        self.context = min(limits.context, self.own.window or NO_LIMIT, limits.one_by_one, limits.switch)

    @torch.inference_mode()
    def _check_output(self) -> None:
        """Hidden states are what a head learns from: the logits must be the output layer's product with them."""
        ids = torch.tensor([[1 % self.own.vocabulary, 2 % self.own.vocabulary]], device=self.own.device)
        out = self.own.model(input_ids=ids, output_hidden_states=True)
        product = self.own.model.get_output_embeddings()(out.hidden_states[-1])
        if float((product - out.logits).abs().max()) > 0.05 * float(out.logits.std()):
            raise UnsupportedModelError(
                f"a target of type {self.own.model.config.model_type!r} cannot be distilled: its logits are not its "
                "output layer's product with its last hidden state (they are scaled or capped)"
            )

    @torch.inference_mode()
    def run(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Answers, in the order in which they finish.

        Raises:
            InputError: if a prompt and its answer do not fit the context.
        """
        waiting = [self._fitting(job) for job in jobs][::-1]
        if not waiting:
            return
        longest = max(len(job.prompt) for job in waiting) + self.new_tokens + 1
        self.cache = SlotCache(len(self.own.kinds), self.slots, longest, self.own.device)
        busy: list[_Slot | None] = [None] * self.slots
        while waiting or any(busy):
            free = [i for i, slot in enumerate(busy) if slot is None]
            if waiting and (len(free) >= max(1, self.slots // 8) or not any(busy)):
                yield from self._admit(waiting, busy, free)
            if any(busy):
                yield from self._decode(busy)

    def _fitting(self, job: Job) -> Job:
        if not job.prompt or len(job.prompt) + self.new_tokens > self.context:
            raise InputError(
                f"prompt {job.index} has {len(job.prompt):,} tokens; with {self.new_tokens} new ones it must fit the "
                f"target's context (or window) of {self.context:,}"
            )
        return job

    def _admit(self, waiting: list[Job], busy: list[_Slot | None], free: list[int]) -> Iterator[Answer]:
        """Read as many prompts as there are free slots, together."""
        jobs = [waiting.pop() for _ in range(min(len(free), len(waiting), READ_AT_ONCE))]
        size = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([job.prompt + [0] * (size - len(job.prompt)) for job in jobs], device=self.own.device)
        read = TreeCache(self.own.kinds, size)
        positions = torch.arange(size, device=self.own.device).expand(len(jobs), -1)
        hidden = self._hidden(ids, positions, None, read)
        last = torch.stack([hidden[i, len(job.prompt) - 1] for i, job in enumerate(jobs)])
        new = self._choose(self._logits(last), [(job, len(job.prompt)) for job in jobs])
        for i, (slot, job) in enumerate(zip(free, jobs)):
            n = len(job.prompt)
            for mine, theirs in zip(self.cache.layers, read.layers):
                mine.place(slot, theirs.keys[i, :, :n], theirs.values[i, :, :n])
            self.cache.lengths[slot] = n
            busy[slot] = _Slot(job, [*job.prompt, new[i]], [hidden[i, :n].half().cpu()])
        yield from self._finished(busy, free[: len(jobs)])

    def _decode(self, busy: list[_Slot | None]) -> Iterator[Answer]:
        """One token for every busy slot."""
        cache, device = self.cache, self.own.device
        active = [i for i, slot in enumerate(busy) if slot is not None]
        cache.reach = int(cache.lengths[active].max()) + 1
        ids = torch.tensor([[slot.tokens[-1] if slot else 0] for slot in busy], device=device)
        seen = torch.arange(cache.reach, device=device)[None] <= cache.lengths.clamp(max=cache.reach - 1)[:, None]
        mask = torch.zeros(seen.shape, dtype=self.own.dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(self.own.dtype).min)
        cache.lengths.clamp_(max=cache.reach - 1)  # idle slots write where nobody reads
        hidden = self._hidden(ids, cache.lengths[:, None], mask[:, None, None], cache)[:, 0]
        cache.lengths += 1
        asked = [(slot.job, len(slot.tokens)) for slot in busy if slot]
        new = self._choose(self._logits(hidden[active]), asked)
        rows = hidden.half().cpu()
        for token, i in zip(new, active):
            slot = busy[i]
            assert slot is not None
            slot.tokens.append(token)
            slot.features.append(rows[i : i + 1])
        yield from self._finished(busy, active)

    def _finished(self, busy: list[_Slot | None], among: list[int]) -> Iterator[Answer]:
        for i in among:
            slot = busy[i]
            assert slot is not None
            if slot.tokens[-1] in self.eos or len(slot.tokens) - len(slot.job.prompt) >= self.new_tokens:
                busy[i] = None
                features = torch.cat(slot.features)
                if not bool(torch.isfinite(features).all()):
                    raise NonFiniteLogitsError(
                        f"the target's hidden states on prompt {slot.job.index} do not fit float16 (largest 65,504); "
                        "load it in float32 and check its weights"
                    )
                yield Answer(slot.job, slot.tokens, features)

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        if self.lean is not None:
            return self.lean.hidden(ids, positions, mask, cache)
        out = self.own.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True,
            output_hidden_states=True, logits_to_keep=1,
        )  # fmt: skip
        hidden: Tensor = out.hidden_states[-1]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.lean is not None:
            return self.lean.logits(hidden)
        out: Tensor = self.own.model.get_output_embeddings()(hidden)
        return out

    def _choose(self, logits: Tensor, asked: list[tuple[Job, int]]) -> list[int]:
        """The next token of each row: the best one, or one drawn at the job's temperature."""
        token = logits.argmax(-1)
        drawn = [i for i, (job, _) in enumerate(asked) if job.temperature > 0]
        if drawn:
            heat = torch.tensor([asked[i][0].temperature for i in drawn], device=logits.device)
            total = (logits[drawn].float() / heat[:, None]).softmax(-1).cumsum(-1)
            point = torch.tensor([self._uniform(asked[i][0].index, asked[i][1]) for i in drawn], device=logits.device)
            found = torch.searchsorted(total, (point * total[:, -1])[:, None]).squeeze(-1)
            token[drawn] = found.clamp(max=logits.shape[-1] - 1)
        out: list[int] = token.tolist()
        return out

    def _uniform(self, index: int, position: int) -> float:
        bits = np.random.Philox(key=self.seed, counter=[0, 0, index, position])
        return float(np.random.Generator(bits).random(dtype=np.float32))
