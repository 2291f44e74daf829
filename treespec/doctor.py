"""What this machine is good for: devices, versions, threads, the C kernel, a model's self-check, and what is slow here.

Findings are sentences with their reason. What is said about speed was measured a moment ago on the model given, or is
left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from rich.table import Table

from treespec.console import plain_console
from treespec.errors import TreespecError, UnsupportedModelError
from treespec.fast import speed_up
from treespec.files import cache_dir
from treespec.known import NAME
from treespec.model import TreeModel, input_device
from treespec.native import kernel
from treespec.pairs import load_model
from treespec.placement.devices import local_devices
from treespec.placement.load import find_places
from treespec.tree import TokenTree

PACKAGES = ("treespec", "torch", "transformers", "accelerate", "safetensors", "numpy", "bitsandbytes", "torchao")
SIZES = (1, 16)  # nodes of the timed forwards
ROUNDS = 5


def examine(target: str = "", dtype: str = "float32", device: str = "auto") -> dict[str, Any]:
    """Look at the machine, and at a model if one is named.

    Args:
        target: a name for :func:`treespec.load_pair`, or "" for none.
        dtype: to load it in.
        device: where to.

    Returns:
        ``versions``, ``devices``, ``peer_access``, ``threads``, ``kernel``, ``model`` (None without one), ``findings``.

    Raises:
        InputError: if there is no such model or device.
    """
    found: dict[str, Any] = {
        "versions": _versions(),
        "devices": [_device(d) for d in local_devices() if d.name != "disk"],
        "peer_access": _peer_access(),
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "vector": torch.backends.cpu.get_cpu_capability(),
        },
        "kernel": {"compiler": _compiler(), "works": kernel() is not None},
        "embedded_target": (cache_dir() / NAME / "config.json").exists(),
        "model": _model(target, dtype, device) if target else None,
    }
    found["findings"] = list(_findings(found))
    return found


def _versions() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    from treespec import __version__

    known = {name: version(name) for name in PACKAGES}
    return {**known, "treespec": __version__, "python": platform.python_version(), "cuda": torch.version.cuda}


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)


def _device(device: Any) -> dict[str, Any]:
    row = {"name": device.name, "label": device.label, "free_bytes": round(device.memory)}
    if device.is_gpu:
        about = torch.cuda.get_device_properties(device.key)
        row |= {"memory_bytes": about.total_memory, "capability": f"{about.major}.{about.minor}"}
    else:
        row |= {"label": platform.processor() or platform.machine()}
    return row


def _peer_access() -> list[dict[str, Any]]:
    """For every two GPUs, whether one can read the other's memory."""
    count = torch.cuda.device_count()
    return [
        {"from": f"cuda:{a}", "to": f"cuda:{b}", "direct": bool(torch.cuda.can_device_access_peer(a, b))}
        for a in range(count)
        for b in range(count)
        if a != b
    ]


def _model(target: str, dtype: str, device: str) -> dict[str, Any]:
    """Load it, check it, time it with transformers' forward and with the lean one."""
    if target == "toy":
        from treespec.toy import TableModel

        model: Any = TableModel.random()
    else:
        model, _ = load_model(target, dtype, find_places(target, "none", dtype, device)[0])
    about: dict[str, Any] = {"name": target, "dtype": dtype, "device": str(input_device(model)), "self_check": True}
    try:
        TreeModel.of(model)
    except UnsupportedModelError as error:
        return {**about, "self_check": False, "reason": str(error)}
    about["forward_ms"] = _timed(model)
    way = "cpu" if input_device(model).type == "cpu" else "lean"
    try:
        about["fast"] = speed_up(model, way)
        about["fast_ms"] = _timed(model)
    except TreespecError as error:
        about["fast"] = str(error)
    return about


@torch.no_grad()
def _timed(model: Any) -> dict[int, float]:
    """Milliseconds of a forward over a tree, by its nodes; medians after a warm-up."""
    session = TreeModel.of(model).session(max(SIZES) + 32)
    session.extend([1] * 16, logits="none")
    out = {}
    for n in SIZES:
        tree = TokenTree.from_lists([1] * n, [-1, *((i - 1) // 2 for i in range(1, n))], [0.0] * n)
        seconds = []
        for _ in range(ROUNDS + 1):
            before = session.seconds
            session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors())
            seconds.append(session.seconds - before)
            session.keep([])
        out[n] = round(1e3 * median(seconds[1:]), 3)
    return out


def _findings(found: dict[str, Any]) -> Iterator[str]:
    gpus = [d for d in found["devices"] if d["name"].startswith("cuda")]
    threads, model = found["threads"], found["model"]
    if not gpus:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        yield f"Everything runs on the CPU, since {why}."
    for pair in found["peer_access"]:
        if not pair["direct"]:
            yield f"{pair['from']} cannot read {pair['to']} directly: what passes between them goes by main memory."
    if not found["kernel"]["works"]:
        why = "there is no C compiler" if found["kernel"]["compiler"] is None else "it could not be built"
        yield f"The C kernel is missing, since {why}: --fast cpu falls back to packed products, which are slower."
    if threads["torch"] < threads["cores"] and not gpus:
        yield f"torch uses {threads['torch']} of {threads['cores']} cores: set OMP_NUM_THREADS to use more."
    if threads["load"] is not None and threads["load"] > threads["cores"]:
        yield f"The load is {threads['load']} on {threads['cores']} cores: times measured now mean little."
        if threads["omp_wait_policy"] != "PASSIVE" and not gpus:
            yield "Waiting threads spin while other work runs: set OMP_WAIT_POLICY=passive, except to measure."
    if not found["embedded_target"]:
        yield "The embedded target is not here yet: its first use fetches 93 MB and converts them."
    if model is not None:
        yield from _about_model(model)


def _about_model(model: dict[str, Any]) -> Iterator[str]:
    if not model["self_check"]:
        yield f"{model['name']} cannot be used: {model['reason']}."
        return
    one, many = (model["forward_ms"][n] for n in SIZES)
    yield (
        f"{model['name']}: a forward takes {one:.1f} ms for one node and {many:.1f} ms for {SIZES[1]}, "
        f"{many / one:.2f} times as much (medians of {ROUNDS}, {model['dtype']} on {model['device']}): a tree of "
        f"{SIZES[1]} nodes pays only if it gives more tokens per step than that."
    )
    if "fast_ms" in model:
        fast = model["fast_ms"]
        yield f"With {model['fast']}: {fast[SIZES[0]]:.1f} and {fast[SIZES[1]]:.1f} ms."
    else:
        yield f"No faster forward: {model['fast']}."


def print_report(found: dict[str, Any]) -> None:
    """On stdout."""
    table = Table("device", "what", "memory", "free", title="treespec doctor", title_justify="left")
    for d in found["devices"]:
        memory = f"{d['memory_bytes'] / 1e9:.1f} GB" if "memory_bytes" in d else ""
        table.add_row(d["name"], d["label"], memory, f"{d['free_bytes'] / 1e9:.1f} GB")
    console = plain_console(160)
    console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items() if version))
    threads = found["threads"]
    console.print(f"{threads['torch']} threads on {threads['cores']} cores, {threads['vector']}")
    if found["peer_access"]:
        direct = sum(pair["direct"] for pair in found["peer_access"])
        console.print(f"peer access: {direct} of {len(found['peer_access'])} pairs of GPUs reach each other directly")
    console.print(f"C kernel: {'works' if found['kernel']['works'] else 'missing'}")
    if found["model"] is not None:
        console.print(
            f"self-check of {found['model']['name']}: {'passes' if found['model']['self_check'] else 'FAILS'}"
        )
    for line in found["findings"]:
        console.print(f"- {line}")
