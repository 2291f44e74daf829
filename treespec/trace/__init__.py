"""Traces: recorded supertrees of a draft along a target's text, and exact replay of any policy on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespec.lazy import lazy
from treespec.trace.explain import Explained, explain
from treespec.trace.replay import Replay, replay
from treespec.trace.schema import Caps, PromptInfo
from treespec.trace.store import Trace, merge

__all__ = ["Caps", "Explained", "PromptInfo", "Replay", "Sampling", "Trace", "explain", "merge", "record", "replay"]

if TYPE_CHECKING:
    from treespec.trace.record import Sampling, record
else:
    WHERE = {"Sampling": "record", "record": "record"}
    __getattr__, __dir__ = lazy(__name__, WHERE)
