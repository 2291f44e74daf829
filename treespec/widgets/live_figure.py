"""A plotly figure on the page that is redrawn in place, by what changed since it was drawn last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as w
import plotly.graph_objects as go

from treespec.plots.style import Parts, plain, redraw
from treespec.plots.tables import figure_html

CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False}


class LiveFigure(w.Box):
    """A figure in a box that grows and shrinks with the page.

    Args:
        parts: traces and layout, as the ``X_parts`` functions of :mod:`treespec.plots` make them.
        least: pixels of width below which the box takes a line of its own.
    """

    def __init__(self, parts: Parts, least: int = 480) -> None:
        self.parts = plain(parts)
        self.figure = go.FigureWidget(*self.parts)
        self.figure._config = CONFIG
        super().__init__(
            [self.figure],
            layout=w.Layout(
                display="block", flex=f"1 1 {least}px", min_width="300px", max_width="100%", overflow="hidden"
            ),  # a block, so that the figure takes all of its width
        )

    def show(self, parts: Parts) -> None:
        """Draw other traces of the same number and order, and layout: only what differs travels to the page."""
        parts = plain(parts)
        redraw(self.figure, parts, self.parts)
        self.parts = parts

    def still(self) -> str:
        """The figure's title and points, for a page without plotly."""
        title = self.figure.layout.title.text or "figure"  # escaped when it was set
        return f"<details><summary>{title}</summary>{figure_html(self.figure)}</details>"

    def on_point(self, trace: int, work: Callable[[Any], None]) -> None:
        """Call ``work`` with the ``customdata`` of a point that is clicked in the trace of this number."""
        shown = self.figure.data[trace]

        def clicked(_: Any, points: Any, __: Any) -> None:
            if points.point_inds:
                work(shown.customdata[points.point_inds[0]])

        shown.on_click(clicked)

    def close(self) -> None:
        """Free the figure too, and the ipywidgets layout that plotly's own ``layout`` hides."""
        hidden = self.figure._trait_values.get("layout")
        self.figure.close()
        if isinstance(hidden, w.Widget):
            hidden.close()
        super().close()
