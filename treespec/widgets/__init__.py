"""Dashboards for notebooks: each is one call that returns something to display. Needs the ``lab`` extra.

A name is imported when it is asked for, so that one dashboard does not pay for the figures of another.
"""

from __future__ import annotations

from treespec.lazy import lazy

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

__getattr__, __dir__ = lazy(__name__, WHERE)
