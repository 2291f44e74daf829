"""Faster forwards for a loaded model, opt-in, checked, and undone with one call.

``speed_up(model, "cpu")`` gives Llama-shaped models the lean forward of :mod:`treespec.lean` with packed products, and
any other model packed linear layers (:mod:`treespec.packed`). ``"lean"`` is the lean forward alone, for any device.
``"compile"`` is ``torch.compile`` on the model's own forward. What is put in place must reproduce the model's logits on
a small tree; if it does not, everything is as before.

Products in another order round differently: in float32 logits move by about 1e-5 of their spread, so a text can differ
from ``model.generate``'s only where two tokens tie that closely.
"""

from __future__ import annotations

from typing import Any

import torch

from treespec.errors import InputError
from treespec.lean import LeanForward, use_lean, why_not_lean
from treespec.model import TreeModel, input_device
from treespec.packed import PackedLinear, can_pack, pack_linears, unpack_linears
from treespec.selfcheck import TOLERANCE, same_logits

WAYS = ("off", "cpu", "lean", "compile")


def speed_up(model: Any, how: str = "cpu") -> str:
    """Speed a model up for treespec.

    Args:
        model: a loaded transformers causal LM, in eval mode.
        how: ``"cpu"`` (products packed where processor and dtype allow it, and the lean forward where the model has
            its shape), ``"lean"``, ``"compile"``, or ``"off"`` (as it was).

    Returns:
        What is in place now, in a few words, with the reason where it is less than was asked for.

    Raises:
        InputError: for another ``how``, or ``"cpu"`` for a model that is elsewhere.
    """
    if how not in WAYS:
        raise InputError(f"unknown way to speed up {how!r}; known: {', '.join(WAYS)}")
    if how == "cpu" and (device := input_device(model)).type != "cpu":
        raise InputError(f"fast='cpu' is for models on the CPU; this one is on {device}. Use fast='lean' there")
    slow_down(model)
    own = TreeModel.of(model)
    if how == "off":
        return "transformers' own forward"
    if how == "compile":
        model.compile(dynamic=True)
        return "torch.compile"
    packs = how == "cpu" and can_pack(model.get_input_embeddings().weight)
    why = why_not_lean(model)
    if why is None:
        use_lean(model, LeanForward(model, pack=packs))
        if _as_before(model, own):
            return "lean forward" + (", packed products" if packs else "")
        use_lean(model, None)
        why = "its logits differ"
    if packs and pack_linears(model):
        if _as_before(model, own):
            return f"packed linear layers (no lean forward: {why})"
        unpack_linears(model)
    return f"transformers' own forward (no lean forward: {why})"


def slow_down(model: Any) -> None:
    """Undo :func:`speed_up`: the model is what it was."""
    use_lean(model, None)
    unpack_linears(model)
    if getattr(model, "_compiled_call_impl", None) is not None:
        model._compiled_call_impl = None


def is_fast(model: Any) -> bool:
    """Whether a model has been sped up with packed products (its drafts may be, too)."""
    return TreeModel(model).lean is not None or any(isinstance(m, PackedLinear) for m in model.modules())


def _as_before(model: Any, own: TreeModel) -> bool:
    """The same logits as ``own``, which was made before the change (packed layers: as their plain weights give)."""
    new = TreeModel(model)
    if new.lean is None:
        with torch.no_grad():
            for layer in (m for m in model.modules() if isinstance(m, PackedLinear)):
                x = torch.linspace(-1, 1, 3 * layer.in_features, dtype=layer.weight.dtype).view(3, -1)
                want = torch.nn.functional.linear(x, layer.weight, layer.bias)
                if not torch.allclose(layer(x), want, rtol=1e-2, atol=TOLERANCE[own.dtype] * float(want.std() + 1e-6)):
                    return False
        return True
    return same_logits(new, own) <= TOLERANCE.get(own.dtype, 0.1)
