"""Whether a plan fits; if not, what is short, by how much, and what would make it fit, each remedy tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from treespec.errors import InputError
from treespec.placement.devices import MOST, Device
from treespec.placement.layout import DevicePlan, Load, PlacementPlan
from treespec.placement.needs import Needs, model_needs
from treespec.placement.precision import FLOATS, NARROW

NO_DRAFT = Needs("none", "none")
Place = Callable[[Needs, Needs, Sequence[Device], Load, bool], "PlacementPlan | None"]


def judged(place: Place, target: Needs, draft: Needs, devices: list[Device], load: Load, dtype: str) -> PlacementPlan:
    """The plan of ``place``, with its verdict; where it does not fit, as it would lie on devices that were larger."""
    found = place(target, draft, devices, load, True)
    if found is not None:
        found.verdict = _fits(found)
        return found
    short = _short(place, target, draft, devices, load)
    larger = [replace(d, memory=d.memory + short * 1.001) if d.is_gpu or len(devices) == 1 else d for d in devices]
    found = place(target, draft, larger, load, True)
    if found is None:  # a disk alone, say
        found = PlacementPlan(target, draft, load, [DevicePlan(d) for d in devices], {})
    for row, device in zip(found.devices, devices):
        row.device = device
    found.fits, found.short_bytes = False, short
    found.remedies = list(_remedies(place, target, draft, devices, load, dtype))
    found.verdict = _misses(found, devices)
    return found


def _fits(found: PlacementPlan) -> str:
    gpus = [d for d in found.devices if d.device.is_gpu and d.parts]
    least = min(d.free for d in found.devices if d.device.memory != float("inf") and d.used > d.device.reserve)
    if away := found.offloaded:
        size = sum(p.weight_bytes for p in found.target.parts if p.name in away)
        return (
            f"It fits, but {len(away)} of {len(found.target.parts)} parts lie outside the GPUs: every forward copies "
            f"{size / 1e9:.1f} GB to one of them, which is slow."
        )
    if found.tensor_parallel:
        return (
            f"It fits, every layer divided among {len(found.devices)}; at least {least / 1e9:.1f} GB stay free on each."
        )
    where = (
        f"on {len(gpus)} GPUs, layers in sequence" if len(gpus) > 1 else f"on {(gpus or found.devices)[0].device.name}"
    )
    return f"It fits {where}; at least {least / 1e9:.1f} GB stay free on each device in use."


def _misses(found: PlacementPlan, devices: Sequence[Device]) -> str:
    each = "each GPU" if sum(d.is_gpu for d in devices) > 1 else devices[0].name
    need = found.target.weight_bytes + found.load.cache(found.target) + found.load.beside(found.draft)
    way = (
        f"To make it fit: {'; or '.join(found.remedies)}." if found.remedies else "Nothing that was tried makes it fit."
    )
    return (
        f"It does not fit: {need / 1e9:.1f} GB of weights, cache and draft, and {each} is short of "
        f"{max(found.short_bytes / 1e9, 0.1):.1f} GB. {way}"
    )


def _short(place: Place, target: Needs, draft: Needs, devices: Sequence[Device], load: Load) -> float:
    """Bytes that each GPU (or the CPU, alone) would need beside what it has."""

    def enough(more: float) -> bool:
        wider = [replace(d, memory=d.memory + more) if d.is_gpu or len(devices) == 1 else d for d in devices]
        return place(target, draft, wider, load, False) is not None

    high = 2.0 * (target.weight_bytes + load.cache(target) + load.work(target) + target.logits(load.nodes))
    high += load.beside(draft)
    low = 0.0
    while high - low > 5e7 and high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _remedies(
    place: Place, target: Needs, draft: Needs, devices: list[Device], load: Load, dtype: str
) -> Iterator[str]:
    def fits(needs: Needs, beside: Needs, where: list[Device], what: Load) -> bool:
        try:
            return place(needs, beside, where, what, False) is not None
        except InputError:  # so many processes do not divide the heads
            return False

    if dtype in FLOATS and target.dtype in FLOATS:
        for narrow in [n for n in ("bfloat16", "int8", "int4") if n in NARROW or dtype == "float32"]:
            smaller = model_needs(target.name, narrow)
            if fits(smaller, draft, devices, load):
                yield f"--dtype {narrow} ({smaller.weight_bytes / 1e9:.0f} GB of weights)"
                break
    if load.batch > 1 and fits(target, draft, devices, replace(load, batch=1)):
        yield "--batch 1"
    shorter = _most(lambda c: fits(target, draft, devices, replace(load, context=128 * c)), load.context // 128)
    if shorter and 128 * shorter < load.context:
        yield f"--context {128 * shorter}"
    if draft.kind != "none" and fits(target, NO_DRAFT, devices, load):
        yield "--draft ngram, which needs no memory"
    yield from _more(target, draft, devices, load, fits)


def _more(target: Needs, draft: Needs, devices: list[Device], load: Load, fits: Callable[..., bool]) -> Iterator[str]:
    """More GPUs of the largest kind, or main memory."""
    gpus = [d for d in devices if d.is_gpu]
    if not gpus:
        return
    model = max(gpus, key=lambda d: d.memory)
    need = target.weight_bytes + load.cache(target) + load.beside(draft)
    least = max(len(gpus) + 1, int(need / (model.memory - model.reserve)))
    for count in range(least, min(least + 8, MOST + 1)):
        more = [*gpus, *(replace(model, name=f"cuda:{i}") for i in range(len(gpus), count))]
        if fits(target, draft, more, load):
            yield f"{count} GPUs of {model.memory / 1e9:.0f} GB"
            break
    if all(d.name != "cpu" for d in devices):
        need = target.weight_bytes / 0.85
        if fits(target, draft, [*gpus, Device("cpu", need)], load):
            yield f"cpu:{need / 1e9:.0f}GB beside the GPUs, with layers that travel at every forward (slow)"


def _most(good: Callable[[int], bool], high: int) -> int:
    """The largest whole number up to ``high`` that is good, if smaller ones are too; 0 for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
