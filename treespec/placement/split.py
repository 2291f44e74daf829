"""Which part goes to which device: accelerate's inference of device maps, on a skeleton that also carries the cache.

The skeleton has a module per part of the model, with one tensor of as many bytes as the part's weights, cache and (at
the output head) logits. So a layer takes its cache along, quantised weights count what they take, and the map that
accelerate finds is the map that transformers loads.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import infer_auto_device_map
from torch import nn

from treespec.placement.devices import Device
from treespec.placement.needs import Needs

CHECKS = 12  # bisections of the level to which devices are filled


class _Whole(nn.Module):
    """A part, never split."""


def skeleton(needs: Needs, extra: dict[str, float]) -> nn.Module:
    """A meta module with the model's names and, in each part, as many bytes as it needs.

    Args:
        needs: the model.
        extra: bytes by part beside the weights: cache, logits.
    """
    root = nn.Module()
    weights: dict[str, nn.Parameter] = {}
    for part in needs.parts:
        *path, last = part.name.split(".")
        parent = root
        for name in path:
            if name not in dict(parent.named_children()):
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        leaf = _Whole()
        weights[part.name] = _bytes(part.weight_bytes)
        leaf.register_parameter("own", weights[part.name])
        leaf.register_parameter("beside", _bytes(extra.get(part.name, 0.0)))
        if part.tied_to:
            leaf.register_parameter("tied", weights[part.tied_to])
        parent.add_module(last, leaf)
    return root


def _bytes(count: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(max(int(count), 0), dtype=torch.uint8, device="meta"), requires_grad=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings that planned GPUs are not here, or that reserved bytes may not fit: known, and the point."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def infer(model: nn.Module, room: dict[int | str, float]) -> dict[str, int | str]:
    """The device map that accelerate infers for a skeleton.

    Args:
        model: of :func:`skeleton`.
        room: bytes by device key.
    """
    limits = {key: int(max(size, 0)) for key, size in room.items() if size != float("inf")}
    with _quiet():
        found = infer_auto_device_map(
            model, max_memory=limits, no_split_module_classes=["_Whole"], clean_result=False, offload_buffers=True
        )
    return {name: _place_of(name, found) for name, module in model.named_modules() if isinstance(module, _Whole)}


def _place_of(name: str, found: dict[str, int | str]) -> int | str:
    """Where a part went: its own entry, or that of a module around it."""
    while name not in found:
        name = name.rpartition(".")[0]
    return found[name]


def split(
    needs: Needs,
    extra: dict[str, float],
    devices: Sequence[Device],
    room: dict[str, float],
    beside: Device | None = None,
    even: bool = True,
) -> dict[str, int | str] | None:
    """A device map, or None where it does not fit.

    One GPU where the model fits on one, since every further one adds a hop to each forward and no speed; else all of
    them, each filled to the same level, which leaves each the same share for longer texts. The CPU and the disk take
    what no GPU holds, if they are among the devices.

    Args:
        needs: the model.
        extra: bytes by part beside the weights.
        devices: to use, GPUs first.
        room: by device name, bytes for parts and what goes with them; what else lies there is off already.
        beside: where the draft lies: if the model fits there too, there it goes.
        even: fill several GPUs to the same level; False is enough to know whether it fits.
    """
    model = skeleton(needs, extra)
    largest = max(p.weight_bytes + extra.get(p.name, 0.0) for p in needs.parts)
    gpus = [d for d in devices if d.is_gpu]
    roomiest = max(gpus or devices[:1], key=lambda d: room[d.name])  # of equal ones the first
    for d in dict.fromkeys(filter(None, (beside, roomiest))):
        if found := _within(model, {d.key: room[d.name] + largest}):
            return found
    if gpus:
        found = _level(model, {d.key: room[d.name] for d in gpus}, largest, CHECKS if even else 0)
        if found or len(gpus) == len(devices):
            return found
    return _offloaded(needs, extra, model, devices, room)


def _within(model: nn.Module, room: dict[int | str, float]) -> dict[str, int | str] | None:
    """A map that stays within ``room``; accelerate says "disk" where it does not."""
    found = infer(model, room)
    return found if set(found.values()) <= room.keys() else None


def _level(model: nn.Module, room: dict[int | str, float], largest: float, checks: int) -> dict[str, int | str] | None:
    """The map over several GPUs whose fullest one is as empty as can be.

    accelerate keeps a layer's room free on the first GPU, for layers that come and go; here none does, so it is given
    that much more.
    """

    def at(share: float) -> dict[str, int | str] | None:
        limits = {key: size * share for key, size in room.items()}
        limits[next(iter(limits))] += largest
        return _within(model, limits)

    best = at(1.0)
    low, high = 0.0, 1.0
    for _ in range(checks if best else 0):
        middle = (low + high) / 2
        found = at(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _offloaded(
    needs: Needs,
    extra: dict[str, float],
    model: nn.Module,
    devices: Sequence[Device],
    room: dict[str, float],
) -> dict[str, int | str] | None:
    """A map with layers on the CPU or the disk: the first GPU computes them, and their cache lies there."""
    limits = {d.key: room[d.name] for d in devices if d.name != "disk"}
    limits.setdefault("cpu", 0.0)
    first = next((d.key for d in devices if d.is_gpu), "cpu")
    held, found = 0.0, None
    for _ in range(len(needs.parts)):  # moving cache to the first GPU may push a layer off it
        found = infer(model, {**limits, first: limits[first] - held})
        away = sum(extra.get(name, 0.0) for name, where in found.items() if where in ("cpu", "disk") and first != "cpu")
        if away <= held:
            break
        held = away
    else:
        return None
    on_disk = any(where == "disk" for where in found.values())
    allowed = any(d.name == "disk" for d in devices)
    if on_disk and not allowed:
        return None
    if first != "cpu" and limits[first] < held:  # not even the cache fits
        return None
    return found
