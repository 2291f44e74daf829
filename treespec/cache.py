"""A preallocated KV cache for any Hugging Face causal LM: append a tree in place, keep one path of it, in place.

transformers' ``DynamicCache`` concatenates the whole cache at every forward and has no per-position gather. Here each
layer owns one buffer with room to spare; ``update`` writes behind the committed tokens and returns a view; ``keep``
moves the accepted rows down. Sliding-window layers keep all rows as well: on a tree the window runs over positions
along the path, not over slots, so it is the mask that enforces it (see :mod:`treespec.model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64  # rows; buffers are sized in steps of this many


class Shelf:
    """One buffer for the keys and values of layers that are alike: a path is then kept with one gather.

    Args:
        count: layers that share it.
    """

    def __init__(self, count: int) -> None:
        self._count, self._taken = count, 0
        self._buffer: Tensor | None = None  # [layers, 2, 1, heads, capacity, dim]

    def take(self, keys: Tensor, values: Tensor, capacity: int) -> tuple[Tensor, Tensor] | None:
        """The next layer's two buffers, or None if it is not like the first."""
        shape = (self._count, 2, *keys.shape[:2], capacity, keys.shape[-1])
        if self._taken == 0 and self._count:
            self._buffer = _empty(shape, keys)
        buffer = self._buffer
        alike = buffer is not None and buffer.shape == shape and values.shape == keys.shape
        if not alike or buffer is None or (buffer.dtype, buffer.device) != (keys.dtype, keys.device):
            self.leave()
            return None
        self._taken += 1
        return buffer[self._taken - 1, 0], buffer[self._taken - 1, 1]

    def leave(self) -> None:
        """A layer has buffers of its own from now on: nothing is shared any more."""
        self._buffer, self._count = None, 0

    def move(self, rows: Tensor, to: slice) -> bool:
        """Move rows of all layers; False if they do not all lie here."""
        if self._buffer is None or self._taken < self._count:
            return False
        self._buffer[..., to, :] = self._buffer.index_select(-2, rows)
        return True


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    # a buffer born in inference mode could not be written outside it, in a later turn
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values ``[1, heads, capacity, dim]``, of which the first ``length`` rows are in use."""

    is_compileable = False
    is_croppable = True

    def __init__(self, capacity: int, is_sliding: bool = False, shelf: Shelf | None = None) -> None:
        self.capacity = capacity
        self._shelf = shelf or Shelf(1)
        self.is_sliding = is_sliding
        self.is_initialized = False
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor | None:
        """The rows in use, a view."""
        return None if self._keys is None else self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        """The rows in use, a view."""
        return None if self._values is None else self._values[:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the layer's own device, when its first keys show which that is."""
        shared = self._shelf.take(key_states, value_states, self.capacity)
        self._keys, self._values = shared or self._own(key_states, value_states)
        self.is_initialized = True

    def _own(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._shelf.leave()
        shapes = [(*like.shape[:2], self.capacity, like.shape[-1]) for like in (keys, values)]
        return _empty(shapes[0], keys), _empty(shapes[1], values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``n`` new rows behind the used ones and return views of all used rows."""
        start = self.length
        keys, values = self.claim(key_states.shape[-2], key_states, value_states)
        keys[:, :, start : self.length] = key_states
        values[:, :, start : self.length] = value_states
        return keys[:, :, : self.length], values[:, :, : self.length]

    def claim(self, rows: int, keys_like: Tensor, values_like: Tensor) -> tuple[Tensor, Tensor]:
        """Count ``rows`` more rows as used; returns the whole buffers, for the caller to write them.

        Args:
            rows: how many.
            keys_like: ``[1, heads, any, dim]`` in the device and dtype that keys are written in: another forward over
                the same text may compute in another dtype, then the rows there are cast.
            values_like: the same of the values.
        """
        end = self.length + rows
        if not self.is_initialized:
            self.capacity = max(self.capacity, _round_up(end))
            self.lazy_initialization(keys_like, values_like)
        elif end > self.capacity:
            self._grow(end)
        assert self._keys is not None and self._values is not None
        if self._keys.dtype != keys_like.dtype:
            self._shelf.leave()
            with torch.inference_mode(False):  # see _empty
                self._keys, self._values = self._keys.to(keys_like.dtype), self._values.to(values_like.dtype)
        self.length = end
        return self._keys, self._values

    def _grow(self, rows: int) -> None:
        assert self._keys is not None and self._values is not None
        old_keys, old_values, used = self._keys, self._values, self.length
        self.capacity = _round_up(max(rows, self.capacity + self.capacity // 2))
        self._keys, self._values = self._own(old_keys, old_values)
        self._keys[:, :, :used] = old_keys[:, :, :used]
        self._values[:, :, :used] = old_values[:, :, :used]

    @property
    def device(self) -> torch.device:
        """Where an initialised layer lies."""
        assert self._keys is not None
        return self._keys.device

    def move(self, rows: Tensor, to: int) -> None:
        """Move ``rows`` (absolute, on this layer's device) to ``to`` and on."""
        assert self._keys is not None and self._values is not None
        place = slice(to, to + rows.numel())
        self._keys[:, :, place] = self._keys.index_select(2, rows)
        self._values[:, :, place] = self._values.index_select(2, rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` rows (transformers' sign convention).

        Raises:
            ValueError: for a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove; got {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything; the buffer stays."""
        self.length = 0

    def get_seq_length(self) -> int:
        """Rows in use."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows after a forward of ``query_length`` tokens, offset 0): nothing is ever evicted."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: the layer grows when it must."""
        return -1

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values) if t is not None)


def _round_up(rows: int) -> int:
    return -(-rows // GROWTH) * GROWTH


class TreeCache(Cache):
    """The cache of one generation; plugs into any HF causal LM as ``cache=``.

    Args:
        kinds: per layer ``"full"`` or ``"sliding"``; anything else is an error of the caller.
        capacity: rows to allocate at first use; more are added when needed.

    Attributes:
        tokens: ids of the committed rows, kept by the session that fills the cache: what a later turn may rely on.
    """

    angles: Any = None  # rotary frequencies that the text has come to, where they depend on it
    model: Any = None  # weak reference to the model whose keys and values these are

    def __init__(self, kinds: Sequence[str], capacity: int = GROWTH) -> None:
        rows = _round_up(max(capacity, 1))
        self._shelf = Shelf(len(kinds))
        self.tokens: list[int] = []
        super().__init__(layers=[TreeLayer(rows, kind == "sliding", self._shelf) for kind in kinds])

    @property
    def length(self) -> int:
        """Rows in use: committed tokens plus those of the last tree until :meth:`keep` or :meth:`truncate`."""
        return int(self.layers[0].length)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' buffers."""
        return sum(layer.nbytes for layer in self.layers)

    def keep(self, base: int, slots: Sequence[int]) -> None:
        """Of the rows behind ``base`` keep those at ``slots`` (ascending, relative to ``base``), in that order.

        Rows that already stand where they belong are not touched; the others move by one gather, or by one per layer
        where layers differ in shape or device.
        """
        moved = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
        length = base + len(slots)
        if moved < len(slots):
            self._move([base + slot for slot in slots[moved:]], base + moved)
        for layer in self.layers:
            layer.length = length

    def _move(self, rows: list[int], to: int) -> None:
        index: dict[torch.device, Tensor] = {}
        for layer in self.layers:
            if not layer.is_initialized:  # it reads another layer's keys, or nothing was read yet
                continue
            if layer.device not in index:
                index[layer.device] = torch.tensor(rows, device=layer.device)
            if self._shelf.move(index[layer.device], slice(to, to + len(rows))):
                return
            layer.move(index[layer.device], to)

    def truncate(self, length: int) -> None:
        """Forget every row from ``length`` on."""
        del self.tokens[length:]
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def crop(self, tokens_to_remove: int) -> None:
        """See :meth:`TreeLayer.crop`."""
        super().crop(tokens_to_remove)
        del self.tokens[self.length :]

    def reset(self) -> None:
        """See :meth:`TreeLayer.reset`."""
        super().reset()
        self.tokens.clear()

    def known(self, text: Sequence[int]) -> int:
        """Rows that are surely those of the beginning of ``text``; later ones may be of another text or of a tree."""
        rows = min(self.length, len(self.tokens), len(text))
        return next((i for i in range(rows) if self.tokens[i] != text[i]), rows)
