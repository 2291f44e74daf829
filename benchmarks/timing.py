"""What the benchmarks share: medians of ratios with a bootstrap interval."""

from __future__ import annotations

import numpy as np
from scipy import stats


def median_interval(values: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    data = np.asarray(values)
    if len(data) < 3:
        return float(np.median(data)), float(data.min()), float(data.max())
    result = stats.bootstrap(
        (data,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(np.median(data)), float(result.low), float(result.high)


def show(name: str, values: list[float], unit: str = "") -> None:
    """One line: name, median, interval."""
    middle, low, high = median_interval(values)
    print(f"{name:<58} {middle:8.3f}{unit}  (95 %: {low:.3f} to {high:.3f}, n = {len(values)})", flush=True)
