"""Pure figures: rows, trees and traces to plotly figures, usable without widgets or a notebook. ``treespec[lab]``."""

from treespec.plots.costs import cost_figure, frontier_figure, time_figure
from treespec.plots.steps import step_figure
from treespec.plots.tables import figure_html, table_html
from treespec.plots.texts import entropy_figure, token_texts
from treespec.plots.trees import tree_figure

__all__ = [
    "cost_figure",
    "entropy_figure",
    "figure_html",
    "frontier_figure",
    "step_figure",
    "table_html",
    "time_figure",
    "token_texts",
    "tree_figure",
]
