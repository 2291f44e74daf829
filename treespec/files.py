"""Files that are there whole or not at all, JSON with one clear error, and where what can be made again is kept."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from treespec.errors import InputError

MOST = 1e100  # of a number in a file; more has left the range in which sums and products stay finite


def cache_dir() -> Path:
    """Where converted models and compiled kernels live: ``$TREESPEC_HOME``, else ``~/.cache/treespec``."""
    return Path(os.environ.get("TREESPEC_HOME") or Path.home() / ".cache" / "treespec")


def writable(path: str | Path, force: bool) -> None:
    """Refuse, before any work, to write where something is or where nothing can be.

    Raises:
        InputError: naming the way out.
    """
    place = Path(path)
    if os.path.lexists(place) and not force:
        raise InputError(f"{path} exists; give another --out, or --force to replace it")
    if not os.path.isdir(place.parent):
        raise InputError(f"cannot write {path}: there is no folder {place.parent}")
    if not os.access(place.parent, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {place.parent} is not yours to write to")
    replaceable(place)


def replaceable(path: Path) -> None:
    """Only a regular file gives way to another: not a folder, and never a device.

    Raises:
        InputError: if something else is there, or no file can be.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the system would take such bytes; what is written within, and by Parquet, would not
        raise InputError(f"cannot write {path}: its name is no valid text (UTF-8); give another") from None
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise InputError(f"cannot write {path}: {_why(error)}") from None
    if not (stat.S_ISREG(found) or stat.S_ISLNK(found)):
        raise InputError(f"cannot write {path}: something that is no regular file is there")


def check_folder(path: str | Path) -> None:
    """Refuse, before any work, what cannot become a folder; nothing is made.

    Raises:
        InputError: if something else is there, or no folder can be.
    """
    try:
        there = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        there = not os.path.islink(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot make the folder {path}: {_why(error)}") from None
    if not there:
        raise InputError(f"cannot make the folder {path}: something else is there")


def make_folder(path: str | Path) -> None:
    """A folder, with those around it, if it is not there.

    Raises:
        InputError: if it cannot be.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot make the folder {path}: {_why(error)}") from None


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, then move it to its own: it is there whole or not at all.

    Raises:
        InputError: if it cannot be written.
    """
    replaceable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {_why(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON for people and :func:`read_json`, whole or not at all.

    Raises:
        InputError: if it cannot be written.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    data = text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its own JSON escape
    write_whole(Path(path), lambda temporary: temporary.write_bytes(data))


def check_regular(path: str | Path) -> None:
    """Refuse what must not be opened: a pipe may never end.

    Raises:
        InputError: if the path is no regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {_why(error)}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"cannot read {path}: it is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}")


def read_bytes(path: str | Path) -> bytes:
    """A whole file.

    Raises:
        InputError: if it is missing, cannot be read, or is no regular file.
    """
    check_regular(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {_why(error)}") from None


def read_text(path: str | Path) -> str:
    """A whole text file, UTF-8 with or without a mark in front; lines end with a line feed.

    Raises:
        InputError: as :func:`read_bytes`, or if it is not UTF-8.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: saying why it is none, in a few words; NaN and infinities are no JSON, and no nesting is so deep.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: if the file cannot be read or holds anything else.
    """
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold one JSON object; got a {type(content).__name__}")
    return content


def real(value: Any) -> float:
    """A number out of JSON.

    Raises:
        TypeError: for anything else, or one that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number; got a {type(value).__name__}")
    if not abs(value) <= MOST:
        raise TypeError("a number is out of range")
    return float(value)


def reals(values: Any) -> tuple[float, ...]:
    """A list of numbers out of JSON.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(values, list):
        raise TypeError(f"expected a list of numbers; got a {type(values).__name__}")
    return tuple(map(real, values))


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
