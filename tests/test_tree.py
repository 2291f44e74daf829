"""TokenTree and TreeBatch: structure, masks, positions, display."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treespec import Reason, TokenTree, TreeBatch
from treespec.errors import TreespecError


@st.composite
def trees(draw, most=40):
    size = draw(st.integers(1, most))
    parent = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    token = [draw(st.integers(0, 20)) for _ in range(size)]
    logp = [0.0] + [-draw(st.floats(0, 5, width=32)) for _ in range(1, size)]
    return TokenTree.from_lists(token, parent, logp)


@given(trees())
def test_mask_shows_exactly_the_path(tree):
    visible = tree.ancestors()
    for node in range(len(tree)):
        assert sorted(np.flatnonzero(visible[node])) == tree.path(node)


@given(trees())
def test_depth_and_path_probability_follow_the_path(tree):
    for node in range(len(tree)):
        path = tree.path(node)
        assert int(tree.depth[node]) == len(path) - 1
        assert float(tree.log_path[node]) == pytest.approx(float(tree.logp[path].sum()), abs=1e-4)


@given(st.lists(trees(12), min_size=1, max_size=5))
def test_batches_hold_the_same_trees(several):
    batch = TreeBatch.stack(several)
    for one, again in zip(several, batch.trees()):
        assert again.token.tolist() == one.token.tolist() and again.parent.tolist() == one.parent.tolist()
    masks = batch.ancestors()
    for b, one in enumerate(several):
        assert np.array_equal(masks[b, : len(one), : len(one)].numpy(), one.ancestors())
        assert masks[b].any(-1).all(), "a row that sees nothing gives NaN in attention"
    assert torch.equal(batch.positions(torch.arange(len(several)))[-1, : len(one)], one.positions(len(several) - 1))


def test_siblings_share_a_position():
    tree = TokenTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 2])
    assert tree.positions(10).tolist() == [10, 11, 11, 12]  # by depth, not by flat order


def test_masks_of_more_than_64_nodes():
    chain = TokenTree.from_lists(range(100), range(-1, 99))
    assert chain.ancestors()[99].all()  # no bitmask to overflow


def test_select_keeps_structure_and_refuses_orphans():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], [0, -1, -2, -3])
    sub = tree.select(torch.tensor([0, 2, 3]))
    assert sub.parent.tolist() == [-1, 0, 1] and sub.token.tolist() == [1, 3, 4]
    with pytest.raises(TreespecError, match="parent"):
        tree.select(torch.tensor([0, 3]))


def test_kept_maps_back_to_the_whole_tree():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], reason=[0, Reason.BELOW_TAU, 0, 0])
    kept, origin = tree.kept()
    assert origin == [0, 2, 3] and kept.token.tolist() == [1, 3, 4] and tree.candidates == 2


def test_of_duplicate_children_the_first_counts():
    assert TokenTree.from_lists([1, 7, 7], [-1, 0, 0]).children()[0] == {7: 1}


@pytest.mark.parametrize("parent", [[-1, 1], [0, 0], [-1, 2, 0], [-1, -1]])
def test_unordered_parents_are_refused(parent):
    with pytest.raises(TreespecError, match="parent"):
        TokenTree.from_lists([0] * len(parent), parent)


def test_uneven_or_empty_lists_are_refused():
    with pytest.raises(TreespecError, match="equally long"):
        TokenTree.from_lists([1, 2], [-1])
    with pytest.raises(TreespecError, match="root"):
        TokenTree.from_lists([], [])


def test_repr_shows_tokens_probabilities_and_reasons():
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 0], [0, -0.5, -3], reason=[0, 0, Reason.BELOW_TAU])
    tree.labels, tree.accepted = ["<r>", " hi\n", "no"], [1]
    text = repr(tree)
    assert "␣hi⏎" in text and "✓" in text and "below_tau" in text and "P=0.607" in text
    assert "more nodes" in repr(TokenTree.from_lists(range(60), [-1] + [0] * 59))
