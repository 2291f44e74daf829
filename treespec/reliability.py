"""Are the draft's probabilities true? Predicted against observed acceptance, by depth, rank and entropy band."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from treespec.calibration import Calibration, Outcomes
from treespec.errors import InputError

BANDS = (0.0, 0.5, 1.0, 2.5, 4.0, math.inf)  # of entropy, bits


@dataclass
class Reliability:
    """Predicted against observed, in bins of equal width in probability.

    Args:
        count: ``[bins]`` children per bin.
        predicted, observed: ``[bins]`` means; NaN in empty bins.
        error: expected calibration error, the mean of |predicted - observed| weighted by count.
    """

    count: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    error: float


def reliability(
    seen: Outcomes, by: str = "depth", calibration: Calibration | None = None, bins: int = 10
) -> dict[str, Reliability]:
    """Reliability of all children (key ``"all"``) and group by group.

    Args:
        seen: outcomes.
        by: ``depth``, ``rank`` or ``entropy`` (bands of bits, keys such as ``"1-2.5"``).
        calibration: apply it first; None judges the draft as it is.
        bins: of probability.

    Raises:
        InputError: for an unknown ``by``.
    """
    masks: dict[str, Tensor] = {"all": torch.ones(len(seen), dtype=torch.bool)}
    if by in ("depth", "rank"):
        value = getattr(seen, by)
        masks |= {str(v): value == v for v in value.unique().tolist()}
    elif by == "entropy":
        for low, high in pairwise(BANDS):
            masks[f"{low:g}-{high:g}"] = (seen.entropy >= low) & (seen.entropy < high)
    else:
        raise InputError(f"reliability goes by depth, rank or entropy; got {by!r}")
    logp = seen.logp.clone()
    for depth in seen.depth.unique().tolist() if calibration else []:
        here = seen.depth == depth
        logp[here] = calibration.apply(depth, seen.logp[here], seen.entropy[here])  # type: ignore[union-attr]
    predicted, right = logp.exp().double().numpy(), seen.accepted.double().numpy()
    return {key: _reliability(predicted[m.numpy()], right[m.numpy()], bins) for key, m in masks.items() if m.any()}


def _reliability(predicted: np.ndarray, right: np.ndarray, bins: int) -> Reliability:
    at = np.minimum((predicted * bins).astype(int), bins - 1)
    count = np.bincount(at, minlength=bins)
    with np.errstate(invalid="ignore"):  # empty bins
        means = [np.bincount(at, weights=x, minlength=bins) / count for x in (predicted, right)]
    error = float(np.nansum(count * np.abs(means[0] - means[1])) / max(len(predicted), 1))
    return Reliability(count, means[0], means[1], error)
