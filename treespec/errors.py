"""Every error a person can cause. One clear sentence each: what was wrong, what was expected, what to do.

They derive from ``ValueError`` so that code written for transformers keeps catching them, and the command line
turns any of them into one line and exit code 2.
"""

from __future__ import annotations

MOST = 1200  # characters of a message; what a file or a caller gave may be a megabyte


class TreespecError(ValueError):
    """Base of all errors that treespec raises on purpose. Its message is one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


def one_line(text: str) -> str:
    """Any text as a line that a person can read: printable, its middle left out where it is long."""
    return printable(text if len(text) <= MOST else f"{text[: MOST // 2]} … {text[-MOST // 2 :]}")


def printable(text: str) -> str:
    """The text with what cannot be printed as its escape: no line breaks, terminal codes or turned directions."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class PolicyError(TreespecError):
    """An unknown policy, an unknown parameter, or a value outside its range."""


class InputError(TreespecError):
    """A prompt, a file or a request that cannot be decoded as asked."""


class TraceError(InputError):
    """A trace that cannot be read, merged, resumed or replayed as asked."""


class VocabularyError(TreespecError):
    """A draft whose token ids do not mean what the target's mean."""


class UnsupportedModelError(TreespecError):
    """A model that cannot verify a tree: its mask or its positions would not be honoured."""


class NonFiniteLogitsError(TreespecError):
    """A model produced NaN logits; the place is named, nothing ends silently."""


class DownloadError(TreespecError):
    """The embedded target could not be found, fetched or verified."""


class PeerError(TreespecError):
    """Another process of a launch has ended, so this one cannot go on."""


class OutOfMemoryError(TreespecError):
    """The device ran out of memory; the message says what was asked for and what to lower."""
