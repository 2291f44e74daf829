"""A plotly figure on the page that is redrawn in place, for dashboards that answer a moving slider.

Plotly's own ``FigureWidget`` checks every value in Python, brings plotly.js once for each figure, draws every message
in a task of its own and answers each of them with four. Here plotly.js comes once, the last state wins, and figures
that changed together are drawn together, in one frame of the browser (docs/LOG.md has the times).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import ipywidgets as w
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from treespec.plots.style import Parts, plain
from treespec.plots.tables import figure_html

# Figures and plotly.js may come in either order: who comes first makes the promise that the figures wait for.
PROMISE = """
const shared = globalThis.treespecPlotly ??= {};
shared.promise ??= new Promise((resolve) => { shared.resolve = resolve; });
"""

# plotly.js looks for `module` and `define`, which pages with require.js have.
PLOTLY = """
const load = () => { const module = { exports: {} }, define = undefined;
%s
return module.exports; };
function initialize() {
  if (!shared.loaded) shared.resolve(load());
  shared.loaded = true;
}
export default { initialize };
"""

SCRIPT = """
const config = { displayModeBar: false, scrollZoom: false };
async function render({ model, el }) {
  const plot = document.createElement("div");
  plot.setAttribute("role", "img");
  el.append(plot);
  let wide = 0, frame = 0, gone = false, asked = () => {};
  const ask = () => asked();
  const fit = new ResizeObserver(([entry]) => {
    const room = Math.floor(entry.contentRect.width);
    if (!room || room === wide) return;
    wide = room;
    ask();
    model.set("wide", wide);
    model.save_changes();
  });
  fit.observe(el);
  model.on("change:data change:look", ask);
  shared.promise.then((Plotly) => {
    if (gone) return;
    let listening = false;
    function draw() {
      frame = 0;
      if (gone || !wide) return;  // drawn when there is room
      const look = structuredClone(model.get("look"));  // plotly writes into what it is given
      plot.setAttribute("aria-label", look.title?.text ?? "figure");
      Plotly.react(plot, model.get("data").map((trace) => ({ ...trace })), { ...look, width: wide }, config);
      if (listening) return;
      listening = true;
      plot.on("plotly_click", ({ points: [point] }) => {
        model.set("clicked", [point.curveNumber, point.pointNumber, model.get("clicked")[2] + 1]);
        model.save_changes();
      });
    }
    asked = () => { frame ||= requestAnimationFrame(draw); };
    ask();
  });
  return () => {
    gone = true;
    cancelAnimationFrame(frame);
    fit.disconnect();
    model.off("change:data change:look", ask);
    shared.promise.then((Plotly) => Plotly.purge(plot));
  };
}
export default { render };
"""


class Plotly(anywidget.AnyWidget):
    """plotly.js, for all figures of a page."""

    def __init__(self) -> None:
        self._esm = PROMISE + PLOTLY.replace("%s", get_plotlyjs())
        super().__init__()


_plotly: list[Plotly] = []  # of this kernel


def bring_plotly() -> None:
    """See to it that plotly.js is on the pages of this kernel."""
    if not _plotly or _plotly[0].comm is None:
        _plotly[:] = [Plotly()]


class LiveFigure(anywidget.AnyWidget):
    """A figure that grows and shrinks with the page.

    Args:
        parts: traces and layout, as the ``X_parts`` functions of :mod:`treespec.plots` make them.
        least: pixels of width below which it takes a line of its own; two fit on a line at most.

    Attributes:
        data: the traces, as plotly.js takes them.
        look: the layout.
        wide: pixels that it has on the page, once it is there.
        clicked: numbers of the trace and of the point that was clicked last, and how many clicks there were.
    """

    _esm = PROMISE + SCRIPT
    data = traitlets.List().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)
    clicked = traitlets.List([-1, -1, 0]).tag(sync=True)
    wide = traitlets.Int(620).tag(sync=True)

    def __init__(self, parts: Parts, least: int = 480) -> None:
        bring_plotly()
        data, look = _written(parts)
        self._answers: dict[int, Callable[[Any], None]] = {}
        super().__init__(
            data=data,
            look=look,
            layout=w.Layout(
                display="block", flex=f"1 1 max({least}px, 40%)", min_width="300px", max_width="100%", overflow="hidden"
            ),  # a block, so that the figure takes all of its width
        )
        self.observe(self._answer, "clicked")

    def show(self, parts: Parts) -> None:
        """Draw other traces and another layout; what did not change is not sent."""
        data, look = _written(parts)
        with self.hold_sync():  # one message for both
            self.data, self.look = data, look

    @property
    def figure(self) -> go.Figure:
        """What is shown, as a figure of its own."""
        return go.Figure(self.data, self.look)

    def still(self) -> str:
        """The figure's title and points, for a page without plotly."""
        title = self.look.get("title", {}).get("text") or "figure"  # escaped when it was set
        return f"<details><summary>{title}</summary>{figure_html(self.figure)}</details>"

    def on_point(self, trace: int, work: Callable[[Any], None]) -> None:
        """Call ``work`` with the ``customdata`` of a point that is clicked in the trace of this number."""
        self._answers[trace] = work

    def _answer(self, change: Any) -> None:
        trace, point, _ = self.clicked
        work = self._answers.get(trace)
        known = self.data[trace].get("customdata") or [] if work is not None else []
        if work is not None and point < len(known):  # else the figure has changed since
            work(known[point])


def _written(parts: Parts) -> Parts:
    data, look = plain(parts)
    return data, {key: value for key, value in look.items() if key != "template"}
