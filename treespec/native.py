"""The lean forward in C (``kernel.c``), for CPUs: weights read once, in the few bytes they need, and no dispatch.

The file is compiled at first use with the machine's own C compiler (``$CC``, ``cc``, ``gcc`` or ``clang``; a few
seconds, kept in the cache folder). Where there is none, or it cannot, :func:`kernel` is None and everything falls back
to :mod:`treespec.packed`. Threads are torch's own: the same number, and the same OpenMP pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treespec.errors import TreespecError
from treespec.files import cache_dir, read_bytes, write_whole

if TYPE_CHECKING:
    from treespec.cache import TreeCache

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
COLUMNS = 16  # outputs per panel


class _Product(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("columns_in", c_int64),
        ("columns_out", c_int64),
        ("half", c_int64),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down")),
    )


class _Forward(Structure):
    _fields_ = (
        *((n, c_int64) for n in ("layers", "rows", "past", "hidden", "heads", "kv_heads", "dim", "threads")),
        *((n, c_float) for n in ("eps", "scale")),
        ("layer", POINTER(_Layer)),
        *((n, c_void_p) for n in ("norm", "x", "cos", "sin", "mask")),
        *((n, c_void_p) for n in ("keys", "values", "capacity")),
    )


@lru_cache
def kernel() -> Any:
    """The compiled kernel, or None where it cannot be had."""
    try:
        library = ctypes.CDLL(str(_built()))
        library.treespec_forward.argtypes = (POINTER(_Forward),)
        library.treespec_product.argtypes = (POINTER(_Product), c_void_p, c_int64, c_void_p, c_int64, c_int64)
        library.treespec_propose.argtypes = (c_void_p, *[c_int64] * 3, *[c_void_p] * 3, c_int64)
        library.treespec_product.restype = library.treespec_propose.restype = None
    except (OSError, subprocess.SubprocessError, AttributeError, TreespecError):
        return None
    return library


def _built() -> Path:
    """The shared library of this source, compiler and processor; compiled if it is not in the cache folder, whole."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("no C compiler")
    made_of = "\0".join((SOURCE.read_text(), compiler, *FLAGS, _processor()))
    path = cache_dir() / "kernels" / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    note = path.with_suffix(".sha256")
    if not path.is_file() or not note.is_file() or note.read_text("ascii", "replace") != _digest(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda new: _compile(compiler, new))
        write_whole(note, lambda new: new.write_text(_digest(path), "ascii"))
    return path


def _digest(path: Path) -> str:
    """Of a library in the cache: half of one must not be run."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _compile(compiler: str, to: Path) -> None:
    command = [compiler, *FLAGS, "-o", str(to), str(SOURCE), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def _processor() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("flags", "Features"))


def native_propose(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and log-probabilities ``[F, k]`` of the largest of float32 ``[F, V]``; entropies ``[F]`` in nats.

    Equal scores come in the order of their ids; a row with NaN or inf, or nothing finite, has no children and infinite
    entropy.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    token, logp = torch.empty(rows, k, dtype=torch.long), torch.empty(rows, k)
    entropy, threads = torch.empty(rows), torch.get_num_threads()
    pointers = (token.data_ptr(), logp.data_ptr(), entropy.data_ptr())
    kernel().treespec_propose(logits.data_ptr(), rows, size, k, *pointers, threads)
    return token, logp, entropy


class NativeProduct:
    """``x @ weight.T + bias`` with the weight in panels; the same interface as :class:`treespec.packed.Packed`.

    Args:
        weight: ``[out, in]`` on the CPU; a copy is made, in bfloat16 where that changes no number.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out = weight.shape[0]
        weight = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -self.out % COLUMNS))
        panels = weight.unflatten(0, (-1, COLUMNS)).transpose(1, 2)  # [panels, in, 16]
        half = bool((panels.bfloat16() == panels).all())
        if half:
            bits = panels.bfloat16().contiguous().view(torch.int16).int()
            panels = (bits[..., :8] & 0xFFFF) | (bits[..., 8:] << 16)
        else:
            panels = panels.float()
        self._panels = panels.contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.struct = _Product(self._panels.data_ptr(), _pointer(self._bias), weight.shape[1], self.out, half)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to float32 ``[..., out]``."""
        return self._into(x, torch.empty(*x.shape[:-1], self.out), add=False)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to ``residual`` ``[..., out]``."""
        return self._into(x, residual.float().clone(memory_format=torch.contiguous_format), add=True)

    def _into(self, x: Tensor, out: Tensor, add: bool) -> Tensor:
        x = x.float().contiguous()
        rows = x.numel() // x.shape[-1]
        kernel().treespec_product(self.struct, x.data_ptr(), rows, out.data_ptr(), add, torch.get_num_threads())
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass
class LayerWeights:
    """One decoder layer. Products are pairs of ``[out, in]`` and a bias or None.

    Attributes:
        norm1, norm2: ``[H]`` before attention and before the MLP.
        q_norm, k_norm: ``[D]`` per head, or None.
        qkv: all query heads, then keys, then values.
        out: of attention.
        gate, up, down: of the MLP.
    """

    norm1: Tensor
    norm2: Tensor
    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class NativeLayers:
    """A stack of decoder layers.

    Args:
        layers: their weights, copied.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        dim: of a head; a multiple of 8.
        eps: of the norms.
        scale: of the attention scores.
        norm: ``[H]`` of the norm behind the last layer, or None without one.
    """

    def __init__(
        self,
        layers: list[LayerWeights],
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        scale: float,
        norm: Tensor | None,
    ) -> None:
        assert heads % kv_heads == 0 and dim % 8 == 0 and layers[0].gate[0].shape[0] % 8 == 0
        self._kept: list[Any] = []  # whatever the structures point into
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._norm = None if norm is None else self._vector(norm)
        self.heads, self.kv_heads, self.dim, self.eps, self.scale = heads, kv_heads, dim, eps, scale
        self._like = torch.empty(1, kv_heads, 0, dim)  # what the cache holds

    def _layer(self, weights: LayerWeights) -> _Layer:
        vectors = (weights.norm1, weights.norm2, weights.q_norm, weights.k_norm)
        (gate, gate_bias), (up, up_bias) = weights.gate, weights.up
        bias = None if gate_bias is None or up_bias is None else _interleaved(gate_bias, up_bias)
        gated = (_interleaved(gate, up), bias)
        products = [NativeProduct(*pair) for pair in (weights.qkv, weights.out, gated, weights.down)]
        self._kept += products
        return _Layer(*map(self._vector, vectors), *(p.struct for p in products))

    def _vector(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self._kept.append(tensor := tensor.detach().float().contiguous())
        return _pointer(tensor)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: TreeCache | None) -> Tensor:
        """``[n, H]`` in and out, float32.

        Args:
            x: the layers' input.
            cos: ``[n, D]`` of the rotary angles.
            sin: ``[n, D]``.
            mask: additive, n x m entries over all m cached rows after this call, or None: rows that follow each other.
            cache: grows by n rows, float32; None reads these rows alone.

        Raises:
            MemoryError: if the scratch memory of one forward cannot be had.
        """
        rows, hidden = x.shape
        if cache is None:
            from treespec.cache import TreeCache  # with transformers, which replays do without

            cache = TreeCache(["full"] * len(self._layers), rows)
        past, count = cache.length, len(self._layers)
        buffers = [layer.claim(rows, self._like, self._like) for layer in cache.layers]
        keys = (c_void_p * count)(*(k.data_ptr() for k, _ in buffers))
        values = (c_void_p * count)(*(v.data_ptr() for _, v in buffers))
        capacity = (c_int64 * count)(*(k.shape[2] for k, _ in buffers))
        x = x.to(torch.float32, copy=True).contiguous()
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        mask = None if mask is None else mask.float().contiguous()
        failed = kernel().treespec_forward(
            _Forward(
                count, rows, past, hidden, self.heads, self.kv_heads, self.dim, torch.get_num_threads(),
                self.eps, self.scale, self._layers, self._norm, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                _pointer(mask), *(ctypes.cast(a, c_void_p) for a in (keys, values, capacity)),
            )
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no room for the activations of {rows} rows over {past} cached ones")
        return x


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Panels of 8 gates and the 8 ups that they open."""
    return torch.stack([gate.detach().unflatten(0, (-1, 8)), up.detach().unflatten(0, (-1, 8))], 1).flatten(0, 2)
