"""Bytes of a weight in each dtype and quantisation.

Quantised methods leave the embedding, the output head, norms and biases in 16 bits and keep scales beside the narrow
numbers: bitsandbytes one float32 per block of 64 for 4 bits (an eighth of that with double quantisation), GPTQ and AWQ
a float16 and a narrow zero per group, 8-bit and fp8 methods one float32 per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treespec.errors import InputError

FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
NARROW = {"int8": 8.0, "int4": 4.0}
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "nf4": "int4"}
BLOCK_4BIT, DOUBLE_BITS = 64, 0.127  # bitsandbytes: weights per scale; bits a weight for doubly quantised scales


def dtype_name(dtype: str) -> str:
    """The full name of a dtype.

    Raises:
        InputError: for an unknown one.
    """
    found = ALIASES.get(dtype, dtype)
    if found not in FLOATS and found not in NARROW:
        raise InputError(f"unknown dtype {dtype!r}; known: {', '.join([*FLOATS, *NARROW])}")
    return found


@dataclass(frozen=True)
class Precision:
    """How a model's weights are kept.

    Attributes:
        name: of most weights.
        compute_bytes: of a number that is computed with: activations, cache, whatever is not quantised.
        bits: of a quantised weight, scales left out; 0 where nothing is quantised.
        scale_bits: a weight's share of the scales; 0 means one float32 per row.
        kept: words in the names of modules that are not quantised.
    """

    name: str
    compute_bytes: int
    bits: float = 0.0
    scale_bits: float = 0.0
    kept: tuple[str, ...] = ()

    @classmethod
    def named(cls, dtype: str) -> Precision:
        """Of a dtype's name; narrow ones as bitsandbytes keeps them, computing in 16 bits."""
        name = dtype_name(dtype)
        if name in FLOATS:
            return cls(name, FLOATS[name])
        return cls(name, 2, NARROW[name], 32 / BLOCK_4BIT if name == "int4" else 0.0)

    @classmethod
    def of(cls, config: Any, dtype: str, quantization: Any = None) -> Precision:
        """Of a checkpoint: quantised as ``quantization`` or its config says, else ``dtype``.

        Args:
            config: of the model.
            dtype: a name.
            quantization: a transformers quantisation config that is to be applied while loading, or None.

        Raises:
            InputError: for a quantisation whose bytes are not known here.
        """
        asked = cls.named(dtype)
        quantised = quantization or getattr(config, "quantization_config", None)
        if not quantised:
            return asked
        said = quantised if isinstance(quantised, dict) else quantised.to_dict()
        method = str(said.get("quant_method", "")).rpartition(".")[2].lower()
        kept = tuple(said.get("modules_to_not_convert") or said.get("llm_int8_skip_modules") or ())
        width = FLOATS.get(asked.name, 2)
        if method.startswith("bitsandbytes") or "load_in_4bit" in said:
            if not said.get("load_in_4bit"):
                return cls("bitsandbytes int8", width, 8.0, 0.0, kept)
            share = DOUBLE_BITS if said.get("bnb_4bit_use_double_quant") else 32 / BLOCK_4BIT
            return cls("bitsandbytes 4 bits", width, 4.0, share, kept)
        if method in ("gptq", "awq", "auto-round"):
            bits, group = float(said.get("bits") or said.get("w_bit") or 4), int(said.get("group_size", 128))
            return cls(f"{method} {bits:.0f} bits", width, bits, (16 + bits) / group if group > 0 else 0.0, kept)
        if method == "torchao":
            return cls._torchao(str(said.get("quant_type", "")), width, kept)
        if method in ("fp8", "fbgemm_fp8"):
            return cls("fp8", width, 8.0, 0.0, kept)
        if method == "mxfp4":
            return cls("mxfp4", width, 4.0, 8 / 32, kept)
        raise InputError(
            f"the bytes of quantisation {method or 'unknown'!r} are not known here; plan with --dtype int8 or int4 and "
            "a config without quantization_config"
        )

    @classmethod
    def _torchao(cls, kind: str, width: int, kept: tuple[str, ...]) -> Precision:
        """Of a torchao config, by the name of its kind; its 4-bit weights have a scale and a zero per 128."""
        if "int4" in kind.lower():
            return cls("torchao int4", width, 4.0, 32 / 128, kept)
        if "int8" in kind.lower() or "float8" in kind.lower():
            return cls("torchao 8 bits", width, 8.0, 0.0, kept)
        raise InputError(
            f"the bytes of torchao's {kind[:60] or 'unknown kind'!r} are not known here; give a device map"
        )

    def of_tensor(self, name: str, tensor: Any, model: Any) -> tuple[str, float]:
        """Dtype and bytes of one parameter or buffer of a meta model."""
        if not tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch."), float(tensor.numel() * tensor.element_size())
        if not isinstance(tensor, nn.Parameter):  # rotary frequencies and the like stay as they are
            width = 4 if tensor.dtype == torch.float32 else self.compute_bytes
            return {4: "float32"}.get(width, self._plain), float(tensor.numel() * width)
        if not self.bits or not self._is_quantised(name, tensor, model):
            return self._plain, float(tensor.numel() * self.compute_bytes)
        scales = tensor.numel() * self.scale_bits / 8 if self.scale_bits else 4 * tensor.shape[0]
        return self.name, tensor.numel() * self.bits / 8 + scales

    @property
    def _plain(self) -> str:
        return self.name if self.name in FLOATS else {2: "16 bits", 4: "float32"}[self.compute_bytes]

    def _is_quantised(self, name: str, tensor: Any, model: Any) -> bool:
        if tensor.dim() < 2 or any(word in name for word in self.kept):
            return False
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        return not any(tensor is weight for weight in ends)
