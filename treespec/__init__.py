"""treespec: tree-based speculative decoding with dynamic topology pruning, for unmodified Hugging Face models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespec.lazy import lazy

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

if TYPE_CHECKING:
    from treespec import policies
    from treespec.api import custom_generate, generate, start, steps
    from treespec.drafters import ModelDrafter, NgramDrafter
    from treespec.errors import TreespecError
    from treespec.events import Generation, Stats, StepEvent
    from treespec.pairs import Pair, load_pair
    from treespec.placement import PlacementPlan, plan
    from treespec.trace import Trace
    from treespec.trace.replay import Replay, replay
    from treespec.tree import Reason, TokenTree, TreeBatch
    from treespec.tune import Tuning, tune
else:
    WHERE = {
        "Generation": "events",
        "ModelDrafter": "drafters",
        "NgramDrafter": "drafters",
        "Pair": "pairs",
        "PlacementPlan": "placement",
        "Reason": "tree",
        "Replay": "trace.replay",
        "Stats": "events",
        "StepEvent": "events",
        "TokenTree": "tree",
        "Trace": "trace",
        "TreeBatch": "tree",
        "TreespecError": "errors",
        "Tuning": "tune",
        "custom_generate": "api",
        "generate": "api",
        "load_pair": "pairs",
        "plan": "placement",
        "replay": "trace.replay",
        "start": "api",
        "steps": "api",
        "tune": "tune",
    }
    __getattr__, __dir__ = lazy(__name__, WHERE)
