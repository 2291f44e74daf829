"""What a step costs: seconds of a verification over n nodes, of a draft forward over w nodes, and of the rest.

A :class:`CostModel` is anything that answers these three; :class:`CostCurve` answers them from measured points. Curves
are JSON files, the shipped ones in ``data/costs``; ``measured`` belongs to the embedded pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from scipy.optimize import isotonic_regression

from treespec.errors import InputError
from treespec.files import read_json, write_json
from treespec.prompts import data_dir


@runtime_checkable
class CostModel(Protocol):
    """Seconds of one step's parts.

    Attributes:
        overhead: seconds of a step outside both models' forwards.
    """

    @property
    def overhead(self) -> float:
        """Seconds per step outside both models' forwards."""

    def verify(self, n: int) -> float:
        """Seconds of one target forward over ``n`` nodes, the root included; must not fall with n."""

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes; must not fall with w."""


@dataclass(frozen=True)
class CostCurve:
    """Measured points, joined by straight lines after isotonic regression: more rows never cost less.

    Isotonic, because timings are noisy and a dip would make a policy add nodes for the sake of speed. Straight lines,
    because real curves have steps (tiles, kernels), which anything smoother overshoots. Below the first point the curve
    is flat; beyond the last it goes on with the mean slope of all points, and :meth:`extrapolates` says so.

    Args:
        verify_rows: nodes of the measured target forwards, the root included.
        verify_seconds: what they took.
        draft_rows: nodes of the measured draft forwards.
        draft_seconds: what they took.
        overhead: seconds per step outside both models' forwards.
        name: how a policy's parameters show it: a shipped curve's name or a file's path.
        provenance: models, dtype, machine, date.

    Raises:
        InputError: for rows that do not rise, or seconds that are not positive numbers.
    """

    verify_rows: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    draft_rows: tuple[float, ...] = (1.0,)
    draft_seconds: tuple[float, ...] = (0.0,)
    overhead: float = 0.0
    name: str = "curve"
    provenance: str = ""

    def __post_init__(self) -> None:
        for kind in ("verify", "draft"):
            rows, seconds = getattr(self, f"{kind}_rows"), getattr(self, f"{kind}_seconds")
            if len(rows) != len(seconds) or not rows:
                raise InputError(f"cost curve {self.name}: {kind} needs as many seconds as rows, at least one of each")
            if rows[0] < 1 or any(not a < b for a, b in pairwise(rows)):
                raise InputError(f"cost curve {self.name}: {kind} rows must rise from 1 or more; got {rows}")
            if not all(math.isfinite(s) and s >= 0 for s in seconds) or (kind == "verify" and min(seconds) <= 0):
                raise InputError(f"cost curve {self.name}: {kind} seconds must be positive numbers; got {seconds}")
            object.__setattr__(self, f"{kind}_seconds", tuple(isotonic_regression(seconds).x.tolist()))
        if not (math.isfinite(self.overhead) and self.overhead >= 0):
            raise InputError(f"cost curve {self.name}: overhead must be at least 0 seconds; got {self.overhead}")

    def __str__(self) -> str:
        return self.name

    def verify(self, n: int) -> float:
        """Seconds of one target forward over ``n`` nodes, the root included."""
        return _at(n, self.verify_rows, self.verify_seconds)

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes; 0 for none."""
        return _at(w, self.draft_rows, self.draft_seconds) if w > 0 else 0.0

    def extrapolates(self, n: int) -> bool:
        """True where :meth:`verify` leaves the measured range."""
        return not self.verify_rows[0] <= n <= self.verify_rows[-1]

    def save(self, path: str | Path) -> None:
        """Write JSON that :meth:`load` reads."""
        content = {
            "verify": {"rows": self.verify_rows, "seconds": self.verify_seconds},
            "draft": {"rows": self.draft_rows, "seconds": self.draft_seconds},
            "overhead": self.overhead,
            "provenance": self.provenance,
        }
        write_json(path, content)

    @classmethod
    def load(cls, where: str | Path) -> CostCurve:
        """A shipped curve by name (``measured``) or a JSON file.

        Raises:
            InputError: if there is neither, or the file is not a curve.
        """
        shipped = {p.stem: p for p in sorted((data_dir() / "costs").glob("*.json"))}
        path = shipped.get(str(where), Path(where))
        if not path.exists():
            raise InputError(f"no cost curve {str(where)!r}; give a JSON file or one of: {', '.join(shipped)}")
        content = read_json(path)
        try:
            verify, draft = _points(content["verify"]), _points(content["draft"])
            return cls(*verify, *draft, float(content["overhead"]), str(where), str(content.get("provenance", "")))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path} is not a cost curve: expected verify and draft, each with rows and seconds, and overhead"
            ) from None


def _points(content: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(float(r) for r in content["rows"]), tuple(float(s) for s in content["seconds"])


def _at(n: int, rows: tuple[float, ...], seconds: tuple[float, ...]) -> float:
    if n > rows[-1] and len(rows) > 1:
        slope = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0])
        return seconds[-1] + slope * (n - rows[-1])
    return float(np.interp(n, rows, seconds))
