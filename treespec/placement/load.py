"""Loading that follows a plan: transformers and accelerate do it, what can go wrong becomes one sentence.

A model lies on one device, in sequence over several, partly on the CPU or the disk, or divided among the processes of a
launch. Nothing of it stays behind when loading fails or is interrupted.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from treespec.errors import InputError, OutOfMemoryError, TreespecError
from treespec.known import source
from treespec.launch import world
from treespec.placement.devices import chosen_devices
from treespec.placement.layout import PlacementPlan
from treespec.placement.needs import model_needs
from treespec.placement.plan import check_divides, plan
from treespec.placement.precision import FLOATS, NARROW, dtype_name

DeviceMap = Mapping[str, int | str]


def load_weights(
    name: str,
    dtype: str,
    device_map: DeviceMap | None = None,
    *,
    quantization: Any = None,
    tensor_parallel: bool = False,
) -> Any:
    """A causal language model in eval mode.

    Args:
        name: a folder, a hub id, or a ``.gguf`` file in either.
        dtype: float32, bfloat16 or float16; int8 and int4 quantise with bitsandbytes.
        device_map: modules to devices; None is the CPU.
        quantization: a transformers quantisation config (bitsandbytes, torchao, GPTQ, AWQ, …), passed through.
        tensor_parallel: divide it among the processes of this launch.

    Raises:
        InputError: if there is no such model or device, or the map splits tied weights.
        OutOfMemoryError: saying what was allocated and what to lower.
    """
    where, file = source(name)
    options: dict[str, Any] = {"trust_remote_code": False, **file}  # or transformers asks whether to run what is there
    if file:  # unpacked: packed blocks come with an attention of their own, which takes no tree mask
        quantization = GgufConfig(dequantize=True)
    if tensor_parallel:
        options["distributed_config"] = _divided(name)
    elif device_map is not None:
        check_map(name, device_map)
        options["device_map"] = dict(device_map)
    quantization = quantization if quantization is not None else _bitsandbytes(dtype)
    if quantization is not None:
        options["quantization_config"] = quantization
    wide = dtype_name(dtype) if dtype_name(dtype) in FLOATS else "bfloat16"
    with _offload_folder(device_map) as folder, one_sentence(name, device_map), _quiet():
        if folder is not None:
            options["offload_folder"] = folder
        model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, wide), **options)
        if folder is not None:
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model.eval()


def check_gguf(name: str, dtype: str, device_map: DeviceMap | None = None, quantization: Any = None) -> None:
    """Refuse what a ``.gguf`` file cannot be loaded as, before it is read; other names pass.

    Raises:
        InputError: for a file that is not there, another quantisation, or weights on the disk.
    """
    path = Path(name)
    if path.suffix != ".gguf":
        return
    if os.path.isdir(path.parent) and not os.path.isfile(path):
        raise InputError(f"there is no file {name}; give a .gguf file, a folder or a hub id")
    if quantization is not None or dtype_name(dtype) in NARROW:
        raise InputError(
            f"{name} is unpacked into {', '.join(FLOATS)} and cannot be quantised again; give one of those dtypes "
            "and no quantization, or load the original model"
        )
    if device_map is not None and "disk" in device_map.values():
        raise InputError(
            f"weights of {name} cannot be left on the disk: they are unpacked; use a folder of safetensors"
        )


def _divided(name: str) -> Any:
    from transformers.distributed import DistributedConfig

    if world() < 2:
        raise InputError(
            "tensor parallelism needs several processes: start with torchrun --nproc_per_node N -m treespec.cli …"
        )
    check_divides(model_needs(name, "bfloat16"), world())
    return DistributedConfig(tp_plan="auto")


def _bitsandbytes(dtype: str) -> Any:
    """The quantisation that a narrow dtype stands for."""
    name = dtype_name(dtype)
    if name not in NARROW:
        return None
    from transformers import BitsAndBytesConfig

    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def check_map(name: str, device_map: DeviceMap) -> None:
    """Refuse a device map before anything is loaded.

    Raises:
        InputError: for a device that is not there, or tied weights on two devices.
    """
    count = torch.cuda.device_count()
    for module, where in device_map.items():
        number = where if isinstance(where, int) else str(where).partition(":")[2]
        gpu = isinstance(where, int) or str(where).startswith("cuda")
        if gpu and not (str(number or 0).isdigit() and int(number or 0) < count):
            there = f"{count} GPU{'' if count == 1 else 's'}" if count else "no GPU"
            raise InputError(f"the device map puts {module or 'the model'} on {where}, but this machine has {there}")
    if len(set(device_map.values())) < 2:
        return
    for part in model_needs(name, "bfloat16").parts:
        if part.tied_to and (one := _where(part.tied_to, device_map)) != (two := _where(part.name, device_map)):
            raise InputError(
                f"the device map puts {part.tied_to} on {one} and {part.name} on {two}, but they are one tied weight; "
                "put both on one device"
            )


def _where(module: str, device_map: DeviceMap) -> Any:
    """The device of a module: its own entry or that of a module around it."""
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    return device_map.get(module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without accelerate's warning that something was offloaded: the map says so."""
    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _offload_folder(device_map: DeviceMap | None) -> Iterator[str | None]:
    """A folder for weights that cannot be read from where they lie; gone when loading fails, else with the model."""
    if device_map is None or "disk" not in device_map.values():
        yield None
        return
    folder = tempfile.mkdtemp(prefix="treespec-offload-")
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def one_sentence(name: str, device_map: DeviceMap | None) -> Iterator[None]:
    """Errors of loading as errors of ours."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(name, device_map) from error
    except TreespecError:
        raise
    except Exception as error:  # configs, weights and tokenizers raise whatever they like on a broken file
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise _out_of_memory(name, device_map) from error
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        missing = isinstance(error, ImportError)
        hint = (
            "Install it, or load the model otherwise"
            if missing
            else "Give 'smollm2', a folder, a .gguf file or a hub id"
        )
        raise InputError(f"cannot load a causal language model from {name!r}: {reason}. {hint}") from error


def _out_of_memory(name: str, device_map: DeviceMap | None) -> OutOfMemoryError:
    held = []
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        held.append(f"{torch.cuda.memory_allocated(i) / 1e9:.1f} of {total / 1e9:.1f} GB on cuda:{i}")
    where = ", ".join(map(str, dict.fromkeys(device_map.values()))) if device_map else "cpu"
    return OutOfMemoryError(
        f"out of memory while loading {name} on {where}, with {', '.join(held) or 'main memory full'} allocated "
        "here; use a narrower dtype, more devices, or a shorter context: treespec plan says what would fit"
    )


def find_places(
    target: str, draft: str, dtype: str, device: str | PlacementPlan | DeviceMap, quantization: Any = None
) -> tuple[DeviceMap | None, str]:
    """Where a target goes, and its draft.

    Args:
        target: as in :func:`treespec.load_pair`.
        draft: the same.
        dtype: the same.
        device: ``"auto"``, names such as ``"cuda:0,cuda:1"``, a plan, or a device map.
        quantization: what the target is loaded with, counted where a plan is made.

    Returns:
        The target's device map (None for the CPU) and the draft's device.

    Raises:
        InputError: if a device is not there, or the pair does not fit.
    """
    if isinstance(device, str):
        found = chosen_devices(device)
        if not any(d.is_gpu for d in found):
            return None, "cpu"
        device = plan(target, draft, found, dtype=dtype, quantization=quantization)
    if isinstance(device, PlacementPlan):
        if not device.fits or device.tensor_parallel:
            raise InputError(
                device.verdict
                if not device.fits
                else "a tensor-parallel plan is followed under torchrun; leave device= to it"
            )
        on_cpu = set(device.device_map.values()) == {"cpu"}
        return (None if on_cpu else device.device_map), device.draft_device or "cpu"
    head = next((str(where) for name, where in device.items() if "head" in name), str(next(iter(device.values()))))
    return device, f"cuda:{head}" if head.isdigit() else "cpu" if head == "disk" else head
