"""Files that are there whole or not at all, JSON with one clear error, and where what can be made again is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treespec.errors import InputError


def cache_dir() -> Path:
    """Where converted models and compiled kernels live: ``$TREESPEC_HOME``, else ``~/.cache/treespec``."""
    return Path(os.environ.get("TREESPEC_HOME") or Path.home() / ".cache" / "treespec")


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, then move it to its own: it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON for people and :func:`read_json`, whole or not at all."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_whole(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: if the file cannot be read or holds anything else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold one JSON object; got a {type(content).__name__}")
    return content
