"""Rows of settings as :class:`treespec.scoring.Score`, the table, the tuner and ``compare`` give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def step_ms(row: Row) -> float:
    """Milliseconds of a step."""
    if "step_ms" in row:
        return float(row["step_ms"])
    return float(row["verify_ms"] + row["draft_ms"] + row["overhead_ms"])


def on_log_axes(row: Row) -> bool:
    """Whether a row has a place there: a text of one token has no steps, so nothing per step."""
    return all(math.isfinite(v) and v > 0 for v in (step_ms(row), float(row["tokens_per_step"])))


def plain_ms(rows: Iterable[Row]) -> float:
    """Milliseconds of a step of plain decoding, by any row: what its speed-up is measured against."""
    for row in rows:
        return float(row["speedup"] * step_ms(row) / row["tokens_per_step"])
    return float("nan")


def named(row: Row) -> str:
    """What a row is called: its strategy, else its setting."""
    return str(row.get("strategy") or row["policy"])
