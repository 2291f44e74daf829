"""Linear layers whose weight oneDNN has packed once, for CPUs.

``F.linear`` on a few rows is bound by its kernel, not by memory: the second row costs almost a second forward. With a
weight reordered once into oneDNN's blocked layout a handful of rows cost what one costs (docs/LOG.md has figures).
The operators are private to torch, so everything here is guarded: where they are missing or differ, the plain layer
stays.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS_HINT = 16  # rows the layout is made for; one layout serves all counts


def can_pack(weight: Tensor) -> bool:
    """Whether this weight can be packed here: a float32 or bfloat16 matrix on a CPU that has the kernel."""
    return (
        weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.dtype in (torch.float32, torch.bfloat16)
        and type(weight.data) is Tensor  # no DTensor, no quantised subclass
        and _kernel_exists(weight.dtype)
    )


@lru_cache
def _kernel_exists(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have the operators; half precision needs instructions that many lack."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.eye(8, dtype=dtype), ROWS_HINT)
        x = torch.ones(2, 8, dtype=dtype)
        out = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        both = torch.ops.mkldnn._linear_pointwise.binary(x, out, weight, None, "add")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.equal(out, x) and torch.equal(both, 2 * x))


class Packed:
    """``x @ weight.T + bias`` with a packed copy of the weight.

    Args:
        weight: ``[out, in]``; not kept.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out = weight.shape[0]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to ``residual`` ``[..., out]``, in one kernel."""
        flat, other = x.reshape(-1, x.shape[-1]), residual.reshape(-1, self.out)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(flat, other, self.weight, self.bias, "add")
        return out.view(residual.shape)


class Plain:
    """The same interface over ``F.linear``, for devices and dtypes that cannot be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to ``residual``."""
        return residual + F.linear(x, self.weight, self.bias)


def packed_if_possible(weight: Tensor, bias: Tensor | None = None) -> Packed | Plain:
    """A packed product where that is possible, a plain one elsewhere."""
    return Packed(weight, bias) if can_pack(weight) else Plain(weight, bias)


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` that computes with a packed copy; its own weight stays, so it can be undone."""

    packed: Packed
    _made_of: tuple[Any, ...]
    _original: tuple[nn.Linear]

    @classmethod
    def around(cls, module: nn.Linear) -> PackedLinear:
        """Share the module's parameters."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = module.in_features, module.out_features
        new.weight, new.bias = module.weight, module.bias
        new.packed = Packed(module.weight, module.bias)
        new._made_of = _state(module.weight)
        new._original = (module,)  # in a tuple, so that it is no submodule
        new.train(module.training)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``; from the plain weight where that has changed since it was packed."""
        if x.dtype == self.weight.dtype and self._made_of == _state(self.weight):
            return self.packed(x)
        return F.linear(x, self.weight, self.bias)

    def plain(self) -> nn.Linear:
        """The layer that was replaced, with the parameters that this one has now."""
        old: nn.Linear = self._original[0]
        old.weight, old.bias = self.weight, self.bias
        return old.train(self.training)


def _state(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), version(weight), weight.dtype, weight.device


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def pack_linears(model: nn.Module) -> int:
    """Swap every ``nn.Linear`` that can be packed, in place; returns how many were."""
    return _swap(model, lambda m: PackedLinear.around(m) if type(m) is nn.Linear and can_pack(m.weight) else None)


def unpack_linears(model: nn.Module) -> int:
    """Undo :func:`pack_linears`; returns how many layers were swapped back."""
    return _swap(model, lambda m: m.plain() if isinstance(m, PackedLinear) else None)


def _swap(model: nn.Module, replace: Any) -> int:
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if getattr(child, "_hf_hook", None) is not None or child._forward_hooks or child._forward_pre_hooks:
                continue  # accelerate moves this layer's weights about, or somebody listens to it
            if (new := replace(child)) is not None:
                setattr(parent, name, new)
                count += 1
    return count
