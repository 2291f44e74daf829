"""Drafting with any Hugging Face causal LM of a compatible vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from treespec.drafters.base import DraftRequest
from treespec.drafters.cached import CachedDrafter
from treespec.drafters.growth import Growth
from treespec.model import TreeModel
from treespec.proposals import Proposals, propose, whole


class ModelDrafter(CachedDrafter):
    """A draft model with its own cache, rewound exactly after every step.

    The cache holds the committed text except for a few *pending* tokens: those that were committed without having
    been expanded (always the last one; after a fully accepted path also the leaf before it). They are fed at the
    next ``grow``, together, which also gives the root's distribution.

    Args:
        model: a causal LM. A vocabulary larger than the target's is cut, a smaller one proposes less.
    """

    def __init__(self, model: Any) -> None:
        self.owner = TreeModel.of(model, role="draft")

    def begin(self, request: DraftRequest) -> None:
        """Start a new text; the prompt is read at the first ``grow``."""
        super().begin(request)
        self._session = self.owner.session(request.capacity)
        self._pending = list(request.ids)

    @property
    def depth_room(self) -> int:
        """Levels that the draft's context still allows; none when the text itself no longer fits."""
        limits, length = self.owner.limits, len(self._text)
        if length > limits.context:
            return 0
        return min(limits.depth_room(length) + 1, limits.context - length + 1)

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Keep the rows of accepted nodes that were expanded; what was not is pending."""
        expanded = []
        for node in path:
            if node not in self._slots:
                break
            expanded.append(self._slots[node])
        self._session.keep(expanded)
        self._slots = {}
        self._text += tokens
        self._pending += tokens[len(expanded) :]

    def _rewind(self) -> None:
        self._session.keep([])
        if not self._pending:
            self._session.truncate(len(self._text) - 1)
            self._pending = self._text[-1:]

    def _root_logits(self) -> Tensor:
        pending, self._pending = self._pending, []
        out = self._session.extend(self._known(pending))
        assert out is not None
        return out

    def _read_level(self, growth: Growth, nodes: list[int], depths: list[int], visible: np.ndarray) -> Tensor:
        return self._session.tree(self._known([growth.token[i] for i in nodes]), depths, visible)

    def _propose(self, logits: Tensor, growth: Growth, nodes: list[int], noise: Tensor | None) -> Proposals:
        logits = logits[:, : self._request.vocabulary]  # a padded draft head may be longer than the target's
        if self._request.shape is not None:
            logits = self._shaped(logits, growth, nodes)
        if self._request.sampler is not None:
            return whole(logits)
        return propose(logits, self._width, None if noise is None else noise[: logits.shape[-1]])

    def _known(self, tokens: list[int]) -> list[int]:
        """Tokens as the draft can read them: ids beyond its embedding become 0, which only costs accuracy."""
        return [t if t < self.owner.embedded else 0 for t in tokens]
