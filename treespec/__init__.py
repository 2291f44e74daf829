"""treespec: tree-based speculative decoding with dynamic topology pruning, for unmodified Hugging Face models."""

from treespec import policies
from treespec.api import custom_generate, generate, start, steps
from treespec.drafters import ModelDrafter, NgramDrafter
from treespec.errors import TreespecError
from treespec.events import Generation, Stats, StepEvent
from treespec.pairs import Pair, load_pair
from treespec.placement import PlacementPlan, plan
from treespec.trace import Replay, Trace, replay
from treespec.tree import Reason, TokenTree, TreeBatch
from treespec.tune import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "Generation",
    "ModelDrafter",
    "NgramDrafter",
    "Pair",
    "PlacementPlan",
    "Reason",
    "Replay",
    "Stats",
    "StepEvent",
    "TokenTree",
    "Trace",
    "TreeBatch",
    "TreespecError",
    "Tuning",
    "custom_generate",
    "generate",
    "load_pair",
    "plan",
    "policies",
    "replay",
    "start",
    "steps",
    "tune",
]
