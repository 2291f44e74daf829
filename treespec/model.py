"""A Hugging Face causal LM that can look at a tree: which models can, and their forwards.

``TreeModel`` holds what is true of a model (layer kinds, mask dtype, devices, limits); it keeps no state, so many
sessions (:mod:`treespec.session`) may use one model. Targets and model drafts run through the same code.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.errors import OutOfMemoryError
from treespec.launch import is_divided, lost, peer_error
from treespec.lean import lean_forward
from treespec.limits import Limits, lock_of
from treespec.selfcheck import bare, check_support, layer_kinds, self_check
from treespec.session import Output, Session


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
