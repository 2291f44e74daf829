"""Drafting with any Hugging Face causal LM of a compatible vocabulary."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.drafters.base import Drafted, DraftRequest
from treespec.drafters.growth import Growth, grow
from treespec.model import Session, TreeModel
from treespec.policies.base import Policy
from treespec.proposals import Proposals, propose


class ModelDrafter:
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
        self._request = request
        self._text = list(request.ids)
        self._session: Session = self.owner.session(request.capacity)
        self._pending = list(request.ids)
        self._slots: dict[int, int] = {}  # tree node -> row behind the committed ones
        self._warned = False

    @property
    def depth_room(self) -> int:
        """Levels that the draft's context still allows; none when the text itself no longer fits."""
        limits, length = self.owner.limits, len(self._text)
        if length > limits.context:
            return 0
        return min(limits.depth_room(length) + 1, limits.context - length + 1)

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """One forward over the pending tokens, then one per level over the nodes that grow on."""
        self._rewind()
        self._slots, self._visible = {}, np.zeros((0, 0), dtype=bool)
        self._forwards: list[float] = []
        self._width = policy.width
        tree, seconds = grow(policy, self._text[-1], min(max_depth, self.depth_room), self._expand)
        return Drafted(tree, self._forwards, seconds)

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
        """Drop the rows of a tree that was grown but never committed, and make the root pending again."""
        self._session.keep([])
        if not self._pending:
            self._session.truncate(len(self._text) - 1)
            self._pending = self._text[-1:]

    def _expand(self, growth: Growth, nodes: list[int]) -> Proposals:
        start = self._session.seconds
        logits = self._root_logits() if nodes == [0] else self._level_logits(growth, nodes)
        self._forwards.append(self._session.seconds - start)
        depth = growth.depth[nodes[0]]
        position = len(self._text) + depth  # of the children
        request = self._request
        logits = logits[:, : request.vocabulary]  # a padded draft head may be longer than the target's
        if request.shape is not None:
            logits = self._shaped(logits, growth, nodes)
        noise = None
        if request.noise is not None:
            noise = request.noise(position)[: logits.shape[-1]]
        proposals = propose(logits, self._width, noise)
        if not self._warned and bool(torch.isinf(proposals.entropy).any()):
            self._warned = True
            warnings.warn(
                "the draft model produced non-finite logits; such nodes propose nothing and the output is unaffected. "
                "Load the draft in a wider dtype",
                RuntimeWarning,
                stacklevel=2,
            )
        return proposals

    def _root_logits(self) -> Tensor:
        pending, self._pending = self._pending, []
        out = self._session.extend(self._known(pending))
        assert out is not None
        return out

    def _level_logits(self, growth: Growth, nodes: list[int]) -> Tensor:
        rows = len(self._slots)
        total = rows + len(nodes)
        visible = np.zeros((total, total), dtype=bool)
        visible[:rows, :rows] = self._visible
        for row, node in enumerate(nodes, start=rows):
            above = self._slots.get(growth.parent[node])
            if above is not None:
                visible[row] = visible[above]
            visible[row, row] = True
            self._slots[node] = row
        self._visible = visible
        tokens = self._known([growth.token[i] for i in nodes])
        # depth 1 stands at the next free position: the root is committed already
        return self._session.tree(tokens, [growth.depth[i] - 1 for i in nodes], visible[rows:])

    def _known(self, tokens: list[int]) -> list[int]:
        """Tokens as the draft can read them: ids beyond its embedding become 0, which only costs accuracy."""
        return [t if t < self.owner.embedded else 0 for t in tokens]

    def _shaped(self, logits: Tensor, growth: Growth, nodes: list[int]) -> Tensor:
        assert self._request.shape is not None
        missing = self._request.vocabulary - logits.shape[-1]
        logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        ids = torch.tensor([self._text + growth.path_tokens(i) for i in nodes], device=logits.device)
        return self._request.shape(ids, logits)
