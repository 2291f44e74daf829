"""A lean forward for Llama-shaped models: the same weights, without what is not arithmetic.

RMSNorm, rotary positions, grouped-query attention, gated MLP, one after the other: Llama, SmolLM, Mistral, Qwen2,
Qwen3. q/k/v and gate/up are fused into one product each, residuals are added inside the products, attention reads the
grouped heads without copying them. On a CPU the products are packed (:mod:`treespec.packed`), or the whole of it is the
C kernel of :mod:`treespec.native`. transformers' own modules compute the rotary angles, so every rope kind is theirs.

It is used only where :func:`treespec.selfcheck.same_logits` found the logits equal to the model's own, and no longer
than the model's weights are what they were.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from treespec.native import LayerWeights, NativeLayers, NativeProduct, kernel
from treespec.packed import Packed, Plain, packed_if_possible, version

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")

# lean forwards in use, by model; holds no model alive
_IN_USE: WeakKeyDictionary[Any, LeanForward | NativeForward] = WeakKeyDictionary()


def lean_forward(model: Any) -> LeanForward | NativeForward | None:
    """The lean forward in use for a model, if there is one and the model has not been moved or cast since."""
    lean = _IN_USE.get(model)
    return lean if lean is not None and lean.fits(model) else None


def use_lean(model: Any, lean: LeanForward | NativeForward | None) -> None:
    """Use a lean forward for a model from now on, or (None) its own again."""
    if lean is None:
        _IN_USE.pop(model, None)
    else:
        _IN_USE[model] = lean


def why_not_lean(model: Any) -> str | None:
    """Why this model has no lean forward, or None if it may have one."""
    config = model.config
    if config.model_type not in LLAMA_SHAPED:
        return f"its type {config.model_type!r} is not one of {', '.join(LLAMA_SHAPED)}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (config.model_type == "mistral" and config.sliding_window):
        return "it has sliding-window layers"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act!r}, not silu"
    if hasattr(model, "hf_device_map") and len(set(model.hf_device_map.values())) > 1:
        return "it is spread over several devices"
    if any(getattr(m, "_hf_hook", None) is not None for m in model.modules()):
        return "accelerate moves its weights about"
    if any(type(p.data) is not Tensor for p in model.parameters()):
        return "its weights are sharded or quantised"
    if len({(p.device, p.dtype) for p in model.parameters()}) > 1:
        return "its weights differ in device or dtype"
    return None


def why_not_native(model: Any) -> str | None:
    """Why the C kernel cannot compute this model, or None if it may."""
    if (why := why_not_lean(model)) is not None:
        return why
    config = model.config
    if {p.device.type for p in model.parameters()} != {"cpu"}:
        return "it is not on the CPU"
    if _head_dim(config) % 8 or config.intermediate_size % 8:
        return "its heads or its MLP are not a multiple of 8 wide"
    return None if kernel() is not None else "there is no C compiler that can build the kernel"


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class _MadeOf:
    """What a forward was copied from, to notice when the model is no longer that."""

    def __init__(self, model: Any) -> None:
        self._made_of = self._state(model)

    def fits(self, model: Any) -> bool:
        """Whether the model's weights are still those it was made of."""
        return self._made_of == self._state(model)

    @staticmethod
    def _state(model: Any) -> list[Any]:
        return [(p.data_ptr(), version(p), p.dtype, p.device) for p in model.parameters()]


class _Layer:
    """One decoder layer's fused weights."""

    def __init__(self, layer: Any, linear: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv: Packed | Plain = linear(*_fused(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = linear(attention.o_proj.weight, attention.o_proj.bias)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.gate_up: Packed | Plain = linear(*_fused(mlp.gate_proj, mlp.up_proj))
        self.down = linear(mlp.down_proj.weight, mlp.down_proj.bias)
        self.scale = attention.scaling


def _fused(*modules: Any) -> tuple[Tensor, Tensor | None]:
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([m.bias.detach() for m in modules])
    return torch.cat([m.weight.detach() for m in modules]), bias


class LeanForward(_MadeOf):
    """The forward of one Llama-shaped model.

    Args:
        model: a transformers causal LM for which :func:`why_not_lean` is None. Fused copies of its weights are made;
            once they change it no longer :meth:`fits`.
        pack: pack the products where that is possible.
    """

    def __init__(self, model: Any, pack: bool = True) -> None:
        super().__init__(model)
        config = model.config
        linear = packed_if_possible if pack else Plain
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = _head_dim(config)
        self.eps = config.rms_norm_eps
        self.embedding = model.get_input_embeddings().weight.detach()
        self.rotary = model.model.rotary_emb
        self.layers = [_Layer(layer, linear) for layer in model.model.layers]
        self.norm = model.model.norm
        head = model.get_output_embeddings()
        self.head = linear(head.weight, head.bias)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Normalised last hidden states ``[B, n, H]``, the ones the head reads.

        Args:
            ids: ``[B, n]``.
            positions: ``[B, n]``.
            mask: additive ``[B, 1, n, m]`` over all m cached rows after this call; None for rows that follow each
                other.
            cache: ``cache.layers[i].update(k, v)`` stores ``[B, kv heads, n, D]`` and returns all rows; or None.
        """
        x = F.embedding(ids, self.embedding)
        cos, sin = self.rotary(x, positions)
        cos, sin = cos[:, :, None], sin[:, :, None]  # [B, n, 1, D]
        rows, past = ids.shape[1], 0 if cache is None else cache.length
        if mask is None and rows > 1 and past:
            mask = torch.ones(rows, past + rows, dtype=torch.bool, device=ids.device).tril(past)
        for i, layer in enumerate(self.layers):
            x = self._attention(layer, x, cos, sin, mask, None if cache is None else cache.layers[i])
            gate, up = layer.gate_up(self._normed(x, layer.norm2)).chunk(2, -1)
            x = layer.down.plus(F.silu(gate) * up, x)
        return self._normed(x, self.norm)

    def _attention(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        batch, n, _ = x.shape
        turned = self.heads + self.kv_heads
        qkv = layer.qkv(self._normed(x, layer.norm1)).view(batch, n, turned + self.kv_heads, self.dim)
        qk, v = qkv[:, :, :turned], qkv[:, :, turned:]
        if layer.q_norm is not None:
            q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
            qk = torch.cat([self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)], 2)
        first, second = qk.chunk(2, -1)
        qk = qk * cos + torch.cat([-second, first], -1) * sin
        q, k, v = qk[:, :, : self.heads].transpose(1, 2), qk[:, :, self.heads :].transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and n > 1,
            scale=layer.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        return layer.out.plus(out.transpose(1, 2).reshape(batch, n, -1), x)

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., V]``."""
        return self.head(hidden)


class NativeForward(_MadeOf):
    """The same forward through the C kernel, float32 inside whatever the weights' dtype; texts one at a time.

    Args:
        model: a transformers causal LM for which :func:`why_not_native` is None. Its weights are copied, in half their
            bytes where that changes none of them.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config, attention = model.config, model.model.layers[0].self_attn
        self.embedding = model.get_input_embeddings().weight.detach()
        self.rotary = model.model.rotary_emb
        self.layers = NativeLayers(
            [_weights(layer) for layer in model.model.layers],
            config.num_attention_heads,
            config.num_key_value_heads,
            _head_dim(config),
            config.rms_norm_eps,
            attention.scaling,
            model.model.norm.weight,
        )
        head = model.get_output_embeddings()
        self.head = NativeProduct(head.weight, head.bias)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """See :meth:`LeanForward.hidden`; B is 1."""
        x = F.embedding(ids, self.embedding).float()
        cos, sin = self.rotary(x, positions)
        return self.layers.run(x[0], cos[0], sin[0], mask, cache)[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to float32 ``[..., V]``."""
        return self.head(hidden)


def _weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    pairs = {
        name: (m.weight, m.bias) for name, m in (("gate", mlp.gate_proj), ("up", mlp.up_proj), ("down", mlp.down_proj))
    }
    return LayerWeights(
        norm1=layer.input_layernorm.weight,
        norm2=layer.post_attention_layernorm.weight,
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        out=(attention.o_proj.weight, attention.o_proj.bias),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        **pairs,
    )
