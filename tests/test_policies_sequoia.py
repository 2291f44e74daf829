"""Sequoia: the programme against every tree there is, the size that is fastest, and the shape the engine really grows."""

import functools
import json

import pytest
import torch
from drafts import Draft, grown
from hypothesis import given
from hypothesis import strategies as st

from treespec.cost import CostCurve
from treespec.errors import TreespecError
from treespec.policies import Sequoia
from treespec.policies.sequoia import read_acceptance
from treespec.policies.shape import best_size, best_tree
from treespec.tree import Reason, TokenTree

vectors = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(lambda v: tuple(x / max(sum(v), 1.0) for x in v))


@functools.cache
def forests(nodes, depth):
    """Every ordered forest of exactly ``nodes`` nodes and at most ``depth`` levels; a tree is the tuple of its children."""
    if nodes == 0:
        return [()]
    if depth == 0:
        return []
    return [
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in forests(size - 1, depth - 1)
        for rest in forests(nodes - size, depth)
    ]


def value(tree, p):
    """Expected tokens at a node that is reached: its own and what its children add."""
    return 1.0 + sum(p[k] * value(child, p) for k, child in enumerate(tree)) if len(tree) <= len(p) else -9.0


def brute_force(p, budget, depth):
    def fits(tree):
        return len(tree) <= len(p) and all(map(fits, tree))

    return max(value(tree, p) for n in range(budget + 1) for tree in forests(n, depth) if fits(tree))


def worth(tree, p):
    """Expected tokens of a :class:`StaticTree`, node by node."""
    reach = [1.0]
    for parent, rank in zip(tree.parent[1:], tree.rank[1:]):
        reach.append(reach[parent] * p[rank])
    return sum(reach)


@given(vectors, st.integers(1, 7), st.integers(1, 5))
def test_the_programme_finds_the_best_tree_there_is(p, budget, depth):
    tree = best_tree(p, budget, depth)
    assert tree.expected == pytest.approx(brute_force(p, budget, depth), abs=1e-12)
    assert worth(tree, p) == pytest.approx(tree.expected, abs=1e-12)
    assert len(tree.parent) <= budget + 1 and max(tree.depth) <= depth
    TokenTree.from_lists([0] * len(tree.parent), list(tree.parent), rank=list(tree.rank))  # raises unless topological


def test_catalan_numbers_of_trees():
    assert [len(forests(n, 99)) for n in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]


@given(st.floats(0.05, 0.99), st.integers(1, 6))
def test_a_sure_first_choice_gives_a_chain(p, budget):
    assert best_tree((p,), budget, 9).parent == tuple(range(-1, budget))
    assert best_tree((0.2, 0.2, 0.2, 0.2, 0.2), budget, 1).depth[1:] == (1,) * min(budget, 5)


@given(vectors, st.floats(0.0, 0.3), st.floats(0.0, 0.3), st.floats(0, 0.2))
def test_the_fastest_size_is_the_exhaustive_one(p, node, draft, overhead):
    cost = CostCurve((1.0, 8.0), (1.0, 1.0 + 7 * node), (1.0, 8.0), (draft, 2 * draft), overhead)

    def speed(tree):
        seconds = sum(cost.draft(w) for w in tree.drawn) + cost.verify(len(tree.parent)) + overhead
        return worth(tree, p) / seconds

    budget, depth = best_size(p, cost, 7, 4)
    best = max(speed(best_tree(p, n, d)) for n in range(8) for d in range(5) if (n > 0) == (d > 0))
    assert speed(best_tree(p, budget, depth)) == pytest.approx(best)


def test_no_tree_pays_where_a_node_costs_a_forward():
    assert best_size((0.5, 0.2), CostCurve((1.0, 9.0), (1.0, 9.0), (1.0,), (0.1,)), 8, 8) == (0, 0)


@given(st.integers(0, 10_000), vectors, st.integers(1, 20), st.integers(1, 4), st.integers(2, 7))
def test_the_engine_grows_the_shape(seed, p, budget, depth, vocabulary):
    """With fewer tokens than the shape has ranks, the missing children and all below them are left out."""
    policy = Sequoia(budget, depth, p)
    tree = grown(policy, Draft(seed, vocabulary))
    address = {0: ()}
    for i in range(1, len(tree)):
        address[i] = (*address[int(tree.parent[i])], int(tree.rank[i]))
    shape = {0: ()}
    for i, (parent, rank) in enumerate(zip(policy.tree.parent[1:], policy.tree.rank[1:]), start=1):
        shape[i] = (*shape[parent], rank)
    assert set(address.values()) == {a for a in shape.values() if all(rank < vocabulary for rank in a)}
    assert bool((tree.reason == Reason.KEPT).all()) and tree.candidates <= budget


def test_a_hole_in_a_level_moves_nobody():
    """The first node has no second child; the others must keep their own place in the shape."""
    p = (0.5, 0.4)
    policy = Sequoia(14, 3, p)  # the full binary tree

    class Holes(Draft):
        def logits(self, path):
            x = torch.tensor([3.0, 2.0, 1.0])
            return x.masked_fill(torch.tensor([False] + [list(path) == [0]] * 2), -torch.inf)

    tree = grown(policy, Holes(0))
    assert tree.candidates == 14 - 3  # (0, 1) and its two children are missing
    assert torch.bincount(tree.depth).tolist() == [1, 2, 3, 6]


def test_the_embedded_vector_and_files(tmp_path):
    vector = read_acceptance("embedded")
    assert (
        len(vector) == 8 and 0.4 < vector[0] < 0.6 and sum(vector) < 1 and list(vector) == sorted(vector, reverse=True)
    )
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"acceptance": [0.5, 0.25]}))
    assert Sequoia(5, 3, str(path)).tree == Sequoia(5, 3, (0.5, 0.25)).tree
    for wrong in ("0.5", ["x"], None):
        path.write_text(json.dumps({"acceptance": wrong}))
        with pytest.raises(TreespecError, match="must hold 'acceptance'"):
            Sequoia(5, 3, str(path))
    path.write_text("{")
    with pytest.raises(TreespecError, match="not JSON"):
        Sequoia(5, 3, str(path))
