"""A table-driven pair for tests and teaching: instant, no downloads, every distribution known exactly.

``TableModel`` is a causal LM whose next-token logits are a table over the last two tokens. It reads the one before
last through its cache, its mask and its positions, as attention would: a wrong mask, position or cache row gives a
wrong distribution, so it tests an engine as a real model does.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

WORDS = ["<pad>", "<end>", "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree"]


class TableConfig(PretrainedConfig):
    """Sizes of a :class:`TableModel`."""

    model_type = "treespec_table"

    def __init__(self, vocab_size: int = len(WORDS), **kwargs: Any) -> None:
        self.vocab_size = vocab_size
        self.num_hidden_layers = 1
        self.hidden_size = 1
        self.num_attention_heads = 1
        super().__init__(**kwargs)


class TableModel(PreTrainedModel, GenerationMixin):
    """p(next | last two tokens) from a table of logits ``[V + 1, V, V]`` (row V: there is no token before)."""

    config_class = TableConfig
    _supports_sdpa = True

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        size = config.vocab_size
        self.embed = nn.Embedding(size, 1)
        self.table = nn.Parameter(torch.zeros(size + 1, size, size), requires_grad=False)

    @classmethod
    def random(cls, vocabulary: int = len(WORDS), seed: int = 0, sharpness: float = 3.0) -> TableModel:
        """A seeded table; the larger ``sharpness``, the lower the entropy."""
        model = cls(TableConfig(vocab_size=vocabulary, pad_token_id=0, eos_token_id=None, bos_token_id=None))
        noise = torch.randn(model.table.shape, generator=torch.Generator().manual_seed(seed))
        model.table.copy_(sharpness * noise)
        if vocabulary == len(WORDS):
            model.table[..., :2] = -30.0  # the toy speaks in words, not in <pad> and <end>
        return model.eval()

    def blurred(self, seed: int = 1, noise: float = 1.0) -> TableModel:
        """A draft for this target: the same table with noise on its logits."""
        draft = TableModel(self.config)
        extra = torch.randn(self.table.shape, generator=torch.Generator().manual_seed(seed))
        draft.table.copy_(self.table + noise * extra)
        return draft.eval()

    def distribution(self, text: list[int]) -> Tensor:
        """``[V]`` exact next-token probabilities after ``text``."""
        before = text[-2] if len(text) > 1 else self.config.vocab_size
        return self.table[before, text[-1]].double().softmax(-1)

    def get_input_embeddings(self) -> nn.Module:
        """The (unused) embedding; its size is the vocabulary."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """The table stands in for a head."""
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, n, V]``; attends to the visible key at the position before each query."""
        batch, count = input_ids.shape
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = (past + torch.arange(count))[None]
        position_ids = position_ids.expand(batch, -1)
        keys = torch.stack([position_ids.float(), input_ids.float()], dim=-1)[:, None]  # [B, 1, n, 2]
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            keys, _ = cache.update(keys, keys, 0)
        at, token = keys[:, 0].unbind(-1)  # [B, L]
        before = self._visible(attention_mask, past, count) & (at[:, None] == position_ids[..., None] - 1)
        previous = torch.where(before.any(-1), (before * token[:, None]).sum(-1).long(), self.config.vocab_size)
        logits = self.table[previous, input_ids]
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], cache=cache)

    def _visible(self, mask: Tensor | None, past: int, count: int) -> Tensor:
        if mask is not None and mask.dim() == 4:
            return mask[:, 0] == 0
        causal = torch.arange(past + count)[None] <= past + torch.arange(count)[:, None]
        return causal[None] if mask is None else causal[None] & mask[:, None, :].bool()


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the toy vocabulary."""
    model = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
