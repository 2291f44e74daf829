"""HTML of trees and generations: everything escaped, every fate visible."""

import re

import pytest

from treespec import Reason, TokenTree
from treespec.draw import tree_html
from treespec.marks import DEAD
from treespec.pairs import load_pair

NASTY = '<script>alert("x")</script>&'


def test_token_texts_are_escaped():
    tree = TokenTree.from_lists([1, 2], [-1, 0])
    tree.labels = [NASTY, NASTY]
    html = tree._repr_html_()
    assert "<script" not in html and "&lt;script" in html


@pytest.mark.parametrize("why", list(DEAD))
def test_a_reader_can_tell_why_a_node_died(why):
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 0], reason=[0, 0, why])
    look = DEAD[why]
    html = tree_html(tree)
    assert look.sign in html and look.colour in html and f"pruned: {look.words}" in html
    assert len({look.sign for look in DEAD.values()}) == len(DEAD)


def test_accepted_nodes_stand_out():
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 0])
    tree.accepted = [2]
    assert "accepted 1" in tree_html(tree) and "verified 1" in tree_html(tree)


@pytest.mark.parametrize("nodes", [1, 4, 48, 120, 340])
def test_big_trees_keep_their_shape_and_give_up_labels(nodes):
    parent = [-1] + [(i - 1) // 3 for i in range(1, nodes + 1)]
    html = tree_html(TokenTree.from_lists(range(nodes + 1), parent))
    marks = len(re.findall(r"<circle|<rect", html))
    assert marks == nodes + 1
    assert ("<tspan" in html) == (nodes + 1 <= 80)
    assert html.count("<title>") == nodes + 1  # hover tells the rest


def test_no_reason_is_left_without_a_mark():
    assert set(DEAD) == set(Reason) - {Reason.KEPT}


def test_an_uncertain_parent_carries_the_dash():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 1, 1], reason=[0, 0, Reason.ENTROPY_CAP, Reason.ENTROPY_CAP])
    groups = tree_html(tree).split("<g>")[1:]
    assert ['class="cap"' in group for group in groups] == [False, True, False, False]


def test_the_bonus_is_a_star_and_says_that_it_had_been_pruned():
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 1], reason=[0, 0, Reason.BELOW_TAU])
    tree.accepted = [1]
    assert "★" in tree_html(tree, 9) and "9: bonus" in tree_html(tree, 9)
    assert "the draft had guessed it, pruned: below τ" in tree_html(tree, 3)
    assert "★" not in tree_html(tree)


def test_what_cannot_be_printed_is_shown_as_its_escape():
    tree = TokenTree.from_lists([1], [-1])
    tree.labels = ["a \n\t\x1b\u200b"]
    assert tree.label(0) == "a␣⏎⇥\\x1b\\u200b"


def test_generation_html_tells_accepted_from_given():
    pair = load_pair("toy", "model")
    html = pair.generate("the cat", policy="uniform:depth=2,width=2", max_new_tokens=12)._repr_html_()
    assert "solid" in html and "dotted" in html and "tokens per step" in html
