"""One session of forwards over one text: committed tokens, a tree under work behind them, masks and positions.

A session runs a language model (:class:`treespec.model.TreeModel`) or a feature head, and owns the cache of its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.cache import TreeCache


class Output(NamedTuple):
    """Of one forward over n tokens: ``logits`` (all rows, the last, or None) and normalised last ``hidden`` ``[n, H]``,
    None where nobody asked for it.
    """

    logits: Tensor | None
    hidden: Tensor | None = None


class Forward(Protocol):
    """What a session runs: a language model, or a feature head."""

    kinds: list[str]
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        cache: Any,
        logits: str,
        hidden: bool = False,
        features: Tensor | None = None,
    ) -> Output:
        """See :meth:`TreeModel.run`."""


class Session:
    """The forwards over one text, and its cache.

    The cache holds ``length`` committed tokens; behind them the rows of the tree under work. ``extend`` commits
    tokens at once; ``tree`` appends uncommitted ones; ``keep`` commits some of those and forgets the rest.

    Attributes:
        keep_hidden: ask for hidden states in every forward.
        hidden: ``[n, H]`` of the last forward's tokens, if asked for.
        seconds: spent in forwards.
    """

    def __init__(self, owner: Forward, cache: TreeCache, length: int = 0) -> None:
        self.owner = owner
        self.cache = cache
        self.length = length
        self.keep_hidden = False
        self.hidden: Tensor | None = None
        self.seconds = 0.0
        self._tree_positions: list[int] = []
        self._tree_tokens: list[int] = []

    def extend(self, tokens: Sequence[int], logits: str = "last", features: Tensor | None = None) -> Tensor | None:
        """Commit tokens behind the others; returns the logits of the last one ``[1, V]`` (or all, or None).

        Args:
            tokens: in order.
            logits: which rows to return.
            features: ``[n, H]`` for a feature head.
        """
        if not tokens:
            return None
        own = self.owner
        ids = torch.tensor([list(tokens)], device=own.device)
        positions = torch.arange(self.length, self.length + len(tokens), device=own.device)[None]
        out = self._timed(ids, positions, None, logits, features)
        self.length += len(tokens)
        self.cache.tokens += tokens
        return out

    def tree(
        self, tokens: Sequence[int], depths: Sequence[int], visible: np.ndarray, features: Tensor | None = None
    ) -> Tensor:
        """Append tree nodes without committing them.

        Args:
            tokens: of n nodes.
            depths: positions relative to the next free one: 0 for the root if it is part of the tree.
            visible: ``[n, m]`` bool over the m uncommitted rows after this call (earlier ones and these n).
            features: ``[n, H]`` for a feature head.

        Returns:
            Logits ``[n, V]``.
        """
        own = self.owner
        positions = [self.length + d for d in depths]
        self._tree_positions += positions
        self._tree_tokens += tokens
        mask = None
        if len(self._tree_positions) > 1:  # a lone token after the committed text needs no mask of ours
            mask = self._mask(positions, visible)
        ids = torch.tensor([list(tokens)], device=own.device)
        out = self._timed(ids, torch.tensor([positions], device=own.device), mask, "all", features)
        assert out is not None
        return out

    def _timed(self, ids: Tensor, positions: Tensor, mask: Any, logits: str, features: Tensor | None) -> Tensor | None:
        start = perf_counter()
        out, self.hidden = self.owner.run(ids, positions, mask, self.cache, logits, self.keep_hidden, features)
        made = self.hidden if out is None else out
        if made is not None and made.device.type == "cuda":  # the last layer's device, where ids may be on the first's
            torch.cuda.synchronize(made.device)  # the next thing anyone does is to read these logits
        self.seconds += perf_counter() - start
        return out

    def recompute(self, tokens: Sequence[int]) -> Tensor:
        """Read the whole text again in one forward; its last token is left uncommitted, like a tree of one node.

        Returns:
            The last token's logits ``[1, V]``.
        """
        self.truncate(0)
        out = self.extend(tokens)
        assert out is not None
        self.length -= 1
        self._tree_tokens = [self.cache.tokens.pop()]
        if self.hidden is not None:
            self.hidden = self.hidden[-1:]
        return out

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` committed tokens."""
        self.cache.truncate(length)
        self.length = length
        self._tree_positions, self._tree_tokens = [], []

    def keep(self, slots: Sequence[int]) -> None:
        """Commit the tree rows at ``slots`` (ascending) and forget the others."""
        self.cache.keep(self.length, slots)
        self.length += len(slots)
        self.cache.tokens += [self._tree_tokens[slot] for slot in slots]
        self._tree_positions, self._tree_tokens = [], []

    def _mask(self, positions: list[int], visible: np.ndarray) -> Tensor | dict[str, Tensor]:
        own, base = self.owner, self.length
        allowed = np.ones((len(positions), base + visible.shape[1]), dtype=bool)
        allowed[:, base:] = visible
        masks: dict[str, Tensor] = {}
        if "full" in own.kinds:
            masks["full_attention"] = self._additive(allowed)
        if own.window is not None:
            at = np.concatenate([np.arange(base), np.asarray(self._tree_positions)])
            near = at[None, :] > np.asarray(positions)[:, None] - own.window
            masks["sliding_attention"] = self._additive(allowed & near)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: np.ndarray) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=self.owner.dtype)
        mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(self.owner.dtype).min)
        return mask[None, None].to(self.owner.device)
