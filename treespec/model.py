"""A Hugging Face causal LM that can look at a tree: which models can, and one session of forwards over one text.

``TreeModel`` holds what is true of a model (layer kinds, mask dtype, devices, limits); it keeps no state, so many
sessions may use one model. ``Session`` owns the cache of one text. Targets and model drafts run through the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.errors import OutOfMemoryError
from treespec.launch import is_divided, lost, peer_error
from treespec.lean import lean_forward
from treespec.limits import Limits, lock_of
from treespec.selfcheck import bare, check_support, layer_kinds, self_check


class Output(NamedTuple):
    """Of one forward over n tokens: ``logits`` (all rows, the last, or None) and normalised last ``hidden`` ``[n, H]``,
    None where nobody asked for it.
    """

    logits: Tensor | None
    hidden: Tensor | None = None


class TreeModel:
    """What treespec knows of a model.

    Attributes:
        model: the transformers model, never modified and never moved.
        kinds: per layer ``"full"`` or ``"sliding"``.
        window: positions a sliding layer sees, itself included; None without such layers.
        limits: how far positions may run.
        vocabulary: size of the output head.
        embedded: rows of the input embedding; ids from here on cannot be read.
        dtype: of masks, the model's compute dtype.
        device: where token ids go.
        attention: the attention implementation in use.
        lean: the lean forward, if :func:`treespec.fast.speed_up` made one for this model.
        divided: its layers are divided among several processes.
    """

    def __init__(self, model: Any, role: str = "target") -> None:
        check_support(model, role)
        self.model = model
        self.role = role
        config = model.config.get_text_config(decoder=True)
        self.kinds = layer_kinds(config)
        self.window = int(config.sliding_window) if "sliding" in self.kinds else None
        self.limits = Limits.of(model)
        self.vocabulary = int(config.vocab_size)
        embeddings = model.get_input_embeddings()
        self.embedded = int(embeddings.weight.shape[0])
        self.dtype = embeddings.weight.dtype if embeddings.weight.is_floating_point() else model.dtype
        self.device = input_device(model)
        self.attention = str(getattr(config, "_attn_implementation", "eager"))
        self.lean = lean_forward(model)
        self.divided = is_divided(model)
        self._keep_logits = "logits_to_keep" in inspect.signature(bare(model).forward).parameters

    @classmethod
    def of(cls, model: Any, role: str = "target") -> TreeModel:
        """The wrapper of a model, :meth:`checked`.

        Raises:
            UnsupportedModelError: if the model cannot verify a tree, naming its type and why.
        """
        return cls(model, role).checked()

    def checked(self) -> TreeModel:
        """This wrapper, once its model has passed the self-check: see :meth:`of`. The constructor makes no forward.

        Raises:
            UnsupportedModelError: if the logits of a small tree are not those of its paths.
        """
        state = (self.dtype, self.device, self.attention, type(self.lean))
        with lock_of(self.model):  # the check puts the model into eval mode for a moment
            if _CHECKED.get(self.model) != state:
                self_check(self)
                _CHECKED[self.model] = state
        return self

    def session(self, capacity: int) -> Session:
        """A fresh session with room for ``capacity`` rows."""
        cache = TreeCache(self.kinds, capacity)
        cache.model = ref(self.model)
        return Session(self, cache)

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
        """One forward.

        Args:
            ids: ``[1, n]``.
            positions: ``[1, n]``.
            mask: additive ``[1, 1, n, m]``, a dict of such by layer kind, or None.
            cache: keys and values of what came before; grows by n rows.
            logits: ``"all"`` rows, the ``"last"`` row, or ``"none"``.
            hidden: also return the last hidden states.
            features: what a feature head reads beside the tokens; a language model reads none.

        Raises:
            OutOfMemoryError: naming what was asked for and what to lower.
        """
        try:
            with self.limits.own_angles(cache):
                run = self._run_model if self.lean is None else self._run_lean
                return run(ids, positions, mask, cache, logits, hidden)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if self.divided and lost(error):
                raise peer_error(error) from None
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(
                error
            ):
                raise
            rows = 0 if cache is None else cache.length
            raise OutOfMemoryError(
                f"the {self.role} ran out of memory on {self.device} in a forward of {ids.shape[1]} tokens over "
                f"{rows} cached ones; lower the policy's budget, the prompt's length or the dtype's width"
            ) from error

    def _run_lean(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, logits: str, hidden: bool) -> Output:
        assert self.lean is not None
        last = self.lean.hidden(ids, positions, mask, cache)[0]
        rows = {"all": last, "last": last[-1:]}.get(logits)
        return Output(None if rows is None else self.lean.logits(rows), last if hidden else None)

    def _run_model(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, logits: str, hidden: bool) -> Output:
        keep = {} if not self._keep_logits or logits == "all" else {"logits_to_keep": 1}
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            return_dict=True,
            output_hidden_states=hidden,
            **keep,
        )
        last = out.hidden_states[-1][0] if hidden else None
        if logits == "none":
            return Output(None, last)
        return Output(out.logits[0] if logits == "all" else out.logits[0, -1:], last)


# what a model was like when it passed; holds no model alive
_CHECKED: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()


def input_device(model: Any) -> torch.device:
    """Where token ids have to be: the embedding's execution device, never ``model.device`` (meta when offloaded)."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None) or getattr(model, "_hf_hook", None)
    where = getattr(hook, "execution_device", None)
    if where is not None:
        return torch.device(where) if not isinstance(where, int) else torch.device("cuda", where)
    device: torch.device = embeddings.weight.device
    return device


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
