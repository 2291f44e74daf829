"""Figures on a page: what is sent when they are redrawn, what a click says, and that plotly.js comes once."""

import ipywidgets
import plotly.graph_objects as go
import pytest

from treespec.plots.trees import tree_parts
from treespec.tree import TokenTree
from treespec.widgets import live_figure
from treespec.widgets.live_figure import LiveFigure

SMALL, OTHER = TokenTree.from_lists([1, 2], [-1, 0]), TokenTree.from_lists([1, 2, 3], [-1, 0, 1])


@pytest.fixture
def figure():
    made = LiveFigure(tree_parts(SMALL, bonus=99))
    yield made
    made.close()


@pytest.fixture
def sent(figure, monkeypatch):
    """The names of the traits that each message to the page carries."""
    messages = []
    monkeypatch.setattr(figure, "_send", lambda message, buffers=None: messages.append(set(message["state"])))
    return messages


def test_it_shows_what_plotly_would(figure):
    assert figure.figure.to_dict() == go.Figure(figure.data, figure.look).to_dict()
    figure.show(tree_parts(OTHER))
    fresh = LiveFigure(tree_parts(OTHER))
    assert (figure.data, figure.look) == (fresh.data, fresh.look) and "template" not in figure.look
    assert sum(len(t.get("customdata") or ()) for t in figure.data if t.get("name")) == len(OTHER)
    fresh.close()


def test_only_what_changed_is_sent_and_in_one_message(figure, sent):
    data, look = tree_parts(SMALL, bonus=99)
    figure.show((data, look))
    assert sent == []
    figure.show((data, {**look, "height": 99}))
    figure.show((data[::-1], look))
    assert sent == [{"look"}, {"data", "look"}]


def test_a_click_gives_the_point_that_is_shown_now(figure):
    said = []
    root = next(i for i, trace in enumerate(figure.data) if (trace.get("customdata") or []) == [0])
    figure.on_point(root, said.append)
    figure.clicked = [root, 0, 1]
    figure.clicked = [root, 0, 2]  # the same point again
    assert said == [0, 0]
    figure.clicked = [root, 7, 3]  # a point of a figure that is gone
    figure.clicked = [len(figure.data) + 1, 0, 4]
    assert said == [0, 0]


def test_plotly_comes_once_for_a_kernel(figure):
    def brought():
        return [w for w in ipywidgets.widgets.widget._instances.values() if isinstance(w, live_figure.Plotly)]

    other = LiveFigure(tree_parts(OTHER))
    assert len(brought()) == 1 and len(figure._esm) < 5000 < 1e6 < len(brought()[0]._esm)
    brought()[0].close()
    again = LiveFigure(tree_parts(OTHER))
    assert len(brought()) == 1
    other.close()
    again.close()
