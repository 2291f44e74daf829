"""What a step costs: seconds of a verification over n nodes, of a draft forward over w nodes, and of the rest.

A :class:`CostModel` is anything that answers these three; :class:`CostCurve` answers them from measured points,
:class:`treespec.roofline.Roofline` from datasheets. :func:`load_cost` finds either by name: a shipped curve
(``data/costs``; ``measured`` belongs to the embedded pair), a JSON file, a typed table, or hardware.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from treespec.errors import MOST, InputError, printable
from treespec.files import read_json, real, reals, write_json
from treespec.prompts import data_dir
from treespec.roofline import load_roofline

HARDWARE = ("gpus", "models")  # files of data/costs that are no curves
TABLE = "'1:24.5 36:28.1; draft 1:3.1; overhead 0.5'"
EXAMPLES = f"a file, a table such as {TABLE}, or hardware such as a100x4:70b"


@runtime_checkable
class CostModel(Protocol):
    """Seconds of one step's parts.

    Attributes:
        overhead: seconds of a step outside both models' forwards.
    """

    @property
    def overhead(self) -> float:
        """Seconds per step outside both models' forwards."""

    def verify(self, n: int, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one target forward over ``batch`` trees of ``n`` nodes, the roots included; must not fall with n.

        ``context`` is the number of cached tokens before each tree; None stands for the model's own.
        """

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes; must not fall with w."""


@dataclass(frozen=True)
class CostCurve:
    """Measured points, joined by straight lines after isotonic regression: more rows never cost less.

    Isotonic, because timings are noisy and a dip would make a policy add nodes for the sake of speed. Straight lines,
    because real curves have steps (tiles, kernels), which anything smoother overshoots. Below the first point the curve
    is flat; beyond the last it goes on with the mean slope of all points, and :meth:`extrapolates` says so.

    A longer context adds time in proportion to it, the more the more rows read it; a batch is one forward over the rows
    of all its trees, whose contexts are read one by one (an assumption: only batch 1 is ever measured).

    Args:
        verify_rows: nodes of the measured target forwards, the root included.
        verify_seconds: what they took.
        draft_rows: nodes of the measured draft forwards.
        draft_seconds: what they took.
        overhead: seconds per step outside both models' forwards.
        name: how a policy's parameters show it: a shipped curve's name or a file's path.
        provenance: models, dtype, machine, date.
        context: cached tokens that ``verify_seconds`` hold for; shorter contexts are not told apart from it.
        context_seconds: what every further cached token adds, by ``verify_rows``; empty if that was not measured.
        longest: the longest context measured; 0 if only ``context`` was.
        plain: seconds of a step of plain decoding; None for ``verify(1) + overhead``. The engine does less around a
            step without a tree, so a measured curve has its own.

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
    context: float = 0.0
    context_seconds: tuple[float, ...] = ()
    longest: float = 0.0
    plain: float | None = None

    def __post_init__(self) -> None:
        self._check_context()
        for kind in ("verify", "draft"):
            rows, seconds = getattr(self, f"{kind}_rows"), getattr(self, f"{kind}_seconds")
            if len(rows) != len(seconds) or not rows:
                raise InputError(f"cost curve {self.name}: {kind} needs as many seconds as rows, at least one of each")
            if rows[0] < 1 or any(not a < b for a, b in pairwise(rows)):
                raise InputError(f"cost curve {self.name}: {kind} rows must rise from 1 or more; got {rows}")
            if not all(math.isfinite(s) and s >= 0 for s in seconds) or (kind == "verify" and min(seconds) <= 0):
                raise InputError(f"cost curve {self.name}: {kind} seconds must be positive numbers; got {seconds}")
            object.__setattr__(self, f"{kind}_seconds", _rising(seconds))
        for what, value in (("overhead", self.overhead), ("plain", self.plain or 0.0)):
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"cost curve {self.name}: {what} must be at least 0 seconds; got {value}")

    def _check_context(self) -> None:
        slopes = self.context_seconds
        if not (math.isfinite(self.context) and self.context >= 0 and math.isfinite(self.longest)):
            raise InputError(f"cost curve {self.name}: contexts must be numbers of tokens; got {self.context}")
        if not slopes:
            return
        if len(slopes) != len(self.verify_rows) or not all(math.isfinite(s) and s >= 0 for s in slopes):
            raise InputError(
                f"cost curve {self.name}: context_seconds needs one number of at least 0 per verify row; got {slopes}"
            )
        object.__setattr__(self, "context_seconds", _rising(slopes))

    def __str__(self) -> str:
        return self.name

    def verify(self, n: int, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one target forward over ``batch`` trees of ``n`` nodes, the roots included."""
        seconds = _at(n * batch, self.verify_rows, self.verify_seconds)
        if self.context_seconds and context is not None:
            more = max(context - self.context, 0.0)
            seconds += batch * more * _at(n, self.verify_rows, self.context_seconds)
        return seconds

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes; 0 for none."""
        return _at(w, self.draft_rows, self.draft_seconds) if w > 0 else 0.0

    def extrapolates(self, n: int, context: float | None = None, batch: int = 1) -> bool:
        """True where :meth:`verify` leaves the measured range."""
        known = not self.context_seconds or context is None or self.context <= context <= self.longest
        return batch > 1 or not known or not self.verify_rows[0] <= n <= self.verify_rows[-1]

    def as_dict(self) -> dict[str, Any]:
        """The JSON that :meth:`load` reads."""
        verify: dict[str, Any] = {"rows": self.verify_rows, "seconds": self.verify_seconds, "context": self.context}
        if self.context_seconds:
            verify |= {"context_seconds": self.context_seconds, "longest": self.longest}
        return {
            "verify": verify,
            "draft": {"rows": self.draft_rows, "seconds": self.draft_seconds},
            "overhead": self.overhead,
            **({} if self.plain is None else {"plain": self.plain}),
            "provenance": self.provenance,
        }

    def save(self, path: str | Path, **more: Any) -> None:
        """Write JSON that :meth:`load` reads; ``more`` goes in beside it (the single points, the machine)."""
        write_json(path, {**self.as_dict(), **more})

    @classmethod
    def load(cls, where: str | Path) -> CostCurve:
        """A shipped curve by name (``measured``) or a JSON file.

        Raises:
            InputError: if there is neither, or the file is not a curve.
        """
        curves = shipped()
        path = curves.get(str(where), Path(where))
        if not os.path.isfile(path):
            raise InputError(f"no cost curve {str(where)!r}; give one of {', '.join(curves)}, {EXAMPLES}")
        content = read_json(path)
        try:
            head, verify, draft = content["verify"], _points(content["verify"]), _points(content["draft"])
            plain = content.get("plain")
            return cls(
                *verify,
                *draft,
                overhead=real(content["overhead"]),
                name=str(where),
                provenance=printable(str(content.get("provenance", "")))[:MOST],
                context=real(head.get("context", 0)),
                context_seconds=reals(head.get("context_seconds", [])),
                longest=real(head.get("longest", 0)),
                plain=None if plain is None else real(plain),
            )
        except (KeyError, TypeError):
            raise InputError(
                f"{path} is not a cost curve: expected verify and draft, each with rows and seconds, and overhead"
            ) from None


def shipped() -> dict[str, Path]:
    """The curves that come with the package, by name."""
    return {p.stem: p for p in sorted((data_dir() / "costs").glob("*.json")) if p.stem not in HARDWARE}


def load_cost(where: str | Path) -> CostModel:
    """A cost model by name: a shipped curve, a JSON file, a typed table (:func:`typed_curve`), or hardware.

    Hardware is ``GPU[xCOUNT]:MODEL[+DRAFT][@DTYPE]``, see :func:`treespec.roofline.load_roofline`.

    Raises:
        InputError: for anything else, naming what there is.
    """
    text = str(where)
    if text in shipped() or os.path.isfile(text):
        return CostCurve.load(where)
    if re.match(r"\s*\d+\s*:", text):
        return typed_curve(text)
    if ":" in text:
        return load_roofline(text)
    return CostCurve.load(where)  # says what there is


def typed_curve(text: str) -> CostCurve:
    """A curve from a table of ``rows:milliseconds``: ``"1:24.5 36:28.1; draft 1:3.1 8:3.3; overhead 0.5"``.

    Points are parted by blanks or commas; ``draft`` and ``overhead`` may be left out and are 0 then.

    Raises:
        InputError: for anything else.
    """
    parts: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        word, _, rest = part.partition(" ")
        key, value = (word, rest) if word in ("verify", "draft", "overhead") else ("verify", part)
        parts[key] = value
    try:
        pairs = {k: [tuple(map(float, p.split(":"))) for p in re.split(r"[\s,]+", parts.get(k, "").strip()) if p]
                 for k in ("verify", "draft")}  # fmt: skip
        rows = {k: tuple(n for n, _ in found) for k, found in pairs.items()}
        seconds = {k: tuple(ms / 1e3 for _, ms in found) for k, found in pairs.items()}
        overhead = float(parts.get("overhead", 0)) / 1e3
    except ValueError:
        raise InputError(f"{text!r} is no table of costs: expected rows:milliseconds, such as {TABLE}") from None
    name = re.sub(r"[\s,]+", " ", text.strip())  # a policy's parameters are parted by commas
    draft = (rows["draft"], seconds["draft"]) if rows["draft"] else ((1.0,), (0.0,))
    return CostCurve(rows["verify"], seconds["verify"], *draft, overhead, name, "typed by hand")


@dataclass(frozen=True)
class At:
    """A cost model at a context and a batch, for whoever asks by nodes alone.

    Args:
        cost: any.
        context: cached tokens before each tree; None for the model's own.
        batch: trees in one forward; the draft's rows grow with it too.
    """

    cost: CostModel
    context: float | None = None
    batch: int = 1

    def __str__(self) -> str:
        return str(self.cost)

    @property
    def overhead(self) -> float:
        """Seconds per step outside both models' forwards."""
        return self.cost.overhead

    @property
    def plain(self) -> float:
        """Seconds of a step of plain decoding."""
        return plain_seconds(self.cost, self.context, self.batch)

    def verify(self, n: int, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one target forward over trees of ``n`` nodes, the roots included."""
        return self.cost.verify(n, self.context if context is None else context, batch * self.batch)

    def draft(self, w: int) -> float:
        """Seconds of one draft forward over ``w`` nodes of every tree."""
        return self.cost.draft(w * self.batch)

    def extrapolates(self, n: int) -> bool:
        """True where the cost model leaves what was measured, if it can tell."""
        asked = getattr(self.cost, "extrapolates", None)
        return bool(asked and asked(n, self.context, self.batch))


def plain_seconds(cost: CostModel, context: float | None = None, batch: int = 1) -> float:
    """Seconds of a step of plain decoding, the numerator of every speed-up."""
    own = getattr(cost, "plain", None)
    outside = cost.overhead if own is None else max(own - cost.verify(1), 0.0)
    return cost.verify(1, context, batch) + outside


def _points(content: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return reals(content["rows"]), reals(content["seconds"])


def _rising(values: tuple[float, ...]) -> tuple[float, ...]:
    from scipy.optimize import isotonic_regression  # half a second, which policies without a curve need not pay

    return tuple(isotonic_regression(values).x.tolist())


def _at(n: int, rows: tuple[float, ...], seconds: tuple[float, ...]) -> float:
    if n > rows[-1] and len(rows) > 1:
        slope = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0])
        return seconds[-1] + slope * (n - rows[-1])
    return float(np.interp(n, rows, seconds))
