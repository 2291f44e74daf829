"""The devices that a plan may use: typed in, such as ``4x80GB``, or those of this machine.

GB are 10^9 bytes and GiB 2^30, as everywhere in accelerate. An "80 GB" card has a little more than 80 GB; the plan
does not count on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from treespec.errors import InputError
from treespec.files import read_json
from treespec.prompts import data_dir

# of every GPU, what nothing of ours can have: the CUDA context, the libraries' workspaces, what the allocator cannot
# hand out. An assumption on the safe side, not a measurement; plans say so.
CONTEXT_BYTES = 0.8e9
ALLOCATOR_SHARE = 0.02
CPU_SHARE = 0.1  # of main memory, left to everything else
MOST = 64
PART = re.compile(r"(?:(?P<count>\d{1,4})x)?(?P<what>[a-z0-9.]+?)(?:x(?P<after>\d{1,4}))?")
FORMS = "4x80GB, a100x4, 2x24GB,1x80GB or 2x24GB,cpu:64GB,disk"


@dataclass(frozen=True)
class Device:
    """A place for weights.

    Attributes:
        name: ``"cuda:0"``, …, ``"cpu"`` or ``"disk"``.
        memory: bytes.
        label: what it is, for people.
    """

    name: str
    memory: float
    label: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it computes and holds weights; the CPU and the disk only hold what a GPU asks for."""
        return self.name not in ("cpu", "disk")

    @property
    def key(self) -> int | str:
        """As accelerate and transformers name it in a device map."""
        return int(self.name.partition(":")[2]) if self.is_gpu else self.name

    @property
    def reserve(self) -> float:
        """Bytes that are not to be counted on."""
        if self.is_gpu:
            return CONTEXT_BYTES + ALLOCATOR_SHARE * self.memory
        return CPU_SHARE * self.memory if self.name == "cpu" else 0.0


def parse_devices(text: str) -> list[Device]:
    """Devices from ``[COUNTx]SIZE`` or ``GPU[xCOUNT]``, comma-separated, with ``cpu:SIZE`` and ``disk`` at will.

    Args:
        text: such as ``4x80GB``; names of GPUs are those of ``data/costs/gpus.json``.

    Raises:
        InputError: for another form, an unknown GPU, no memory, or more than :data:`MOST` GPUs.
    """
    gpus: list[Device] = []
    others: dict[str, Device] = {}
    for part in filter(None, (p.strip() for p in text.lower().split(","))):
        place, _, size = part.partition(":")
        if place in ("cpu", "disk"):
            memory = _bytes(size, text) if size else float("inf") if place == "disk" else _main_memory()
            others[place] = Device(place, memory, "main memory" if place == "cpu" else "disk")
            continue
        found = PART.fullmatch(part)
        if found is None or (found["count"] and found["after"]):
            raise InputError(f"{text!r} are no devices: expected {FORMS}")
        memory, label = _gpu(found["what"], text)
        count = int(found["count"] or found["after"] or 1)
        if not 1 <= count <= MOST or len(gpus) + count > MOST:
            raise InputError(f"a plan takes 1 to {MOST} GPUs; got {text!r}")
        gpus += [Device(f"cuda:{len(gpus) + i}", memory, label) for i in range(count)]
    if not gpus and not others:
        raise InputError(f"{text!r} names no device: expected {FORMS}")
    return [*gpus, *(others[place] for place in ("cpu", "disk") if place in others)]


def _gpu(what: str, text: str) -> tuple[float, str]:
    """Bytes and label of a size or of a GPU by name."""
    known = read_json(data_dir() / "costs" / "gpus.json")
    if what in known:
        return float(known[what]["memory"]), str(known[what]["name"])
    if not what[0].isdigit():
        raise InputError(f"unknown GPU {what!r}; known: {', '.join(known)}, or a size such as 80GB")
    return _bytes(what, text), "GPU"


def _bytes(size: str, text: str) -> float:
    from accelerate.utils import convert_file_size_to_int  # seconds, which a roofline's Device need not pay

    try:
        found = float(convert_file_size_to_int(size.upper().replace("IB", "iB")))
    except ValueError:
        raise InputError(f"{size!r} in {text!r} is no size; give one such as 80GB or 22.5GiB") from None
    if found <= 0:
        raise InputError(f"{size!r} in {text!r} is no size; give one above 0, such as 80GB")
    return found


def local_devices() -> list[Device]:
    """This machine's GPUs with the memory that is free now, its main memory and the disk; without a GPU the CPU alone.

    A plan counts what is free, so what other processes hold is theirs.
    """
    gpus = [
        Device(f"cuda:{i}", float(torch.cuda.mem_get_info(i)[0]), torch.cuda.get_device_name(i))
        for i in range(torch.cuda.device_count())
    ]
    cpu = Device("cpu", _main_memory(), "main memory")
    return [*gpus, cpu, Device("disk", float("inf"), "disk")] if gpus else [cpu]


def chosen_devices(names: str) -> list[Device]:
    """Of this machine's devices those named: ``"auto"`` (all), ``"cpu"``, ``"cuda"``, or ``"cuda:0,cuda:2"``.

    Raises:
        InputError: if there is no such device.
    """
    here = {d.name: d for d in local_devices()}
    if names == "auto":
        return list(here.values())
    asked = ["cuda:0" if n.strip() == "cuda" else n.strip() for n in names.split(",") if n.strip()]
    missing = [n for n in asked if n not in here]
    if missing or not asked:
        there = ", ".join(n for n in here if n != "disk")
        wanted = ", ".join(missing) or repr(names)
        raise InputError(f"there is no device {wanted} on this machine; there is {there}")
    return [here[n] for n in dict.fromkeys(asked)]


def _main_memory() -> float:
    from accelerate.utils import get_max_memory

    return float(get_max_memory().get("cpu", 0.0))  # what is free now; none of its own beside an integrated GPU
