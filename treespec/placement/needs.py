"""What a model needs, from its config alone: bytes of weights by part and dtype, of cache, of work space.

The model is built on the meta device (accelerate's ``init_empty_weights``), so every architecture that transformers
knows counts its own parameters; no weight is read and no GPU is asked. A forward on the meta device through treespec's
own cache says how many bytes a cached token takes in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from treespec.cache import GROWTH, TreeCache
from treespec.errors import TreespecError, UnsupportedModelError
from treespec.placement.configs import config_and_model, reason
from treespec.placement.precision import Precision
from treespec.selfcheck import layer_kinds

REPLICATED = ("replicated", "sequence_parallel", "activation")  # tensor-parallel styles that shard no weight


@dataclass(frozen=True)
class Part:
    """What a device map places as a whole: a decoder layer, an embedding, a norm, the output head.

    Attributes:
        name: its module (or parameter) in the model.
        parameters: how many numbers are its own.
        weight_bytes: of them, and of its buffers.
        cache_bytes: of one cached token.
        sharded_bytes: of the weights, what tensor parallelism divides among the processes.
        tied_to: the part whose weight it uses, or "".
        by_dtype: weight bytes by dtype.
    """

    name: str
    parameters: int
    weight_bytes: float
    cache_bytes: float = 0.0
    sharded_bytes: float = 0.0
    tied_to: str = ""
    by_dtype: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Needs:
    """A model as a plan sees it.

    Attributes:
        name: as it was asked for.
        kind: ``"model"``, ``"head"`` (a feature head beside the target) or ``"none"`` (n-grams, or nothing).
        dtype: the precision of most weights.
        parts: in the order of the forward.
        layers: how many of the parts are decoder layers.
        sizes: ``hidden``, ``intermediate``, ``heads``, ``kv_heads``, ``head_dim``, ``vocabulary``.
        compute_bytes: of one number in activations, masks and the cache.
        eager: attention writes out all its scores, in the prompt's forward too.
    """

    name: str
    kind: str = "model"
    dtype: str = "bfloat16"
    parts: tuple[Part, ...] = ()
    layers: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    compute_bytes: int = 2
    eager: bool = False

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(part.parameters for part in self.parts)

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def by_dtype(self) -> dict[str, float]:
        """Weight bytes by dtype."""
        total: dict[str, float] = {}
        for part in self.parts:
            for kind, size in part.by_dtype:
                total[kind] = total.get(kind, 0.0) + size
        return total

    @property
    def cache_bytes(self) -> float:
        """Of one cached token in all layers."""
        return sum(part.cache_bytes for part in self.parts)

    @property
    def head(self) -> str:
        """The part that gives the logits."""
        return self.parts[-1].name if self.parts else ""

    def cache(self, tokens: float) -> float:
        """Bytes of a cache of so many tokens; buffers come in steps of :data:`treespec.cache.GROWTH` rows."""
        return self.cache_bytes * -(-tokens // GROWTH) * GROWTH

    def activations(self, rows: float, nodes: float, cached: float) -> float:
        """Bytes that one layer's forward works in, the largest of the prompt's and a tree's.

        Args:
            rows: tokens of the prompt's forward, all prompts together.
            nodes: of the trees, roots included.
            cached: tokens that a tree attends to.
        """
        if not self.sizes:
            return 0.0
        s, width = self.sizes, self.compute_bytes
        inner = s["heads"] * s["head_dim"]
        per_row = width * (4 * s["hidden"] + 3 * inner + 3 * s["intermediate"])
        repeated = 2 * width * cached * inner  # keys and values, one copy per query head
        scores = 4 * s["heads"] * nodes * cached
        prompt = rows * per_row + (4 * s["heads"] * rows * cached if self.eager else 0.0)
        tree = nodes * per_row + repeated + scores + nodes * cached * width
        return max(prompt, tree)

    def logits(self, nodes: float) -> float:
        """Bytes of the logits of a tree, as they come and in float32."""
        return nodes * self.sizes.get("vocabulary", 0) * (self.compute_bytes + 4)


def model_needs(name: str, dtype: str, quantization: Any = None) -> Needs:
    """The needs of a causal language model.

    Args:
        name: ``"smollm2"``, a shape of ``data/configs``, a ``config.json``, a local folder or a hub id.
        dtype: see :class:`treespec.placement.precision.Precision`.
        quantization: a transformers quantisation config to be applied while loading, or None.

    Raises:
        InputError: if there is no such model or dtype.
        UnsupportedModelError: if it is no decoder-only language model.
    """
    config, model = config_and_model(name)
    try:
        return _needs(name, config, model, dtype, quantization)
    except TreespecError:
        raise
    except Exception as error:  # arithmetic on whatever sizes the config gives
        raise UnsupportedModelError(f"the config of {name!r} does not add up to a model: {reason(error)}") from None


def _needs(name: str, config: Any, model: Any, dtype: str, quantization: Any = None) -> Needs:
    text = config.get_text_config(decoder=True)
    precision = Precision.of(config, dtype, quantization)
    blocks = _blocks(model, text)
    cache = [precision.compute_bytes * numbers for numbers in _cache_numbers(model, text, len(blocks))]
    parts = tuple(_parts(model, blocks, cache, precision))
    heads = int(getattr(text, "num_attention_heads", 1))
    hidden = int(text.hidden_size)
    sizes = {
        "hidden": hidden,
        "intermediate": int(getattr(text, "intermediate_size", None) or 4 * hidden),
        "heads": heads,
        "kv_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or hidden // heads),
        "vocabulary": int(text.vocab_size),
    }
    eager = getattr(text, "_attn_implementation", "sdpa") == "eager"
    return Needs(name, "model", precision.name, parts, len(blocks), sizes, precision.compute_bytes, eager)


def _blocks(model: Any, text: Any) -> dict[str, nn.Module]:
    """The decoder layers by name."""
    count = int(text.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{name}.{i}": layer for i, layer in enumerate(module)}
    raise UnsupportedModelError(f"cannot find the {count} decoder layers of a model of type {text.model_type!r}")


# numbers in one cached token by layer, of models asked before: the forward that tells takes a second for a 70B
_CACHED: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()


def _cache_numbers(model: Any, text: Any, layers: int) -> list[float]:
    """Keys and values of one cached token, by layer."""
    if model not in _CACHED:
        _CACHED[model] = [*_asked(model, text, layers), *[0.0] * layers][:layers]
    return _CACHED[model]


@torch.no_grad()
def _asked(model: Any, text: Any, layers: int) -> list[float]:
    cache = TreeCache(layer_kinds(text), GROWTH)
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        model(input_ids=ids, position_ids=ids, cache=cache, use_cache=True)
        return [layer.nbytes / GROWTH / 2 for layer in cache.layers]  # the model's own dtype has two bytes
    except (RuntimeError, ValueError, TypeError, NotImplementedError):  # e.g. experts have no kernel there
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return [2.0 * heads * size] * layers


def _parts(model: Any, blocks: dict[str, nn.Module], cache: list[float], precision: Precision) -> Iterator[Part]:
    """Every tensor of the model in exactly one part; the head comes last, as in the forward."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, tensor in _tensors(model):
        block = next((b for b in blocks if name.startswith(b + ".")), None)
        groups.setdefault(block or _module_of(name, blocks), []).append((name, tensor))
    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    per_token = dict(zip(blocks, cache))
    plan = getattr(model, "tp_plan", None) or {}
    for name in sorted(groups, key=lambda n: n == head):  # stable: all others keep their order
        if name != head or not tied:
            yield _part(name, groups[name], per_token.get(name, 0.0), precision, plan, model)
    if tied:
        rest = [(n, t) for n, t in groups.get(head, []) if t is not model.get_input_embeddings().weight]
        yield _part(head, rest, 0.0, precision, plan, model, tied_to=embedding)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _module_of(name: str, blocks: dict[str, nn.Module]) -> str:
    """The module that holds a tensor, or the tensor itself where that module also holds the layers."""
    module = name.rpartition(".")[0]
    holds_layers = not module or next(iter(blocks)).startswith(module + ".")
    return name if holds_layers else module


def _part(
    name: str,
    tensors: list[tuple[str, Any]],
    cache: float,
    precision: Precision,
    plan: dict[str, str],
    model: Any,
    tied_to: str = "",
) -> Part:
    parameters, total, sharded = 0, 0.0, 0.0
    by_dtype: dict[str, float] = {}
    for full, tensor in tensors:
        kind, size = precision.of_tensor(full, tensor, model)
        parameters += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        total += size
        by_dtype[kind] = by_dtype.get(kind, 0.0) + size
        sharded += size if _is_sharded(full, plan) else 0.0
    return Part(name, parameters, total, cache, sharded, tied_to, tuple(by_dtype.items()))


def _is_sharded(name: str, plan: dict[str, str]) -> bool:
    """Whether a tensor-parallel plan divides this tensor."""
    generic = ".".join("*" if piece.isdigit() else piece for piece in name.split("."))
    style = plan.get(generic) or plan.get(generic.rpartition(".")[0], "")
    return bool(style) and not style.startswith(REPLICATED)


@lru_cache(maxsize=16)
def head_needs(folder: str, dtype: str) -> Needs:
    """The needs of a feature head; its embedding is the target's own tensor, its output matrix a copy of some rows.

    Raises:
        InputError: if the folder holds none.
    """
    from treespec.head import FeatureHead, HeadConfig

    shape = HeadConfig.read(folder)
    precision = Precision.named(dtype)
    with torch.device("meta"):
        rows = torch.empty(shape.vocabulary, shape.hidden_size)
        chosen = torch.zeros(shape.draft_vocabulary, dtype=torch.long)
        head = FeatureHead(shape, rows, rows, chosen, torch.empty(shape.hidden_size))
    width = precision.compute_bytes
    count = sum(p.numel() for p in head.parameters())
    size = float(width * (count + prod(head.output.shape)))
    cache = 2.0 * shape.kv_heads * shape.head_dim * width
    part = Part("head", count, size, cache, by_dtype=((precision.name, size),))
    sizes = {
        "hidden": shape.hidden_size,
        "intermediate": shape.intermediate_size,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocabulary": shape.draft_vocabulary,
    }
    return Needs(folder, "head", precision.name, (part,), 1, sizes, width)
