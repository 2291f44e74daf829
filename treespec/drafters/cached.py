"""What drafters with a KV cache share: pending tokens, rows of the tree under work, exact rewinding."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from treespec.drafters.base import Drafted, DraftRequest
from treespec.drafters.growth import Growth, grow
from treespec.policies.base import Policy
from treespec.proposals import Proposals
from treespec.session import Session


class CachedDrafter(ABC):
    """A drafter whose cache holds the committed text, except for what is pending until the next ``grow``.

    A subclass says what is read for the root, what is read for a level, and what the logits mean.
    """

    _session: Session
    samples = True  # can draw children and tell what from
    complete = True  # a law over one vocabulary: every node has as many children as any other

    def begin(self, request: DraftRequest) -> None:
        """Start a new text; the prompt is read at the first ``grow``."""
        self._request = request
        self._text = list(request.ids)
        self._slots: dict[int, int] = {}  # tree node -> row behind the committed ones
        self._warned = False

    def grow(self, policy: Policy, max_depth: int) -> Drafted:
        """One forward over what is pending, then one per level over the nodes that grow on."""
        self._rewind()
        self._slots, self._visible = {}, np.zeros((0, 0), dtype=bool)
        self._forwards: list[float] = []
        self._width = policy.width
        tree, seconds = grow(
            policy, self._text[-1], min(max_depth, self.depth_room), self._expand, self._request.sampler
        )
        return Drafted(tree, self._forwards, seconds)

    @property
    @abstractmethod
    def depth_room(self) -> int:
        """Levels that the draft's context still allows."""

    @abstractmethod
    def _rewind(self) -> None:
        """Drop the rows of a tree that was grown but never committed, and make the root pending again."""

    @abstractmethod
    def _root_logits(self) -> Tensor:
        """Read what is pending; the last row's logits ``[1, V]``."""

    @abstractmethod
    def _read_level(self, growth: Growth, nodes: list[int], depths: list[int], visible: np.ndarray) -> Tensor:
        """Read a level's nodes behind the committed text; their logits ``[F, V]``."""

    @abstractmethod
    def _propose(self, logits: Tensor, growth: Growth, nodes: list[int], noise: Tensor | None) -> Proposals:
        """From logits to children."""

    def _expand(self, growth: Growth, nodes: list[int]) -> Proposals:
        start = self._session.seconds
        logits = self._root_logits() if nodes == [0] else self._level_logits(growth, nodes)
        self._forwards.append(self._session.seconds - start)
        position = len(self._text) + growth.depth[nodes[0]]  # of the children
        noise = None if self._request.noise is None else self._request.noise(position)
        proposals = self._propose(logits, growth, nodes, noise)
        if not self._warned and bool(torch.isinf(proposals.entropy).any()):
            self._warned = True
            warnings.warn(
                "the draft model produced non-finite logits; such nodes propose nothing and the output is unaffected. "
                "Load the draft in a wider dtype",
                RuntimeWarning,
                stacklevel=2,
            )
        return proposals

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
        # depth 1 stands at the next free position: the root is committed already
        return self._read_level(growth, nodes, [growth.depth[i] - 1 for i in nodes], visible[rows:])

    def _shaped(self, logits: Tensor, growth: Growth, nodes: list[int]) -> Tensor:
        """The target's processors on logits ``[F, V']``, V' at most the target's vocabulary."""
        assert self._request.shape is not None
        missing = self._request.vocabulary - logits.shape[-1]
        logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        ids = torch.tensor([self._text + growth.path_tokens(i) for i in nodes], device=logits.device)
        return self._request.shape(ids, logits)
