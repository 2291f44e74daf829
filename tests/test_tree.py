"""TokenTree and TreeBatch: structure, masks, positions, display."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treespec import Reason, TokenTree, TreeBatch
from treespec.draw import tree_html
from treespec.errors import TreespecError
from treespec.tree import ARRAYS, visible


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


def small():
    """A root with two children, the second of which has two; texts, entropies and laws beside."""
    tree = TokenTree.from_lists([5, 6, 7, 8, 9], [-1, 0, 0, 2, 2], [0, -1, -2, -3, -1], [2, 0, 1, 3, 4])
    tree.labels, tree.tokenizer = ["r", "a", "b", "c", "d"], Words()
    tree.laws = {0: "of 0", 2: "of 2"}
    return tree


class Words:
    """A tokenizer that shows which ids it was asked for."""

    def decode(self, ids):
        return f"w {ids}"


def test_what_is_derived_from_lists():
    tree = TokenTree.from_lists([5, 6, 7, 8, 9], [-1, 0, 0, 2, 2], [0, -1, -2, -3, -1])
    assert tree.depth.tolist() == [0, 1, 1, 2, 2]
    assert tree.log_path.tolist() == [0, -1, -2, -5, -3]
    assert tree.rank.tolist() == [0, 0, 1, 0, 1]
    assert tree.reason.tolist() == [Reason.KEPT] * 5 and tree.candidates == 4
    assert bool(tree.entropy.isnan().all()) and len(tree.entropy) == 5
    bare = TokenTree.from_lists([5, 6], [-1, 0])
    assert bare.logp.tolist() == bare.log_path.tolist() == [0, 0]
    assert (bare.labels, bare.tokenizer, bare.accepted, bare.laws) == (None, None, [], {})


def test_what_is_given_is_taken_over_with_its_type():
    tree = TokenTree.from_lists([5, 6, 7], [-1, 0, 0], [0, -1, -2], [1, 2, 3], [0, 4, 2], [0, 1, 3])
    assert tree.logp.tolist() == [0, -1, -2] and tree.entropy.tolist() == [1, 2, 3]
    assert tree.rank.tolist() == [0, 4, 2] and tree.reason.tolist() == [0, 1, 3]
    types = {name: str(getattr(tree, name).dtype).removeprefix("torch.") for name in ARRAYS}
    floats, wholes = dict.fromkeys(("logp", "log_path", "entropy"), "float32"), ("token", "parent", "depth", "rank")
    assert types == {**dict.fromkeys(wholes, "int64"), **floats, "reason": "uint8"}


def test_the_root_alone():
    tree = TokenTree.root_only(7)
    assert tree.token.tolist() == [7] and tree.parent.tolist() == [-1] and tree.candidates == 0
    assert tree.kept() == (tree, [0]) and tree.children() == [{}] and tree.path(0) == [0]
    assert tree.logp.tolist() == tree.log_path.tolist() == [0.0]


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.half, lambda t: t.clone().requires_grad_()])
def test_probabilities_of_any_kind_are_kept_in_single_precision(change):
    tree = TokenTree.from_lists([5, 7], [-1, 0], [0.0, -0.5], [1.5, 0.25])
    names = ("logp", "log_path", "entropy")
    other = dataclasses.replace(tree, **{name: change(getattr(tree, name)) for name in names})
    for name in names:
        value = getattr(other, name)
        assert value.dtype == torch.float32 and not value.requires_grad
        assert value.tolist() == getattr(tree, name).tolist()


@pytest.mark.parametrize("given", [dict(logp=[0]), dict(entropy=[0]), dict(rank=[0, 0, 0]), dict(reason=[0])])
def test_every_list_must_be_as_long_as_the_tokens(given):
    with pytest.raises(TreespecError, match=r"^a tree needs equally long lists with at least the root; got 2 tokens$"):
        TokenTree.from_lists([1, 2], [-1, 0], **given)


def test_a_parent_must_come_before_its_child():
    with pytest.raises(TreespecError, match=r"^node 1 has parent 1; parents must come before their children, root -1$"):
        TokenTree.from_lists([1, 2], [-1, 1])


def test_children_and_paths_by_hand():
    tree = small()
    assert tree.children() == [{6: 1, 7: 2}, {}, {8: 3, 9: 4}, {}, {}]
    assert tree.path(4) == [0, 2, 4] and tree.path(0) == [0]


def test_a_subtree_takes_everything_along():
    tree = small()
    sub = tree.select(torch.tensor([0, 2, 4]))
    assert sub.parent.tolist() == [-1, 0, 1]
    assert {name: getattr(sub, name).tolist() for name in ARRAYS} == {
        "token": [5, 7, 9], "parent": [-1, 0, 1], "depth": [0, 1, 2], "logp": [0, -2, -1], "log_path": [0, -2, -3],
        "entropy": [2, 1, 4], "rank": [0, 1, 1], "reason": [0, 0, 0],
    }  # fmt: skip
    assert sub.labels == ["r", "b", "d"] and sub.tokenizer is tree.tokenizer
    assert sub.laws == {0: "of 0", 1: "of 2"}
    assert tree.select(torch.tensor([0, 1])).laws == {0: "of 0"}
    tree.labels = None
    assert tree.select(torch.tensor([0])).labels is None


@pytest.mark.parametrize("index", [[], [1], [2, 4], [0, 1, 3]])
def test_a_subtree_without_the_root_or_a_parent_is_refused(index):
    with pytest.raises(TreespecError, match=r"^a subtree must hold the root and the parent of each of its nodes$"):
        small().select(torch.tensor(index, dtype=torch.long))


def test_of_a_tree_that_is_kept_whole_nothing_is_copied():
    tree = small()
    kept, origin = tree.kept()
    assert kept is tree and origin == [0, 1, 2, 3, 4]


def test_repr_line_by_line():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 1], [0, -0.5, -3, -0.5], reason=[0, 0, Reason.BELOW_TAU, 0])
    tree.labels, tree.accepted = ["<r>", "a", "b", "c"], [1]
    assert repr(tree).split("\n") == [
        "TokenTree(2 candidates kept of 3, depth 2)",
        "<r>  P=1.000",
        "  a  P=0.607 ✓",
        "    c  P=0.368",
        "  b  P=0.050  ✗ below_tau",
    ]


@pytest.mark.parametrize("size, more", [(40, []), (41, ["… and 1 more nodes"]), (60, ["… and 20 more nodes"])])
def test_repr_shows_forty_nodes(size, more):
    lines = repr(TokenTree.from_lists(range(size), [-1] + [0] * (size - 1))).split("\n")
    assert len(lines) == 41 + len(more) and lines[41:] == more and lines[1:3] == ["0  P=1.000", "  1  P=1.000"]


def test_labels_are_texts_then_the_tokenizers_then_ids():
    tree = small()
    assert tree.label(1) == "a"
    tree.labels = None
    assert tree.label(1) == "w␣[6]"
    tree.tokenizer = None
    assert tree.label(1) == "6"


def test_what_cannot_be_seen_is_shown():
    assert visible("a b\nc\td") == "a␣b⏎c⇥d"
    assert visible("é\x00\x1b[0m\u200b") == r"é\x00\x1b[0m\u200b"


def test_in_a_notebook_a_tree_is_a_picture():
    assert small()._repr_html_() == tree_html(small()) and "<svg" in tree_html(small())


def test_padding_is_nothing_that_could_be_taken_for_a_node():
    one = TokenTree.from_lists([5, 6, 7], [-1, 0, 1], [0, -1, -2], [1, 2, 3], [0, 1, 2], [0, 1, 2])
    batch = TreeBatch.stack([one, TokenTree.root_only(9)])
    padded = {name: getattr(batch, name)[1, 1:].tolist() for name in ARRAYS if name != "entropy"}
    assert padded == {
        "token": [0, 0], "parent": [-1, -1], "depth": [0, 0], "logp": [-np.inf] * 2, "log_path": [-np.inf] * 2,
        "rank": [0, 0], "reason": [Reason.NOT_PROPOSED] * 2,
    }  # fmt: skip
    assert batch.entropy[1].isnan().tolist() == [True] * 3 and batch.entropy[0].tolist() == [1, 2, 3]
    assert batch.present.tolist() == [[True] * 3, [True, False, False]]
    first, second = batch.trees()
    assert all(torch.equal(getattr(first, name), getattr(one, name)) for name in ARRAYS)
    assert len(second) == 1 and second.token.tolist() == [9]
    first.token[0] = 77
    assert int(batch.token[0, 0]) == 5, "its own memory"


def test_a_batchs_masks_and_positions_by_hand():
    deep = TokenTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 1])
    batch = TreeBatch.stack([deep, TokenTree.root_only(9)])
    assert batch.ancestors().int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]
    assert batch.positions(torch.tensor([10, 20])).tolist() == [[10, 11, 11, 12], [20] * 4]
