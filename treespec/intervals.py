"""Intervals of measured numbers by bootstrap (scipy)."""

from __future__ import annotations

import numpy as np

RESAMPLED_AT_ONCE = 1 << 20  # numbers that a bootstrap holds in memory


def ratio_interval(base: np.ndarray, own: np.ndarray, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval over prompts of ``sum(base) / sum(own)``; (r, r) where one prompt allows none."""
    if len(base) < 2 or np.allclose(base / own, (base / own)[0]):
        ratio = float(base.sum() / own.sum())
        return ratio, ratio
    from scipy import stats  # most of a second, which only a bootstrap needs

    result = stats.bootstrap(
        (base, own),
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=2000,
        confidence_level=level,
        method="percentile",
        batch=max(1, RESAMPLED_AT_ONCE // len(base)),
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def median_interval(values: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval; the range for fewer than three values."""
    data = np.asarray(values)
    if len(data) < 3 or np.ptp(data) == 0:
        return float(np.median(data)), float(data.min()), float(data.max())
    from scipy import stats

    result = stats.bootstrap(
        (data,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(np.median(data)), float(result.low), float(result.high)
