"""Drafting with a feature head: it reads the hidden states of the target's own verification, so no second forward.

The head's cache has a row per pair of a token and the true hidden state before it. Below the root its own outputs stand
in for hidden states; once a path is accepted, its rows are dropped and read again with the true ones.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.drafters.base import DraftRequest
from treespec.drafters.cached import CachedDrafter
from treespec.drafters.growth import Growth
from treespec.head import EPS, FeatureHead
from treespec.native import LayerWeights, NativeLayers, NativeProduct, kernel
from treespec.packed import Packed, can_pack, pack_linears
from treespec.proposals import Proposals, propose, whole
from treespec.session import Output, Session


class HeadForward:
    """A head as a session sees it: through the C kernel where there is one, else a twin that shares its weights, with
    packed products where that is possible.
    """

    def __init__(self, head: FeatureHead) -> None:
        self.token_of = head.token_of.cpu()
        self.kinds = ["full"]
        self.window: int | None = None
        self.dtype, self.device = head.output.dtype, head.output.device
        self._layer: Any
        self._logits: Any = head.logits
        if native_head(head):
            self._layer = _NativeHead(head)
            self._logits = self._layer.logits
            return
        shared = {id(t): t for t in (*head.parameters(), *head.buffers())}
        self._layer = copy.deepcopy(head, shared)
        if can_pack(head.output):
            pack_linears(self._layer)
            self._logits = Packed(head.output)

    @classmethod
    def of(cls, head: FeatureHead) -> HeadForward:
        """The one of this head, made at first use."""
        found = _MADE.get(head)
        if found is None or found.device != head.output.device or found.dtype != head.output.dtype:
            found = _MADE[head] = cls(head)
        return found

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
        """One forward; the hidden states are the guessed features, always returned."""
        assert features is not None
        out = self._layer(ids, features[None], positions, mask, cache)[0]
        rows = {"all": out, "last": out[-1:]}.get(logits)
        return Output(None if rows is None else self._logits(rows), out)


def native_head(head: FeatureHead) -> bool:
    """Whether the C kernel can compute this head."""
    config = head.config
    return (
        head.output.device.type == "cpu"
        and config.head_dim % 8 == config.intermediate_size % 8 == 0
        and kernel() is not None
    )


class _NativeHead:
    """:meth:`FeatureHead.forward` through the C kernel."""

    def __init__(self, head: FeatureHead) -> None:
        config = head.config
        self._head = head
        self._turns: tuple[Tensor, Tensor] | None = None  # cosines and sines of the positions so far, by position
        self._mix = NativeProduct(head.mix.weight)
        self.logits = NativeProduct(head.output.bfloat16())  # a guess may be rounded, and half the bytes are read
        gate, up = head.gate_up.weight.chunk(2)
        weights = LayerWeights(
            norm1=head.norm1.weight,
            norm2=head.norm2.weight,
            qkv=(torch.cat([head.q.weight, head.kv.weight]), None),
            out=(head.out.weight, None),
            gate=(gate, None),
            up=(up, None),
            down=(head.down.weight, None),
        )
        sizes = (config.heads, config.kv_heads, config.head_dim)
        self._layers = NativeLayers([weights], *sizes, EPS, config.head_dim**-0.5, None)

    def __call__(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        x = self._mix(self._head.pair(ids, features))
        most = int(positions.max())
        turns = self._turns  # looked at once: another text's thread may put a shorter table there meanwhile
        if turns is None or most >= len(turns[0]):
            cos, sin = self._head.rotary(torch.arange(2 * most + 64))
            turns = self._turns = cos[:, 0], sin[:, 0]
        cos, sin = (table[positions[0]] for table in turns)
        return self._layers.run(x[0], cos, sin, mask, cache)[None]


_MADE: WeakKeyDictionary[FeatureHead, HeadForward] = WeakKeyDictionary()


class HeadDrafter(CachedDrafter):
    """A feature head as a drafter.

    Args:
        head: loaded for the target in use.
    """

    def __init__(self, head: FeatureHead) -> None:
        self.head = head
        self.forward = HeadForward.of(head)
        self._known = 0

    def begin(self, request: DraftRequest) -> None:
        """Start a new text; :meth:`read` brings the prompt's hidden states."""
        super().begin(request)
        self._session = Session(self.forward, TreeCache(["full"], request.capacity))
        self._known = 0  # tokens whose own hidden state has been read
        self._waiting: list[Tensor] = []  # hidden states not yet in the cache, as features
        self._last: Tensor | None = None  # the feature before the last token in the cache
        self._guessed: dict[int, Tensor] = {}

    @property
    def depth_room(self) -> int:
        """No limit of its own; nothing before any hidden state was read."""
        return (1 << 30) if self._known else 0

    def read(self, hidden: Tensor, start: int | None = None) -> None:
        """See :class:`treespec.drafters.base.FeatureDrafter`."""
        if start is not None:
            self._known = start
        self._known += len(hidden)
        self._waiting.append(self.head.normal(hidden.to(self.forward.device, self.forward.dtype)))

    def commit(self, path: list[int], tokens: list[int]) -> None:
        """Drop the tree's rows; the tokens are read again with the true hidden states, which :meth:`read` brings."""
        self._session.keep([])
        self._slots, self._guessed = {}, {}
        self._text += tokens

    def _rewind(self) -> None:
        self._session.keep([])
        if not self._waiting:
            assert self._last is not None
            self._session.truncate(self._session.length - 1)
            self._waiting = [self._last]

    def _root_logits(self) -> Tensor:
        features = torch.cat(self._waiting)
        self._waiting, self._last = [], features[-1:]
        tokens = self._text[self._known + 1 - len(features) : self._known + 1]
        out = self._session.extend(tokens, features=features)
        assert out is not None and self._session.hidden is not None
        self._guessed = {0: self._session.hidden[-1]}
        return out

    def _read_level(self, growth: Growth, nodes: list[int], depths: list[int], visible: np.ndarray) -> Tensor:
        features = torch.stack([self._guessed[growth.parent[i]] for i in nodes])
        out = self._session.tree([growth.token[i] for i in nodes], depths, visible, features)
        assert self._session.hidden is not None
        self._guessed.update(zip(nodes, self._session.hidden))
        return out

    def _propose(self, logits: Tensor, growth: Growth, nodes: list[int], noise: Tensor | None) -> Proposals:
        token_of, drawn = self.head.token_of, self._request.sampler is not None
        if self._request.shape is not None:
            dense = logits.new_full((len(logits), self._request.vocabulary), -torch.inf)
            dense[:, token_of] = logits
            logits = self._shaped(dense, growth, nodes)
            return whole(logits) if drawn else propose(logits, self._width, noise)
        if drawn:
            return whole(logits, self.forward.token_of)
        found = propose(logits, self._width, None if noise is None else noise.to(token_of.device)[token_of])
        return Proposals(self.forward.token_of[found.token], found.logp, found.entropy)
