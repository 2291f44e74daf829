"""Drafters: what guesses the trees."""

from treespec.drafters.base import Drafted, Drafter, DraftRequest, FeatureDrafter
from treespec.drafters.head import HeadDrafter
from treespec.drafters.mix import MixDrafter
from treespec.drafters.model import ModelDrafter
from treespec.drafters.ngram import NgramDrafter

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
