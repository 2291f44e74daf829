"""What a forward must cost at least on named hardware: bytes over bandwidth, arithmetic over peak, and latencies.

The model of one forward over ``batch`` trees of n nodes, each behind ``context`` cached tokens:

    read    = (weights + batch * context * 2 * layers * kv_heads * head_dim * kv_bytes) / (count * bandwidth * share)
    compute = 2 * parameters * batch * n / (count * peak * share)
    seconds = max(read, compute) + layers * launch + (2 * layers * all_reduce where count > 1)

``overlap=False`` adds read and compute instead: an unfused implementation. The draft runs on one GPU. Left out: the
arithmetic of attention itself (4 % of a 70B's at 2,048 tokens), the payload of all-reduces, kernel tiles. So it is a
floor with guessed efficiencies, not a measurement; ``treespec measure`` is the measurement.

GPUs and model shapes are in ``data/costs/gpus.json`` and ``data/costs/models.json``, each number with its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError
from treespec.files import read_json
from treespec.placement.devices import MOST, Device
from treespec.prompts import data_dir

if TYPE_CHECKING:
    from treespec.placement.needs import Needs

NAME = re.compile(r"(?P<gpu>\w+?)(x(?P<count>\d{1,2}))?:(?P<model>[\w.]+)(\+(?P<draft>[\w.]+))?(@(?P<dtype>\w+))?")
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # of a weight; arithmetic stays 16-bit


@dataclass(frozen=True)
class Gpu:
    """A datasheet: bytes per second, dense 16-bit FLOP per second, bytes of memory."""

    name: str
    bandwidth: float
    flops: float
    memory: float
    source: str


@dataclass(frozen=True)
class Shape:
    """A model as a roofline sees it: parameters, layers, KV heads, size of a head; ``draft`` names its usual draft."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    draft: str
    source: str

    def needs(self, weight_bytes: float, kv_bytes: float) -> Needs:
        """As a plan sees it: weights that tensor parallelism divides, and bytes of a cached token."""
        from treespec.placement.needs import Needs, Part  # with transformers; measured curves need none of it

        size, cache = self.parameters * weight_bytes, 2 * self.layers * self.kv_heads * self.head_dim * kv_bytes
        part = Part(self.name, int(self.parameters), size, cache, sharded_bytes=size)
        return Needs(self.name, parts=(part,), layers=self.layers)

    def forward(self, weight_bytes: float, kv_bytes: float, rows: float, cached: float) -> tuple[float, float]:
        """Bytes read and FLOP of a forward over ``rows`` tokens with ``cached`` tokens' keys and values."""
        needs = self.needs(weight_bytes, kv_bytes)
        return needs.weight_bytes + cached * needs.cache_bytes, 2 * self.parameters * rows


@dataclass(frozen=True)
class Roofline:
    """A :class:`treespec.cost.CostModel` from datasheets (see the module's docstring for the formula).

    Args:
        gpu: what the target runs on.
        target: its shape.
        drafter: the draft's shape; it runs on one of the GPUs.
        count: GPUs, tensor parallel.
        weight_bytes: of one weight, both models.
        kv_bytes: of one number in the KV cache.
        context: cached tokens where a call names none.
        bandwidth_share: of the datasheet's bandwidth that weights are read at.
        compute_share: of the datasheet's peak that products run at.
        overlap: whether reading and arithmetic run at the same time.
        launch: seconds of latency per layer (kernel launches in a CUDA graph, norms, dispatch).
        all_reduce: seconds of latency of one all-reduce; two a layer with more than one GPU.
        overhead: seconds per step outside both models' forwards.
        name: as on the command line.
    """

    gpu: Gpu
    target: Shape
    drafter: Shape
    count: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    context: float = 512.0
    bandwidth_share: float = 0.8
    compute_share: float = 0.7
    overlap: bool = True
    launch: float = 5e-6
    all_reduce: float = 15e-6
    overhead: float = 0.0
    name: str = "roofline"

    def __post_init__(self) -> None:
        if self._fits(self.count, 1, self.context, 1):
            return
        least = next((n for n in range(1, MOST + 1) if self._fits(n, 1, self.context, 1)), None)
        way = f"use at least {least}, or a narrower" if least else "use a larger GPU, or a narrower"
        raise InputError(
            f"{self.target.name} with its draft {self.drafter.name} and {self.context:,.0f} cached tokens do not fit "
            f"{self.count} × {self.gpu.name}; {way} dtype such as @fp8"
        )

    def _fits(self, count: int, n: int, context: float, batch: int) -> bool:
        """Whether ``count`` GPUs hold both models and their caches, as :func:`treespec.plan` counts them."""
        from treespec.placement.layout import Load
        from treespec.placement.plan import divided

        target, draft = (shape.needs(self.weight_bytes, self.kv_bytes) for shape in (self.target, self.drafter))
        gpus = [Device(f"cuda:{i}", self.gpu.memory) for i in range(count)]
        rows = divided(target, draft, gpus, Load(max(round(context), 1), batch, n - 1))
        return all(row.free >= 0 for row in rows)

    def __str__(self) -> str:
        return self.name

    @property
    def provenance(self) -> str:
        """Where the numbers are from."""
        return f"roofline, not measured: {self.gpu.source}; {self.target.source}"

    def verify(self, n: int, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one target forward over ``batch`` trees of ``n`` nodes, the roots included."""
        return self._seconds(self.target, n, context, batch, self.count)

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes; 0 for none."""
        return self._seconds(self.drafter, w, None, 1, 1) if w > 0 else 0.0

    def extrapolates(self, n: int, context: float | None = None, batch: int = 1) -> bool:
        """True where the caches of so many texts do not fit the GPUs: the formula goes on, the hardware does not."""
        return not self._fits(self.count, max(n, 1), self.context if context is None else context, batch)

    def _seconds(self, model: Shape, n: int, context: float | None, batch: int, count: int) -> float:
        cached = batch * (self.context if context is None else context)
        size, work = model.forward(self.weight_bytes, self.kv_bytes, batch * n, cached)
        read = size / (count * self.gpu.bandwidth * self.bandwidth_share)
        compute = work / (count * self.gpu.flops * self.compute_share)
        busy = max(read, compute) if self.overlap else read + compute
        return busy + model.layers * (self.launch + (2 * self.all_reduce if count > 1 else 0.0))


def load_roofline(name: str) -> Roofline:
    """``GPU[xCOUNT]:MODEL[+DRAFT][@DTYPE]``, such as ``a100x4:70b``, ``h100:8b+1b`` or ``rtx4090:8b@int4``.

    Raises:
        InputError: for another form, an unknown GPU, model or dtype, or weights that do not fit.
    """
    found = NAME.fullmatch(name.strip().lower())
    if found is None:
        raise InputError(f"{name!r} is no hardware: expected GPU[xCOUNT]:MODEL[+DRAFT][@DTYPE], such as a100x4:70b")
    gpus, models = _table("gpus"), _table("models")
    target = models[_known(found["model"], models, "model")]
    drafter = models[_known(found["draft"] or target["draft"], models, "draft")]
    gpu = gpus[_known(found["gpu"], gpus, "GPU")]
    dtype = _known(found["dtype"] or "bf16", BYTES, "dtype")
    count = int(found["count"] or 1)
    if not 1 <= count <= MOST:
        raise InputError(f"a tensor-parallel target runs on 1 to {MOST} GPUs; got {count}")
    return Roofline(Gpu(**gpu), Shape(**target), Shape(**drafter), count, BYTES[dtype], name=name.strip())


def known_hardware() -> tuple[list[str], list[str]]:
    """Names of the GPUs and of the models that :func:`load_roofline` knows."""
    return list(_table("gpus")), list(_table("models"))


def _table(name: str) -> dict[str, Any]:
    return read_json(data_dir() / "costs" / f"{name}.json")


def _known(word: str, among: dict[str, Any], what: str) -> str:
    if word not in among:
        raise InputError(f"unknown {what} {word!r} in a roofline; known: {', '.join(among)}")
    return word
