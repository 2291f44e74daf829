"""What the fuzz tests share: hostile values and files, and the rule that a fault is one short sentence, never a hang."""

import contextlib
import json
import os
import signal
import socket

from treespec.errors import TreespecError

DEEP = 10_000  # levels of nesting
LONG = 1 << 20  # characters
PATIENCE = 5  # seconds of processor time; a pause of the machine does not count
MARK = "@@deep@@"  # stands for what json cannot write
VALUES = (
    None, True, [], {}, "", " ", "x", "\0", "\ud800", "\u202e\x1b[31m", 0, -1, 1.5, 1e-320, 2**31, 2**63, 10**400, -(10**400),
    float("nan"), float("inf"), -float("inf"), [None], [-1], ["x"], [[]], {"": None}, {"rows": 3}, "x" * LONG, MARK,
)  # fmt: skip
TEXTS = (
    "", " ", "\t", "-", "--", "-1", "0", "1", "2.5", "-0.0", "nan", "inf", "-inf", "1e400", "1e-400", str(2**31), str(2**63),
    str(10**400), "9" * 5000, "x", "x" * 10_000, "x" * 100_000, "é", "\u202e", "\0", "\ud800", "\udcff", "a\nb", "\x1b[31mred", "[red]",
    "[/]", "{}", "%s", "$(false)", "`false`", "; false", "../..", "/", "/dev/null", "none", "None", "null", "true", "[]", ",", ",,", ":", "=",
    "x:y=z", "dynamic:tau=,,", "dynamic:tau=nan", "dynamic:tau", "dynamic:=", "dynamic:" + "tau=0.1," * 2000, "1,2,nan", "1/0", "0x10",
    "１２", "1_000", "²", "٣", "cuda", "cuda:99", "cuda:x", "toy", "http://localhost:1/x", "a/b/c", "-rf", "@file",
)  # fmt: skip


class Hang(BaseException):
    """Raised by the clock inside whatever takes too long."""


@contextlib.contextmanager
def clock(seconds=PATIENCE):
    """Ends what burns more processor time than that, or waits for ever: two alarms, so that a pause is no hang."""
    alarms = []

    def stop(number, _):
        alarms.append(number)
        if number == signal.SIGPROF or len(alarms) > 1:
            raise Hang(f"more than {seconds} s")

    before = [signal.signal(s, stop) for s in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        for timer, kind, handler in zip(
            (signal.ITIMER_PROF, signal.ITIMER_REAL), (signal.SIGPROF, signal.SIGALRM), before
        ):
            signal.setitimer(timer, 0)
            signal.signal(kind, handler)


def check_sentence(text):
    """One line that a person can read."""
    assert text.strip() and text.isprintable() and len(text) < 2000, f"no sentence: {text[:300]!r}"


def outcome(call):
    """What was said against it, "" if it was taken. Anything but a TreespecError comes out as it is."""
    with clock():
        try:
            call()
        except TreespecError as error:
            check_sentence(str(error))
            return str(error)
    return ""


def places(content, at=()):
    """Every path into a JSON value; of a list only the first and the last entry."""
    yield at
    if isinstance(content, dict):
        for key in content:
            yield from places(content[key], (*at, key))
    elif isinstance(content, list):
        for i in sorted({0, len(content) - 1} if content else ()):
            yield from places(content[i], (*at, i))


def replaced(content, at, value):
    """A copy with another value at a path."""
    if not at:
        return value
    copy = content.copy()
    copy[at[0]] = replaced(content[at[0]], at[1:], value)
    return copy


def without(content, at):
    """A copy that lacks a path."""
    copy = content.copy()
    if len(at) > 1:
        copy[at[0]] = without(content[at[0]], at[1:])
    else:
        del copy[at[0]]
    return copy


def text_of(content):
    """JSON as Python writes it, NaN and all, with real depth where a mark stands."""
    return json.dumps(content).replace(json.dumps(MARK), "[" * DEEP + "]" * DEEP)


def json_variants(valid, values=VALUES):
    """``(label, text)``: every hostile value at every path, every path missing, keys twice."""
    for at in places(valid):
        for value in values:
            yield f"{at} = {str(value)[:20]!r}", text_of(replaced(valid, at, value))
        if at:
            yield f"{at} missing", text_of(without(valid, at))
    whole = json.dumps(valid)
    if isinstance(valid, dict):
        key = json.dumps(next(iter(valid)))
        yield "a key twice", whole[:-1] + f", {key}: [null]}}"
    yield "two values", whole + whole
    yield "deep objects", '{"a":' * DEEP + "1" + "}" * DEEP


def byte_variants(valid):
    """``(label, bytes)``: cuts, flipped bits, other encodings, noise around a valid file."""
    step = max(1, len(valid) // 40)
    for at in sorted({0, 1, 2, 3, *range(0, len(valid), step), len(valid) - 1}):
        yield f"cut at {at}", valid[:at]
        if at < len(valid):
            flipped = bytearray(valid)
            flipped[at] ^= 1 << (at % 8)
            yield f"bit {at % 8} of byte {at} flipped", bytes(flipped)
    yield "BOM", b"\xef\xbb\xbf" + valid
    yield "NUL before", b"\0" + valid
    yield "NUL behind", valid + b"\0"
    yield "noise behind", valid + bytes(range(256))
    yield "zeros", bytes(len(valid))
    yield "CR LF", valid.replace(b"\n", b"\r\n")
    with contextlib.suppress(UnicodeDecodeError):
        text = valid.decode("utf-8")
        for code in ("utf-16", "utf-16-le", "utf-32"):
            yield code, text.encode(code)


@contextlib.contextmanager
def odd_files(folder):
    """``{label: path}`` of what is no readable file."""
    made = {
        "missing": folder / "missing",
        "folder": folder / "folder",
        "empty": folder / "empty",
        "loop": folder / "loop",
        "pipe": folder / "pipe",
        "socket": folder / "socket",
        "dangling": folder / "dangling",
        "below a file": folder / "empty" / "below",
        "nul": folder / "a\0b",
        "long name": folder / ("n" * 300),
        "long path": folder / "/".join("p" * 200 for _ in range(30)),
        "surrogate": folder / "\udcff",
        "device": type(folder)("/dev/null"),
    }
    made["folder"].mkdir()
    made["empty"].touch()
    made["loop"].symlink_to(made["loop"])
    made["dangling"].symlink_to(folder / "nowhere")
    os.mkfifo(made["pipe"])
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as door:
        os.chdir(folder)  # a whole path may be too long for a socket
        door.bind("socket")
        os.chdir(here)
        yield made
