"""Dashboards for notebooks: each is one call that returns something to display. Needs the ``lab`` extra.

A name is imported when it is asked for, so that one dashboard does not pay for the figures of another.
"""

from __future__ import annotations

import importlib
from typing import Any

try:
    import ipywidgets as _  # noqa: F401
except ImportError as error:
    raise ImportError("treespec.widgets needs ipywidgets; install it with: pip install 'treespec[lab]'") from error

WHERE = {
    "TreeExplorer": "explorer",
    "LiveDecoder": "live",
    "MaskView": "mask",
    "LosslessLab": "lossless",
    "PlacementView": "placement",
}

__all__ = ["LiveDecoder", "LosslessLab", "MaskView", "PlacementView", "TreeExplorer"]


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
