"""The mask on show is the mask that the engine hands to the target, and so are the position ids."""

import re

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances

from treespec import Reason, TokenTree
from treespec.errors import InputError
from treespec.pairs import load_pair
from treespec.session import Session
from treespec.widgets import MaskView


@pytest.fixture
def pruned():
    """Root with two children; the first has a pruned child and a kept one."""
    tree = TokenTree.from_lists(
        [5, 1, 2, 3, 4], [-1, 0, 0, 1, 1], reason=[0, 0, 0, Reason.BELOW_TAU, 0], logp=[0, -0.5, -1, -3, -0.4]
    )
    tree.accepted = [1, 4]
    return tree


def cells(svg):
    """``[n, n]`` bool of the filled cells."""
    rows = svg.split('<g class="row"')[1:]
    out = np.zeros((len(rows), len(rows)), dtype=bool)
    for i, row in enumerate(rows):
        out[i, [int(j) for j in re.findall(r'data-column="(\d+)"', row)]] = True
    return out


def test_mask_and_positions_are_those_of_the_engine(monkeypatch):
    asked = []
    honest = Session.tree

    def spy(self, tokens, depths, visible, features=None):
        if self.owner.role == "target":
            asked.append((list(tokens), [self.length + d for d in depths], visible.copy()))
        return honest(self, tokens, depths, visible, features)

    pair = load_pair("toy", "model")
    pair.generate("the cat", policy="plain", max_new_tokens=2)  # the self-check has trees of its own
    monkeypatch.setattr(Session, "tree", spy)
    out = pair.generate("the cat", policy="dynamic:tau=0.05,high=9,budget=9", max_new_tokens=12)
    steps = [event for event in out.steps if not event.is_prefill]
    assert len(asked) == len(steps) and max(event.nodes for event in steps) > 3
    for event, (tokens, positions, visible) in zip(steps, asked):
        view = MaskView(event)
        assert view.tree.token.tolist() == tokens and view.positions.tolist() == positions
        assert (view.visible == visible).all() and (cells(view.canvas.mask) == visible).all()
        assert re.findall(r'class="position">(\d+)<', view.canvas.mask) == [str(p) for p in positions]
        view.close()


def test_pruned_nodes_are_left_out(pruned):
    view = MaskView(pruned, position=7)
    assert view.tree.token.tolist() == [5, 1, 2, 4] and view.positions.tolist() == [7, 8, 8, 9]
    assert cells(view.canvas.mask).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert view.canvas.parent == [-1, 0, 0, 1] and view.tree.accepted == [1, 3] and pruned.accepted == [1, 4]
    assert view.canvas.said[3] == (
        "4 stands at position 9 and sees the 7 tokens before and 5 → 1 → 4; 1 of the 4 nodes are hidden from it."
    )
    assert view.canvas.tree.count("<title>") == 4, "one group per node: the script counts on it"


def test_the_table_says_the_same(pruned):
    rows = re.findall(r"<tr>(<td>.*?)</tr>", MaskView(pruned, position=7).table.value)
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [
        ["0", "5", "–", "7", "0"], ["1", "1", "0", "8", "0, 1"], ["2", "2", "0", "8", "0, 2"], ["3", "4", "1", "9", "0, 1, 3"],
    ]  # fmt: skip


def test_without_text_before_there_is_nothing_to_see_there(pruned):
    assert 'opacity=".55"' not in MaskView(pruned).canvas.mask and 'opacity=".55"' in MaskView(pruned, 3).canvas.mask


def test_selection_is_one_value_both_ways(pruned):
    view = MaskView(pruned)
    assert view.selected == -1
    view.selected = 2
    assert view.canvas.selected == 2
    view.canvas.selected = 1
    assert view.selected == 1


def test_tokens_are_escaped(pruned):
    pruned.labels = ["<script>x</script>"] * 5
    view = MaskView(pruned)
    assert "<script" not in view.canvas.mask + view.canvas.tree + view.table.value
    assert "&lt;script&gt;" in view.table.value


@pytest.mark.parametrize("nodes", [1, 48, 340])
def test_any_size(nodes):
    tree = TokenTree.from_lists(range(nodes), [-1] + [(i - 1) // 3 for i in range(1, nodes)])
    view = MaskView(tree, position=2)
    assert (cells(view.canvas.mask) == tree.ancestors()).all()
    assert ("position id" in view.canvas.mask) == (nodes <= 80)


def test_wrong_input_is_refused(pruned):
    with pytest.raises(InputError, match="shows a TokenTree or a StepEvent; got a str"):
        MaskView("tree")
    with pytest.raises(InputError, match="position must be 0 or more; got -1"):
        MaskView(pruned, -1)


def test_closing_frees_everything(pruned):
    before = set(_instances)
    MaskView(pruned).close()
    assert set(_instances) == before
