"""A plotly figure on the page that is redrawn in place, by what changed since it was drawn last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as w
import numpy as np
import plotly.graph_objects as go

from treespec.plots.style import Parts

CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False}


class LiveFigure(w.Box):
    """A figure in a box that grows and shrinks with the page.

    Args:
        parts: traces and layout, as the ``X_parts`` functions of :mod:`treespec.plots` make them.
        least: pixels of width below which the box takes a line of its own.
    """

    def __init__(self, parts: Parts, least: int = 480) -> None:
        self.parts = parts
        self.figure = go.FigureWidget(*parts)
        self.figure._config = CONFIG
        super().__init__(
            [self.figure],
            layout=w.Layout(flex=f"1 1 {least}px", min_width="300px", max_width="100%", overflow="hidden"),
        )

    def show(self, parts: Parts) -> None:
        """Draw other traces of the same number and order, and layout: only what differs travels to the page."""
        traces, layout = parts
        old_traces, old_layout = self.parts
        with self.figure.batch_update():
            for shown, old, new in zip(self.figure.data, old_traces, traces, strict=True):
                changed = {key: value for key, value in new.items() if not _same(old.get(key), value)}
                if changed:
                    shown.update(changed, overwrite=False)
            for key, value in layout.items():
                if not _same(old_layout.get(key), value):
                    self.figure.layout[key] = value
        self.parts = parts

    def on_point(self, trace: int, work: Callable[[Any], None]) -> None:
        """Call ``work`` with the ``customdata`` of a point that is clicked in the trace of this number."""
        shown = self.figure.data[trace]

        def clicked(_: Any, points: Any, __: Any) -> None:
            if points.point_inds:
                work(shown.customdata[points.point_inds[0]])

        shown.on_click(clicked)

    def close(self) -> None:
        """Free the figure too."""
        self.figure.close()
        super().close()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)
