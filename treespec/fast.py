"""Faster forwards for a loaded model, opt-in, checked, and undone with one call.

``speed_up(model, "cpu")`` gives Llama-shaped models the lean forward of :mod:`treespec.lean`, through the C kernel of
:mod:`treespec.native` where the machine has a C compiler and with packed products where it has none, and any other
model packed linear layers (:mod:`treespec.packed`). ``"lean"`` is the lean forward alone, for any device.
``"compile"`` is ``torch.compile`` on the model's own forward: three graphs (the prompt, one token, several tokens),
minutes to make. What is put in place must reproduce the model's logits on a small tree; if it does not, everything is
as before.

Products in another order round differently: in float32 logits move by about 1e-5 of their spread, so a text can differ
from ``model.generate``'s only where two tokens tie that closely.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from treespec.errors import InputError
from treespec.lean import LeanForward, NativeForward, use_lean, why_not_lean, why_not_native
from treespec.model import TreeModel, input_device
from treespec.packed import can_pack, pack_linears, unpack_linears
from treespec.selfcheck import TOLERANCE, same_logits, tree_logits

WAYS = ("off", "cpu", "lean", "compile")
OWN = "transformers' own forward"
_COMPILED: WeakSet[Any] = WeakSet()  # by us; a caller's own compilation is left alone


def speed_up(model: Any, how: str = "cpu") -> str:
    """Speed a model up for treespec.

    Args:
        model: a loaded transformers causal LM, in eval mode.
        how: ``"cpu"`` (the lean forward where the model has its shape, compiled or with packed products, whichever this
            machine can do), ``"lean"``, ``"compile"``, or ``"off"`` (as it was).

    Returns:
        What is in place now, in a few words, with the reason where it is less than was asked for.

    Raises:
        InputError: for another ``how``, or ``"cpu"`` for a model that is elsewhere.
    """
    check_way(how)
    if how == "cpu" and (device := input_device(model)).type != "cpu":
        raise InputError(f"fast='cpu' is for models on the CPU; this one is on {device}. Use fast='lean' there")
    slow_down(model)
    if how == "off":
        return OWN
    if how == "compile":
        return _compiled(model)
    if how == "cpu" and (native := _checked(model, why_not_native, NativeForward)[0]) is not None:
        use_lean(model, native)
        return "lean forward, C kernel"
    packs = how == "cpu" and can_pack(model.get_input_embeddings().weight)
    lean, why = checked_lean(model, packs)
    if lean is not None:
        use_lean(model, lean)
        return "lean forward" + (", packed products" if packs else "")
    if packs and _packed(model):
        return f"packed linear layers (no lean forward: {why})"
    return f"{OWN} (no lean forward: {why})"


def check_way(how: str) -> None:
    """Refuse an unknown way.

    Raises:
        InputError: naming those there are.
    """
    if how not in WAYS:
        raise InputError(f"unknown way to speed up {how!r}; known: {', '.join(WAYS)}")


def slow_down(model: Any) -> None:
    """Undo :func:`speed_up`: the model is what it was."""
    use_lean(model, None)
    unpack_linears(model)
    if model in _COMPILED:
        model._compiled_call_impl = None
        _COMPILED.discard(model)


def checked_lean(model: Any, pack: bool) -> tuple[LeanForward | None, str]:
    """A lean forward whose logits are the model's own, or None and why there is none. Nothing is put in place."""
    return _checked(model, why_not_lean, partial(LeanForward, pack=pack))


Made = TypeVar("Made", LeanForward, NativeForward)


def _checked(model: Any, why_not: Callable[[Any], str | None], make: Callable[[Any], Made]) -> tuple[Made | None, str]:
    why = why_not(model)
    if why is not None:
        return None, why
    own, new = TreeModel.of(model), TreeModel(model)
    own.lean = None
    try:
        new.lean = made = make(model)
        same = same_logits(new, own) <= TOLERANCE.get(own.dtype, 0.1)
    except Exception as error:  # a subclass, an adapter: whatever it is, the model's own forward works
        return None, f"it failed on a small tree, {type(error).__name__}"
    return (made, "") if same else (None, "its logits differ")


def _packed(model: Any) -> bool:
    """Pack the linear layers if that leaves the logits as they are."""
    own = TreeModel.of(model)
    before = tree_logits(own)
    if not pack_linears(model):
        return False
    if float((tree_logits(own) - before).abs().max()) <= TOLERANCE.get(own.dtype, 0.1) * float(before.std()):
        return True
    unpack_linears(model)
    return False


def _compiled(model: Any) -> str:
    own = TreeModel.of(model)
    before = tree_logits(own)
    model.compile(dynamic=True)
    _COMPILED.add(model)
    try:
        same = float((tree_logits(own) - before).abs().max()) <= TOLERANCE.get(own.dtype, 0.1) * float(before.std())
        why = "its logits differ"
    except Exception as error:  # no compiler, or an operator it does not know
        same, why = False, type(error).__name__
    if same:
        return "torch.compile"
    slow_down(model)
    return f"{OWN} (torch.compile failed: {why})"
