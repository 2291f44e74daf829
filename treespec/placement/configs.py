"""Configs by the name of a model, and the model of a config on the meta device: no weight is read."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from treespec.errors import InputError, TreespecError, UnsupportedModelError
from treespec.files import read_json
from treespec.known import source
from treespec.prompts import data_dir

MOST_PARTS = 4096  # layers of a model, or experts of a layer


def config_and_model(name: str) -> tuple[Any, Any]:
    """A config by name and its empty model, built once for each state of a file on this disk: a 70B takes seconds.

    Raises:
        InputError: if there is no such model.
        UnsupportedModelError: if it is no language model.
    """
    file = _config_file(name)
    if file is None or not os.path.isfile(file):
        config = load_config(name)
        return config, empty_model(config)
    return _remembered(name, str(file), file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _remembered(name: str, file: str, changed: int) -> tuple[Any, Any]:
    config = load_config(name)
    return config, empty_model(config)


def _config_file(name: str) -> Path | None:
    """The file that a name's config is read from, if it is on this disk."""
    if name == "smollm2" or name.endswith(".gguf"):
        return None
    shape = data_dir() / "configs" / f"{name.lower()}.json"
    return shape if os.path.isfile(shape) else Path(name) if name.endswith(".json") else Path(name) / "config.json"


def load_config(name: str) -> Any:
    """A transformers config by the name of a model.

    Raises:
        InputError: if there is none.
    """
    known = {path.stem: path for path in (data_dir() / "configs").glob("*.json")}
    path = known.get(name.lower(), Path(name))
    try:
        if path.suffix == ".json":
            content = read_json(path)
            return AutoConfig.for_model(content.pop("model_type", "(none)"), **content)
        if name == "smollm2":
            from treespec.pairs import embedded_target

            name = str(embedded_target())
        where, options = source(name)
        return AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
    except TreespecError:
        raise
    except Exception as error:  # configs check themselves, each in its own way
        raise InputError(
            f"cannot read the config of {name!r}: {reason(error)}; give a folder, a config.json, a hub id or one of "
            f"{', '.join(sorted(known))}"
        ) from None


def reason(error: Exception) -> str:
    """The first line of what somebody else's error says."""
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


def _check_sizes(content: Any) -> None:
    """Refuse a config with numbers that no model has: building one of a billion layers would not end.

    Raises:
        UnsupportedModelError: naming the first.
    """
    for name, value in content.items() if isinstance(content, dict) else ():
        most = MOST_PARTS if any(word in str(name) for word in ("layer", "expert")) else 2**31
        if isinstance(value, int) and abs(value) > most:
            raise UnsupportedModelError(f"a config with {name}={value} is no model's; at most {most:,} are believed")
        _check_sizes(value)


def empty_model(config: Any) -> Any:
    """The model on the meta device.

    Raises:
        UnsupportedModelError: if it cannot be built or has no language-model head.
    """
    try:
        _check_sizes(config.to_dict())
        with init_empty_weights(include_buffers=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except TreespecError:
        raise
    except Exception as error:  # a model's own arithmetic on whatever sizes it was given
        raise UnsupportedModelError(
            f"a config of type {getattr(config, 'model_type', '?')!r} gives no causal language model: {reason(error)}"
        ) from None
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        raise UnsupportedModelError(f"a model of type {config.model_type!r} has no language-model head")
    return model.eval()
