"""What the benchmarks share: one line per number, a median with its bootstrap interval."""

from __future__ import annotations

from treespec.intervals import median_interval


def show(name: str, values: list[float], unit: str = "") -> None:
    """One line: name, median, interval."""
    middle, low, high = median_interval(values)
    print(f"{name:<58} {middle:8.3f}{unit}  (95 %: {low:.3f} to {high:.3f}, n = {len(values)})", flush=True)
