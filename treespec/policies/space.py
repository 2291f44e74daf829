"""Where a policy's parameters may lie when somebody searches: one range each, declared as the policy's ``space``.

A range turns a number u in [0, 1) into a value, so that any sampler of the unit cube samples settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Range(Protocol):
    """The values of one parameter."""

    def at(self, u: float) -> Any:
        """The value at u in [0, 1)."""


@dataclass(frozen=True)
class Whole:
    """Whole numbers from ``low`` to ``high``; ``log`` gives every factor the same weight, as sizes want it."""

    low: int
    high: int
    log: bool = False

    def at(self, u: float) -> int:
        """The value at u in [0, 1)."""
        if not self.log:
            return self.low + int(u * (self.high - self.low + 1))
        return min(int(self.low * ((self.high + 1) / self.low) ** u), self.high)


@dataclass(frozen=True)
class Real:
    """Numbers from ``low`` to ``high``, to three significant digits, so that a setting can be typed."""

    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float:
        """The value at u in [0, 1)."""
        value = self.low * (self.high / self.low) ** u if self.log else self.low + u * (self.high - self.low)
        return float(f"{value:.3g}")


@dataclass(frozen=True)
class Choice:
    """One of a few values, neighbours next to each other."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """The value at u in [0, 1)."""
        return self.values[int(u * len(self.values))]


Space = Mapping[str, Range]
