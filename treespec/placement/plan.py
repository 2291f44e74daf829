"""Will it fit, and where does everything go? From configs and sizes alone: no weight is read, no GPU is needed.

Of every device a plan counts the weights, the target's cache at a context and batch, the work space of the largest
forward (mask, scores, activations, the tree's logits), the draft with its cache, and a reserve. The draft lies beside
the target's output head, so that neither hidden states nor logits travel. What does not fit is said with how much is
missing and with what would make it fit; each of these answers was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treespec.errors import InputError
from treespec.placement.devices import MOST, Device, chosen_devices, parse_devices
from treespec.placement.layout import DevicePlan, Load, PlacementPlan
from treespec.placement.needs import Needs, head_needs, model_needs
from treespec.placement.precision import FLOATS, dtype_name
from treespec.placement.split import split
from treespec.placement.verdict import judged


def plan(
    target: str,
    draft: str = "auto",
    devices: str | Sequence[Device] | None = None,
    *,
    context: int = 2048,
    batch: int = 1,
    budget: int = 48,
    dtype: str = "bfloat16",
    tensor_parallel: bool = False,
    quantization: Any = None,
) -> PlacementPlan:
    """Plan where a target and its draft go, without loading either.

    Args:
        target: a hub id, a local folder, a ``config.json``, a shape of ``data/configs`` or ``"smollm2"``.
        draft: the same, or what :func:`treespec.load_pair` takes; ``"ngram"`` and ``"none"`` need nothing.
        devices: such as ``"4x80GB"`` (:func:`treespec.placement.devices.parse_devices`); None for this machine's, its
            main memory and disk included.
        context: most tokens of a text, prompt and answer.
        batch: texts at once. The engine decodes one; more is for the arithmetic.
        budget: candidates of a tree.
        dtype: float32, bfloat16, float16, or int8 and int4 for the target's weights, the draft then in 16 bits. A
            checkpoint that is quantised counts as it says.
        tensor_parallel: divide every layer among the GPUs (``torchrun``), instead of layers in sequence.
        quantization: a transformers quantisation config that the target is to be loaded with.

    Raises:
        InputError: for names, devices or numbers that mean nothing, or heads that the GPUs cannot divide.
        UnsupportedModelError: for a config that is no decoder-only language model.
    """
    load = Load(context, batch, budget)
    if devices is None:
        devices = chosen_devices("auto")
    where = parse_devices(devices) if isinstance(devices, str) else list(devices)
    needs = model_needs(target, dtype, quantization)
    beside = draft_needs(draft, target, dtype)
    place = _divide if tensor_parallel else _place
    return judged(place, needs, beside, where, load, dtype_name(dtype))


def draft_needs(draft: str, target: str, dtype: str) -> Needs:
    """The needs of a draft by name; narrow dtypes are the target's, a draft then computes in 16 bits."""
    from treespec.head import is_head
    from treespec.pairs import SHIPPED, shipped_draft

    if draft == "auto":
        draft = "mix" if target == "smollm2" else "ngram"
    if draft in ("ngram", "none"):
        return Needs(draft, "none")
    wide = dtype if dtype_name(dtype) in FLOATS else "bfloat16"
    folder = str(shipped_draft({"mix": "head"}.get(draft, draft))) if draft in {*SHIPPED, "mix"} else draft
    if is_head(folder):
        return replace(head_needs(folder, wide), name=draft)
    return replace(model_needs(target if draft == "self" else folder, wide), name=draft)


def _place(target: Needs, draft: Needs, devices: Sequence[Device], load: Load, even: bool) -> PlacementPlan | None:
    """Layers in sequence over the devices, the draft on one of them; None where it does not fit."""
    compute = [d for d in devices if d.is_gpu] or list(devices[:1])
    if compute[0].name == "disk":
        return None
    work = load.work(target)
    room = {d.name: d.memory - d.reserve - (work if d in compute else 0.0) for d in devices}
    extra = {p.name: load.cache(replace(target, parts=(p,))) for p in target.parts}
    extra[target.head] = extra.get(target.head, 0.0) + target.logits(load.nodes)
    if draft.kind == "none":
        found = split(target, extra, devices, room, even=even)
        return None if found is None else _filled(target, draft, devices, load, found, "")
    size = load.beside(draft)
    second = None
    for d in dict.fromkeys([compute[0], compute[-1], *compute[1:4]]):  # the head's device is the first or the last
        if second is not None and d not in (compute[0], compute[-1]):
            break
        found = split(target, extra, devices, {**room, d.name: room[d.name] - size}, d, even)
        if found is None or room[d.name] < size:
            continue
        filled = _filled(target, draft, devices, load, found, d.name)
        if found[target.head] in (d.key, "cpu", "disk"):
            return filled
        second = second or filled
    return second


def _filled(
    target: Needs, draft: Needs, devices: Sequence[Device], load: Load, found: dict[str, int | str], beside: str
) -> PlacementPlan:
    """The plan of a device map."""
    rows = {d.key: DevicePlan(d) for d in devices}
    compute = [d for d in devices if d.is_gpu] or list(devices[:1])
    for part in target.parts:
        row = rows[found[part.name]]
        cache = load.cache(replace(target, parts=(part,)))
        row.parts.append(part.name)
        row.weights += part.weight_bytes
        at = row if row.device in compute else rows[compute[0].key]
        at.cache += cache
        at.held += cache if at is not row else 0.0
        at.workspace += target.logits(load.nodes) if part.name == target.head else 0.0
    for d in compute:
        if rows[d.key].parts or rows[d.key].held:
            rows[d.key].workspace += load.work(target)
        if d.name == beside:
            rows[d.key].draft = load.beside(draft)
    return PlacementPlan(target, draft, load, list(rows.values()), found, beside)


def _divide(target: Needs, draft: Needs, devices: Sequence[Device], load: Load, even: bool) -> PlacementPlan | None:
    """Every layer divided among the GPUs; the draft on the first one. None where it does not fit."""
    gpus = [d for d in devices if d.is_gpu] or list(devices[:1])
    check_divides(target, len(gpus))
    rows = divided(target, draft, gpus, load)
    if any(row.free < 0 for row in rows):
        return None
    return PlacementPlan(
        target, draft, load, rows, {}, gpus[0].name if draft.kind != "none" else "", tensor_parallel=True
    )


def divided(target: Needs, draft: Needs, gpus: Sequence[Device], load: Load) -> list[DevicePlan]:
    """What lies on each GPU with every layer divided among them and the draft on the first; it may not fit."""
    world = len(gpus)
    shared = sum(p.sharded_bytes for p in target.parts)
    heads = {
        name: size // world for name, size in target.sizes.items() if name in ("heads", "kv_heads", "intermediate")
    }
    each = replace(target, sizes={**target.sizes, **heads})
    return [
        DevicePlan(
            d,
            [p.name for p in target.parts],
            target.weight_bytes - shared + shared / world,
            load.cache(target, 1 / world),
            load.work(each) + target.logits(load.nodes),
            load.beside(draft) if d is gpus[0] else 0.0,
            share=1 / world,
        )
        for d in gpus
    ]


def check_divides(target: Needs, world: int) -> None:
    """Refuse to divide a model among processes that its heads do not divide by.

    Raises:
        InputError: naming the numbers that would do.
    """
    if world > 1 and not any(p.sharded_bytes for p in target.parts):
        raise InputError(
            f"transformers has no tensor-parallel plan for {target.name}; put its layers in sequence instead"
        )
    sizes = {name: target.sizes[name] for name in ("heads", "kv_heads", "intermediate")}
    if any(size % world for size in sizes.values()):
        good = [str(n) for n in range(1, MOST + 1) if not any(size % n for size in sizes.values())]
        raise InputError(
            f"{sizes['heads']} attention heads and {sizes['kv_heads']} key-value heads of {target.name} cannot be "
            f"divided among {world} processes; they can among {', '.join(good)}"
        )
