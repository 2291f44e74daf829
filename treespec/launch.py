"""Several processes, one launch: who am I, is a model divided among us, and what is said when one of us is gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

from treespec.errors import InputError, PeerError, one_line

# what gloo and NCCL say when the other side has gone
LOST = ("closed by peer", "reset by peer", "NCCL", "ProcessGroup", "Broken pipe", "timed out", "Timed out", "gloo")


def _group() -> Any:
    """``torch.distributed`` where a group of processes is up, else None. Whoever has set one up has imported it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def world() -> int:
    """Processes of this launch; 1 where nobody launched several.

    Raises:
        InputError: if ``WORLD_SIZE`` is no whole number from 1.
    """
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """The number of this process; the first is 0.

    Raises:
        InputError: if ``RANK`` is no whole number.
    """
    return _number("RANK", 0)


def _number(name: str, least: int) -> int:
    """A launcher's variable; ``least`` where it is not set."""
    said = os.environ.get(name) or str(least)
    if not (said.isascii() and said.isdigit() and int(said) >= least):
        raise InputError(f"{name} is {one_line(repr(said))}; torchrun sets it to a whole number from {least}; unset it")
    return int(said)


def first() -> bool:
    """Whether this process says what is wrong: all of a launch get the same input."""
    return os.environ.get("RANK", "0") in ("", "0") or not os.environ["RANK"].isdigit()


def is_divided(model: Any) -> bool:
    """Whether a model's weights are divided among processes."""
    group = _group()
    if group is None or group.get_world_size() < 2:
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def lost(error: Exception) -> bool:
    """Whether an error of a joint forward says that another process is gone."""
    return _group() is not None and any(word in str(error) for word in LOST)


def peer_error(error: Exception | None = None) -> PeerError:
    """What is said when another process is gone."""
    reason = f" ({str(error).strip().splitlines()[0][:120]})" if error and str(error).strip() else ""
    return PeerError(
        f"process {rank()} of {world()} stops: another process of the launch has ended and with it a part of the target"
        f"{reason}; look for that one's message, then start the same command again"
    )


def end_with_the_others(patience: float = 5.0) -> None:
    """Let the launcher's signal, sent when another process has failed, end this one with a sentence.

    Python runs a handler only once the main thread is back from whatever it waits for, and a GPU that waits for the
    other process may keep it for ever. So a thread is woken too, and ends the process where the handler cannot.

    Args:
        patience: seconds that the thread gives the handler.
    """
    heard = threading.Event()

    def stop(number: int, frame: Any) -> None:
        heard.set()
        raise peer_error()

    signal.signal(signal.SIGTERM, stop)
    bell, ear = socket.socketpair()
    bell.setblocking(False)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(bell, ear, heard, patience), daemon=True).start()


def _listen(bell: socket.socket, ear: socket.socket, heard: threading.Event, patience: float) -> None:
    """Wait for the signal, as long as the process lives; the bell is only kept from being closed."""
    while True:
        if ear.recv(1)[0] == signal.SIGTERM and not heard.wait(patience):
            print(f"treespec: {peer_error()}", file=sys.stderr, flush=True)
            os._exit(1)


def own_device() -> str:
    """The device of a process that works alone on its share: its own GPU, or the CPU."""
    import torch  # not to show a help text

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def follow_quietly() -> None:
    """Let the first process speak: nothing goes to stdout from here on."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def leave() -> None:
    """Leave the group of processes, if there is one, without a word."""
    group = _group()
    if group is not None:
        group.destroy_process_group()
