"""Can this model verify a tree? A look at its config first, then five nodes against their paths.

A model fits if it honours a 4-D additive mask and explicit positions and keeps nothing else about the past.
Recurrent and hybrid models keep a state that cannot be undone, ALiBi models compute their bias from slots.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from treespec.errors import TreespecError, UnsupportedModelError
from treespec.tree import TokenTree

if TYPE_CHECKING:
    from treespec.model import TreeModel

PREFIX = 6
# allowed difference between tree and path logits, in standard deviations of the logits; a wrong mask moves them by
# a large part of one, rounding in half precision by about a hundredth of that
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
BY_SLOT = {"gpt_neo": "its local attention layers count the window by cache slot, not by position"}


def bare(model: Any) -> Any:
    """The model inside what ``torch.compile`` returned, to be looked at, not called; others are themselves."""
    return getattr(model, "_orig_mod", model)


def check_support(model: Any, role: str) -> None:
    """Refuse what is known not to fit, from the config alone, before any work.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(
            f"the {role} must be a transformers causal language model; got {type(model).__name__}"
        )
    why = _why_not(model, config)
    if why:
        raise UnsupportedModelError(f"the {role} is of type {config.model_type!r}, which cannot verify a tree: {why}")


def _why_not(model: Any, config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; treespec needs a decoder-only causal language model"
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return "it is a multimodal model; load its text model alone"
    if not hasattr(model, "generate") or model.get_output_embeddings() is None:
        return "it has no language-model head"
    if getattr(model, "_is_stateful", False):
        return "it is recurrent or hybrid; its state cannot take back rejected tokens or branch"
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):
        return "its ALiBi bias is computed from a two-dimensional mask, not from positions"
    if "position_ids" not in inspect.signature(bare(model).forward).parameters:
        return "its forward takes no position_ids (ALiBi or relative slots)"
    if config.model_type in BY_SLOT and "local" in str(getattr(text, "attention_layers", "local")):
        return BY_SLOT[config.model_type]
    attention = getattr(text, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        return f"attn_implementation={attention!r} takes no tree mask; load the model with 'sdpa' or 'eager'"
    kinds = set(layer_kinds(text))
    if kinds - {"full", "sliding"}:
        return (
            f"its layers of kind {', '.join(sorted(kinds - {'full', 'sliding'}))} keep a past that a tree cannot share"
        )
    return None


def layer_kinds(config: Any) -> list[str]:
    """Per layer ``"full"``, ``"sliding"``, or transformers' name of what cannot be supported."""
    types = getattr(config, "layer_types", None) or []
    odd = {t for t in types if t not in ("full_attention", "sliding_attention")}
    known: dict[type, str] = {DynamicLayer: "full", DynamicSlidingWindowLayer: "sliding"}
    layers = DynamicCache(config=config).layers or [DynamicLayer()] * config.num_hidden_layers
    kinds = [known.get(type(layer), type(layer).__name__) for layer in layers]
    return [types[i] if odd and i < len(types) and types[i] in odd else kind for i, kind in enumerate(kinds)]


@torch.no_grad()
def self_check(owner: TreeModel) -> None:
    """Five nodes under a tree mask against the same tokens as plain sequences.

    Raises:
        UnsupportedModelError: if the logits differ, or the model fails on the tree.
    """
    size, room = owner.vocabulary, min(PREFIX, owner.limits.context - 3)
    if room < 1:
        return  # too short a context to hold a tree at all: depth is clipped to nothing
    prefix, tree = _example(size, room)
    kind = owner.model.config.model_type
    training = owner.model.training
    owner.model.eval()
    try:
        got = _tree_logits(owner, prefix, tree)
        worst = 0.0
        for leaf in (3, 4):
            path = tree.path(leaf)
            ids = torch.tensor([prefix + tree.token[path].tolist()], device=owner.device)
            positions = torch.arange(ids.shape[1], device=owner.device)[None]
            alone = owner.run(ids, positions, None, None, "all").logits
            assert alone is not None
            want = alone[-len(path) :].float()
            worst = max(worst, float((got[path] - want).abs().max() / want.std().clamp(min=1e-6)))
    except TreespecError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"the {owner.role} is of type {kind!r}, which cannot verify a tree: it failed on a small one "
            f"({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else 'no message'})"
            f"{_mixed_dtypes(owner.model)}"
        ) from error
    finally:
        owner.model.train(training)
        owner.limits.forget_previous_text()
    if not worst <= TOLERANCE.get(owner.dtype, 0.1):
        raise UnsupportedModelError(
            f"the {owner.role} is of type {kind!r}, which cannot verify a tree: logits under a tree mask differ from "
            f"those of the plain path by {worst:.2g} standard deviations, so mask or positions are not honoured"
        )


def _mixed_dtypes(model: Any) -> str:
    """A hint where that may be why a model fails."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    return f"; its weights are of {' and '.join(dtypes)}; load it with one dtype" if len(dtypes) > 1 else ""


def _example(size: int, room: int) -> tuple[list[int], TokenTree]:
    prefix = [(7 * i + 3) % size for i in range(room)]
    return prefix, TokenTree.from_lists([(11 * i + 5) % size for i in range(5)], [-1, 0, 0, 1, 2])


def _tree_logits(owner: TreeModel, prefix: list[int], tree: TokenTree) -> torch.Tensor:
    session = owner.session(len(prefix) + len(tree))
    session.extend(prefix, logits="none")
    return session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors()).float()


@torch.no_grad()
def tree_logits(owner: TreeModel) -> torch.Tensor:
    """Logits ``[5, V]`` float32 of a small tree, to compare two forwards of one model by."""
    return _tree_logits(owner, *_example(owner.vocabulary, max(1, min(PREFIX, owner.limits.context - 3))))


def same_logits(one: TreeModel, other: TreeModel) -> float:
    """Largest difference of two forwards of one model on a small tree, in standard deviations of the logits."""
    got, want = tree_logits(one), tree_logits(other)
    return float((got - want).abs().max() / want.std().clamp(min=1e-6))
