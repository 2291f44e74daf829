"""A plan: what lies on each device, whether it fits, and how it reads as JSON, text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treespec.errors import InputError
from treespec.placement.devices import Device
from treespec.placement.needs import Needs

ASSUMED = (
    "assumed, not measured: 0.8 GB and 2 % of each GPU for the CUDA context and the allocator, 10 % of main memory for "
    "everything else; work space is a bound from the shapes"
)


@dataclass(frozen=True)
class Load:
    """What is to be decoded: most cached tokens per text, texts at once, candidates of a tree."""

    context: int = 2048
    batch: int = 1
    budget: int = 48

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("batch", 1), ("budget", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 24:
                raise InputError(f"{name} must be a whole number from {least} to {1 << 24:,}; got {value!r}")

    @property
    def rows(self) -> int:
        """Tokens of the prompts' forward."""
        return self.batch * self.context

    @property
    def nodes(self) -> int:
        """Of the trees, roots included."""
        return self.batch * (1 + self.budget)

    @property
    def cached(self) -> int:
        """Tokens in the cache while trees are under work."""
        return self.batch * (self.context + 1 + self.budget)

    def cache(self, needs: Needs, share: float = 1.0) -> float:
        """Bytes of a model's cache."""
        return self.batch * needs.cache(self.context + 1 + self.budget) * share

    def work(self, needs: Needs) -> float:
        """Bytes that one layer's largest forward works in."""
        return needs.activations(self.rows, self.nodes, self.cached)

    def beside(self, draft: Needs) -> float:
        """Bytes of a draft: weights, cache, work space and logits; all on one device."""
        if draft.kind == "none":
            return 0.0
        return draft.weight_bytes + self.cache(draft) + self.work(draft) + draft.logits(self.nodes)


@dataclass
class DevicePlan:
    """What lies on one device, in bytes.

    Attributes:
        device: the device.
        parts: of the target.
        weights, cache, workspace: the target's.
        draft: weights, cache and work space of the draft.
        held: cache that lies here for layers whose weights are on the CPU or the disk; part of ``cache``.
        share: of each part's weights that lie here; below 1 with tensor parallelism.
    """

    device: Device
    parts: list[str] = field(default_factory=list)
    weights: float = 0.0
    cache: float = 0.0
    workspace: float = 0.0
    draft: float = 0.0
    held: float = 0.0
    share: float = 1.0

    @property
    def used(self) -> float:
        """All of it, the reserve included."""
        return self.weights + self.cache + self.workspace + self.draft + self.device.reserve

    @property
    def free(self) -> float:
        """What is left; negative where it does not fit."""
        return self.device.memory - self.used

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, None for a disk's."""
        known = self.device.memory != float("inf")
        return {
            "name": self.device.name,
            "label": self.device.label,
            "memory_bytes": round(self.device.memory) if known else None,
            "weight_bytes": round(self.weights),
            "cache_bytes": round(self.cache),
            "workspace_bytes": round(self.workspace),
            "draft_bytes": round(self.draft),
            "reserve_bytes": round(self.device.reserve),
            "free_bytes": round(self.free) if known else None,
            "parts": span(self.parts),
            "layers": sum(p.rpartition(".")[2].isdigit() for p in self.parts),
            "share": self.share,
        }


@dataclass
class PlacementPlan:
    """Where a target and its draft go. Draws itself in a notebook.

    Attributes:
        target, draft: what they need.
        load: context, batch and budget.
        devices: what lies where.
        device_map: of the target, as transformers and accelerate take it; empty with tensor parallelism.
        draft_device: name of the draft's device, "" without a draft model.
        tensor_parallel: every layer divided among the GPUs, instead of layers in sequence.
        fits: whether everything lies on the devices given.
        verdict: one sentence.
        short_bytes: that each GPU lacks; 0 where it fits.
        remedies: what would make it fit, each tried.
    """

    target: Needs
    draft: Needs
    load: Load
    devices: list[DevicePlan]
    device_map: dict[str, int | str]
    draft_device: str = ""
    tensor_parallel: bool = False
    fits: bool = True
    verdict: str = ""
    short_bytes: float = 0.0
    remedies: list[str] = field(default_factory=list)

    @property
    def offloaded(self) -> list[str]:
        """Parts of the target on the CPU or the disk that a GPU computes."""
        if not any(d.device.is_gpu for d in self.devices):
            return []
        return [part for d in self.devices if not d.device.is_gpu for part in d.parts]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "short_bytes": round(self.short_bytes),
            "remedies": self.remedies,
            "target": _about(self.target, self.load),
            "draft": _about(self.draft, self.load),
            "devices": [d.as_dict() for d in self.devices],
            "device_map": self.device_map,
            "draft_device": self.draft_device,
            "tensor_parallel": self.tensor_parallel,
            "context": self.load.context,
            "batch": self.load.batch,
            "budget": self.load.budget,
            "assumed": ASSUMED,
        }

    def __rich__(self) -> Any:
        from treespec.placement.show import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from treespec.placement.show import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from treespec.placement.show import plan_html

        return plan_html(self)


def _about(needs: Needs, load: Load) -> dict[str, Any]:
    return {
        "name": needs.name,
        "kind": needs.kind,
        "dtype": needs.dtype,
        "parameters": needs.parameters,
        "weight_bytes": round(needs.weight_bytes),
        "weight_bytes_by_dtype": {kind: round(size) for kind, size in needs.by_dtype.items()},
        "cache_bytes": round(load.cache(needs)),
        "cache_bytes_per_token": needs.cache_bytes,
        "workspace_bytes": round(load.work(needs)),
        "logits_bytes": round(needs.logits(load.nodes)),
        "layers": needs.layers,
        "parts": [{"name": p.name, "weight_bytes": round(p.weight_bytes)} for p in needs.parts],
    }


def span(parts: Sequence[str]) -> str:
    """Names of parts, runs of layers drawn together: ``embed_tokens, layers 0–19``."""
    out: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in [*parts, ""]:
        stem, _, last = name.rpartition(".")
        if run and last.isdigit() and stem == run[0] and int(last) == run[2] + 1:
            run = (stem, run[1], int(last))
            continue
        if run:
            label = run[0].rpartition(".")[2]
            out.append(f"{label} {run[1]}–{run[2]}" if run[2] > run[1] else f"{label} {run[1]}")
            run = None
        if last.isdigit():
            run = (stem, int(last), int(last))
        elif name:
            out.append(last)
    return ", ".join(out)
