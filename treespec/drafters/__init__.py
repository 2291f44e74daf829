"""Drafters: what guesses the trees."""

from treespec.drafters.base import Drafted, Drafter, DraftRequest
from treespec.drafters.model import ModelDrafter
from treespec.drafters.ngram import NgramDrafter

__all__ = ["DraftRequest", "Drafted", "Drafter", "ModelDrafter", "NgramDrafter"]
