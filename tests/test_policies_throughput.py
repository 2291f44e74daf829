"""Throughput: the prefix against exhaustive search, the levels where they can be known, the answers chain and plain."""

import math
from dataclasses import dataclass

import pytest
import torch
from drafts import Draft, grown
from hypothesis import given
from hypothesis import strategies as st

from treespec.calibration import Calibration
from treespec.cost import CostCurve
from treespec.policies import BestFirst, Observation, Throughput
from treespec.proposals import Proposals
from treespec.tree import Reason

seeds = st.integers(0, 10_000)


@dataclass(frozen=True)
class Steps:
    """A cost model that is not a curve: tiles of ``tile`` rows, as on a GPU."""

    tile: int = 4
    first: float = 1.0
    more: float = 0.3
    level: float = 0.1
    wide: float = 0.01
    overhead: float = 0.05

    def verify(self, n):
        return self.first + self.more * ((n - 1) // self.tile)

    def draft(self, w):
        return self.level + self.wide * (w - 1)


costs = st.one_of(
    st.builds(
        Steps,
        st.integers(1, 8),
        st.just(1.0),
        st.floats(0, 0.5),
        st.floats(0, 0.4),
        st.floats(0, 0.05),
        st.floats(0, 0.3),
    ),
    st.tuples(st.floats(0, 0.3), st.floats(0, 0.4)).map(
        lambda c: CostCurve((1.0, 16.0), (1.0, 1.0 + 15 * c[0]), (1.0,), (c[1],), 0.05)
    ),
)


def drawn(tree):
    """Nodes expanded at each level."""
    return torch.bincount(tree.depth[~torch.isnan(tree.entropy)]).tolist()


def seconds(cost, tree, nodes):
    return sum(cost.draft(w) for w in drawn(tree)) + cost.verify(1 + nodes) + cost.overhead


def speed(cost, tree, nodes, probabilities=None):
    """Expected tokens per second with the ``nodes`` most probable candidates."""
    p = sorted(tree.log_path[1:].double().exp().tolist() if probabilities is None else probabilities, reverse=True)
    return (1 + sum(p[:nodes])) / seconds(cost, tree, nodes)


@given(seeds, costs, st.integers(1, 30))
def test_no_prefix_is_faster_than_the_one_chosen(seed, cost, budget):
    tree = grown(Throughput(cost, budget=budget), Draft(seed))
    if len(tree) == 1:
        return  # drafting cannot pay
    chosen = speed(cost, tree, tree.candidates)
    assert tree.candidates <= budget
    assert chosen >= max(speed(cost, tree, n) for n in range(min(budget, len(tree) - 1) + 1)) * (1 - 1e-6)
    kept = tree.log_path[tree.reason == Reason.KEPT].min()
    assert bool((tree.log_path[tree.reason != Reason.KEPT] <= kept).all()), "the most probable ones"


@given(seeds, costs, st.floats(0.5, 4))
def test_with_a_rate_no_prefix_is_worth_more(seed, cost, rate):
    tree = grown(Throughput(cost, rate=rate), Draft(seed))
    p = sorted(tree.log_path[1:].double().exp().tolist(), reverse=True)
    worth = [1 + sum(p[:n]) - rate * seconds(cost, tree, n) for n in range(min(64, len(p)) + 1)]
    assert len(tree) == 1 or worth[tree.candidates] >= max(worth) - 1e-6


class Steady:
    """A draft that says the same everywhere: one child, of probability p."""

    def __init__(self, p):
        self.p = p

    def expand(self, growth, nodes):
        logp = torch.full((len(nodes), 1), math.log(self.p))
        return Proposals(torch.zeros(len(nodes), 1, dtype=torch.long), logp, torch.ones(len(nodes)))


@given(st.floats(0.05, 0.99), st.floats(0, 0.4), st.floats(0, 0.4), st.floats(0, 0.3))
def test_levels_and_nodes_are_the_exhaustive_choice_where_the_future_can_be_known(p, node, level, overhead):
    """On a steady draft the look-ahead is exact; on a straight curve the first worsening is the last word."""
    cost = CostCurve((1.0, 16.0), (1.0, 1.0 + 15 * node), (1.0,), (level,), overhead)
    policy = Throughput(cost, max_depth=8)
    tree = grown(policy, Steady(p))

    def fast(levels, nodes):
        return (1 + sum(p**i for i in range(1, nodes + 1))) / (levels * level + cost.verify(1 + nodes) + overhead)

    if policy.levels == 0:
        always = [(1 + n) / (n * level + cost.verify(1 + n) + overhead) for n in range(9)]
        assert always[0] >= max(always), "not even a draft that is always right would pay"
        return
    levels = len(drawn(tree))
    best = max(fast(L, n) for L in range(1, 9) for n in range(L + 1))
    assert fast(levels, tree.candidates) == pytest.approx(best, rel=1e-5)


def test_plain_where_a_node_costs_a_forward():
    cost = CostCurve((1.0, 9.0), (1.0, 9.0), (1.0,), (0.1,))
    draft = Draft(0)
    policy = Throughput(cost)
    assert policy.levels == 0 and len(grown(policy, draft)) == 1 and draft.asked == []


def test_plain_after_a_look_where_the_draft_turns_out_lost():
    cost = CostCurve((1.0, 9.0), (1.0, 2.6), (1.0,), (0.1,))
    tree = grown(Throughput(cost), Steady(0.1))
    assert tree.candidates == 0 and len(tree) > 1 and len(drawn(tree)) == 1
    assert grown(Throughput(cost), Steady(0.9)).candidates > 3


def test_plain_where_a_calibration_knows_better():
    cost = CostCurve((1.0, 9.0), (1.0, 2.6), (1.0,), (0.1,))
    assert Throughput(cost, Calibration((1.0,), (0.2, 0.2))).levels == 0
    assert Throughput(cost, Calibration((1.0,), (0.8, 0.8))).levels == 8


def test_a_chain_where_nodes_are_dear_and_a_bush_where_they_are_free():
    class Forked:
        def expand(self, growth, nodes):
            logp = torch.tensor([[0.85, 0.12]]).log().expand(len(nodes), 2)
            return Proposals(torch.tensor([[0, 1]]).expand(len(nodes), 2), logp, torch.ones(len(nodes)))

    dear = CostCurve((1.0, 17.0), (1.0, 1.0 + 16 * 0.2), (1.0,), (0.02,))
    free = CostCurve((1.0, 17.0), (1.0, 1.01), (1.0,), (0.02,))
    chain, bush = (grown(Throughput(cost), Forked()).kept()[0] for cost in (dear, free))
    assert len(chain) > 3 and torch.bincount(chain.depth).tolist() == [1] * len(chain)
    assert int(torch.bincount(bush.depth).max()) > 4


@pytest.mark.thorough
def test_never_slower_than_the_best_fixed_budget():
    """Over many steps: sum of expected tokens over sum of seconds, each policy paying for its own draft forwards."""
    drafts = [Draft(seed, sharpness=3.0) for seed in range(24)]
    sizes = [(n, depth) for n in (1, 2, 4, 7, 11, 16) for depth in (1, 2, 3, 5) if depth <= n]
    fixed = [[grown(BestFirst(n, 0.0, depth), d) for d in drafts] for n, depth in sizes]
    for cost in (Steps(), Steps(1, 1.0, 0.05, 0.1, 0.0), CostCurve.load("measured")):

        def total(trees, cost=cost):
            tokens = sum(float(t.log_path[t.reason == Reason.KEPT].exp().sum()) for t in trees)  # the root counts 1
            return tokens / sum(seconds(cost, t, t.candidates) for t in trees)

        own = total([grown(Throughput(cost), d) for d in drafts])
        tuned = total([grown(Throughput(cost, rate=own), d) for d in drafts])
        assert min(own, tuned) > max(map(total, fixed)), cost


def test_the_rate_is_learned_from_steps():
    policy = Throughput(rate="auto")
    assert policy.current_rate == 0
    later = policy
    for _ in range(5):
        later = later.after_step(Observation(3, 9, 0.1, 0.08))
    assert later.current_rate == pytest.approx(30) and policy.current_rate == 0 and later == policy
    assert Throughput().after_step(Observation(3, 9, 0.1, 0.08)).current_rate == 0


@given(seeds, st.floats(0.1, 2))
def test_the_soft_limit_follows_the_entropy(seed, spread):
    draft = Draft(seed)
    tree = grown(Throughput(Steps(more=0.0), spread=spread), draft)
    for node in torch.nonzero(~torch.isnan(tree.entropy)).flatten().tolist():
        most = max(1, math.ceil(spread * 2 ** float(tree.entropy[node]) - 1e-4))
        assert int((tree.parent == node).sum()) <= most + 1e-4


@given(seeds, st.lists(st.floats(0.4, 2.5), min_size=1, max_size=3))
def test_the_choice_is_by_calibrated_probability(seed, temperatures):
    calibration = Calibration(tuple(temperatures))
    cost = Steps(1, 1.0, 0.1)
    tree = grown(Throughput(cost, calibration), Draft(seed))
    if len(tree) == 1:
        return
    score = torch.zeros(len(tree))
    for i in range(1, len(tree)):
        parent = int(tree.parent[i])
        score[i] = score[parent] + calibration.apply(int(tree.depth[i]), tree.logp[i], tree.entropy[parent])
    probabilities = score[1:].double().exp().tolist()
    chosen = speed(cost, tree, tree.candidates, probabilities)
    assert chosen >= max(speed(cost, tree, n, probabilities) for n in range(min(64, len(tree) - 1) + 1)) * (1 - 1e-6)
    kept = score[tree.reason == Reason.KEPT].min()
    assert bool((score[tree.reason != Reason.KEPT] <= kept + 1e-6).all())
    tree.kept()  # raises unless ancestor-closed
