"""What this machine has of a model by its name, without fetching, converting or loading anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from treespec.files import cache_dir, check_regular

NAME = "smollm2-135m-instruct"  # of the embedded target's converted copy; a new conversion gets a new name


def source(name: str) -> tuple[str, dict[str, str]]:
    """A folder or hub id, and the ``gguf_file`` in it if a ``.gguf`` file was named.

    Raises:
        InputError: if reading there might never end.
    """
    path = Path(name)
    for file in path.iterdir() if os.path.isdir(path) else [path]:
        if os.path.exists(file) and not os.path.isdir(file):
            check_regular(file)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})


def known_tokenizer(name: str) -> Any:
    """The tokenizer of a model by name, if it is on this machine; None otherwise. Nothing is fetched or converted."""
    if name == "toy":
        from treespec.toy import toy_tokenizer  # with transformers' models, which no recording needs

        return toy_tokenizer()
    from transformers import AutoTokenizer

    where, options = source(str(cache_dir() / NAME) if name == "smollm2" else name)
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False, **options)
    except Exception:  # the name is out of a trace: not there, or damaged in any way: texts are then shown as ids
        return None
