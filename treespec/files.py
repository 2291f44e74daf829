"""Files that are there whole or not at all, and where what can be made again is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
