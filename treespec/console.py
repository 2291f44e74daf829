"""Text on a terminal as it is: no markup, no emoji codes, no colours of its own in what a file or a caller gave."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(width: int, **options: Any) -> Console:
    """A console on stdout for tables; a narrow terminal scrolls rather than cuts.

    Args:
        width: characters across.
        **options: of :class:`rich.console.Console`.
    """
    return Console(width=width, markup=False, highlight=False, emoji=False, **options)
