"""Drafters: what guesses the trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespec.lazy import lazy

__all__ = [
    "DraftRequest",
    "Drafted",
    "Drafter",
    "FeatureDrafter",
    "HeadDrafter",
    "MixDrafter",
    "ModelDrafter",
    "NgramDrafter",
]

if TYPE_CHECKING:
    from treespec.drafters.base import Drafted, Drafter, DraftRequest, FeatureDrafter
    from treespec.drafters.head import HeadDrafter
    from treespec.drafters.mix import MixDrafter
    from treespec.drafters.model import ModelDrafter
    from treespec.drafters.ngram import NgramDrafter
else:
    WHERE = {
        "Drafted": "base",
        "Drafter": "base",
        "DraftRequest": "base",
        "FeatureDrafter": "base",
        "HeadDrafter": "head",
        "MixDrafter": "mix",
        "ModelDrafter": "model",
        "NgramDrafter": "ngram",
    }
    __getattr__, __dir__ = lazy(__name__, WHERE)
