"""SpecInfer, EAGLE-2, OPT-Tree and the chains that stop early: each against a slow, obvious reference, ties included."""

import math

import numpy as np
import pytest
import torch
from drafts import Draft, below, best, frontier, grown, kept_paths, reference
from hypothesis import given
from hypothesis import strategies as st

from treespec.errors import PolicyError
from treespec.policies import POLICIES, BestFirst, Eagle2, Linear, OptTree, SpecInfer, parse_policies, parse_policy
from treespec.policies.base import largest, top_children
from treespec.tree import Reason

seeds = st.integers(0, 10_000)
steps = st.sampled_from([0.5, 2.0, 1e-3])  # coarse logits make ties


@given(seeds, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_specinfer_expands_level_by_level(seed, expansion):
    draft = Draft(seed)
    tree = grown(SpecInfer(tuple(expansion)), draft)
    assert kept_paths(tree) == reference(draft, lambda d, h, p, r: d < len(expansion) and r < expansion[d])
    assert tree.candidates == sum(math.prod(expansion[: d + 1]) for d in range(len(expansion)))


def test_specinfer_default_is_the_papers():
    tree = grown(SpecInfer(), Draft(0))
    assert tree.candidates == 20 and torch.bincount(tree.depth).tolist() == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def eagle2(draft, total, depth, top_k):
    beam, pool = [((), np.float32(0))], []
    for _ in range(depth):
        children = below(draft, beam, top_k)
        pool += children
        beam = best(children, top_k)
    return {path for path, _ in best(pool, total - 1)}


@given(seeds, steps, st.integers(2, 25), st.integers(1, 4), st.integers(1, 4))
def test_eagle2_against_the_reference(seed, step, total, depth, top_k):
    draft = Draft(seed, step=step)
    tree = grown(Eagle2(total, depth, top_k), draft)
    assert kept_paths(tree) == eagle2(draft, total, depth, top_k)
    assert tree.candidates <= total - 1 and all(n <= top_k for n in draft.asked) and len(draft.asked) <= depth


def opttree(draft, budget, delta, depth):
    level, pool, expected = [((), np.float32(0))], [], 0.0
    for _ in range(depth):
        level = best(below(draft, level, budget), budget)
        pool += level
        now = sum(math.exp(score) for _, score in best(pool, budget))
        if abs(now - expected - delta) < 1e-5:
            return None  # too close for float32
        if now - expected <= delta:
            break
        expected = now
    return {path for path, _ in best(pool, budget)}


@given(seeds, steps, st.integers(1, 12), st.floats(0, 0.8), st.integers(1, 5))
def test_opttree_against_the_reference(seed, step, budget, delta, depth):
    draft = Draft(seed, vocabulary=5, step=step)
    tree = grown(OptTree(budget, delta, depth), draft)
    want = opttree(draft, budget, delta, min(depth, budget))
    assert want is None or kept_paths(tree) == want
    assert tree.candidates <= budget and all(n <= budget for n in draft.asked)


def best_first(draft, budget, depth):
    """A heap, one node at a time: DySpec's own way."""
    open_, kept = below(draft, [((), np.float32(0))], 99), []
    while open_ and len(kept) < budget:
        # of equals the shallower, then the one whose parent came first: the order of a level-by-level tree
        path, score = min(open_, key=lambda c: -c[1])
        kept.append((path, score))
        open_.remove((path, score))
        if len(path) < depth:
            open_ += below(draft, [(path, score)], 99)
    return kept


@given(seeds, steps, st.integers(1, 12), st.integers(1, 4))
def test_best_first_is_the_heap(seed, step, budget, depth):
    draft = Draft(seed, vocabulary=5, step=step)
    tree = grown(BestFirst(budget, 0.0, depth), draft)
    kept, _ = tree.kept()
    want = best_first(draft, budget, min(depth, budget))
    # with ties several trees are best; their probabilities are not
    assert sorted(kept.log_path[1:].tolist()) == pytest.approx(sorted(float(s) for _, s in want))


def decided(policy, entropy, *probabilities, above=0.0):
    """Whether the chain goes on after its first child: one node by hand, its path probability exp(above)."""
    seen = frontier(0, torch.tensor([[entropy]]), torch.tensor([[probabilities]]).log())
    seen.log_path = torch.tensor([[above]])
    decision = policy.decide(seen)
    assert decision.reason[0, 0, 0] == Reason.KEPT, "the token that gives the alarm has been paid for"
    return bool(decision.expand[0, 0, 0])


def test_a_chain_stops_at_a_token_it_does_not_trust():
    policy = Linear(confidence=0.4)
    assert decided(policy, 1.0, 0.41, 0.3) and not decided(policy, 1.0, 0.39, 0.3)
    assert decided(policy, 1.0, 0.41, 0.3, above=-9.0), "its own probability, not the path's"


def test_a_chain_stops_when_the_path_is_unlikely():
    policy = Linear(cumulative=0.2)
    assert decided(policy, 1.0, 0.5, above=math.log(0.41)) and not decided(policy, 1.0, 0.5, above=math.log(0.39))


def test_a_chain_stops_where_the_draft_was_uncertain():
    """SVIP: sqrt(0.15 * H) > 0.3 is H > 0.6 nats is H > 0.8656 bits."""
    policy = Linear(svip=0.3)
    assert decided(policy, 0.86, 0.9) and not decided(policy, 0.87, 0.9) and not decided(policy, math.inf, 0.9)
    assert decided(Linear(), 30.0, 1e-6, above=-50.0), "no stop by default"


@given(seeds, st.floats(0, 0.9), st.floats(0, 0.5), st.floats(0, 0.8))
def test_chains_that_stop_are_beginnings_of_the_chain(seed, confidence, cumulative, svip):
    draft = Draft(seed)
    tree = grown(Linear(6, confidence, cumulative, svip), draft)
    path, score, chain = (), np.float32(0), []
    for _ in range(6):
        ((token, logp),) = draft.children(path, 1)
        q = draft.logits(path).softmax(-1).double()
        nats = float(torch.special.entr(q).sum())
        path, score = (*path, token), np.float32(score + logp)
        chain.append(path)
        doubts = [(math.exp(logp), confidence), (math.exp(score), cumulative), (-math.sqrt(0.15 * nats), -svip or -9.0)]
        if any(abs(value - limit) < 1e-5 for value, limit in doubts):
            return  # too close for float32
        if any(value < limit for value, limit in doubts):
            break
    assert kept_paths(tree) == set(chain)


@given(st.lists(st.floats(-4, 0, width=16), min_size=6, max_size=6), st.integers(0, 7))
def test_the_largest_of_a_level_ties_in_float16(scores, count):
    path = torch.tensor(scores).half().view(1, 2, 3)
    kept = torch.tensor([True, True, False, True, True, True]).view(1, 2, 3)
    got = top_children(path, kept, count).flatten().tolist()
    order = sorted((i for i in range(6) if i != 2), key=lambda i: -scores[i])  # stable
    assert {i for i in range(6) if got[i]} == set(order[:count])


def test_every_row_has_its_own_count():
    got = largest(
        torch.tensor([[3.0, 1.0, 2.0]] * 3), torch.ones(3, 3, dtype=torch.bool), torch.tensor([[0], [1], [2]])
    )
    assert got.tolist() == [[False] * 3, [True, False, False], [True, False, True]]


@pytest.mark.parametrize("text, wrong", [
    ("specinfer:expansion=0/1", "expansion"), ("specinfer:expansion=x", "1/1/3|2/3"), ("specinfer:expansion=90/90/90", "nodes"),
    ("eagle2:total=1", "total"), ("eagle2:top_k=0", "top_k"), ("opttree:delta=2", "delta"), ("opttree:budget=0", "budget"),
    ("linear:confidence=1.5", "confidence"), ("linear:svip=-1", "svip"), ("linear:cumulative=x", "a number"),
    ("sequoia:acceptance=0.9/0.9", "sum to at most 1"), ("sequoia:acceptance=nowhere.json", "nowhere.json"), ("sequoia:budget=2000", "budget"),
    ("throughput:cost=nowhere", "measured"), ("throughput:rate=-1", "rate"), ("throughput:rate=x", "a number"),
    ("throughput:calibration=nowhere.json", "nowhere.json"), ("eagle:total=3", "did you mean 'eagle2'"),
])  # fmt: skip
def test_bad_policies_get_one_sentence(text, wrong):
    from treespec.errors import TreespecError

    with pytest.raises(TreespecError, match=wrong) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


def test_all_is_every_policy_with_plain_first():
    names = [p.name for p in parse_policies("all")]
    assert names == list(POLICIES) and names[0] == "plain" and len(names) == 11
    with pytest.raises(PolicyError, match="unknown policy 'all'"):
        parse_policies("all,linear")


@pytest.mark.parametrize("text", [
    "specinfer:expansion=1/3/1", "linear:gamma=7,confidence=0.4,svip=0.3", "sequoia:budget=8,acceptance=0.6/0.2/0.1",
    "throughput:rate=auto", "eagle2:total=30,depth=4,top_k=5", "opttree:delta=0.7",
])  # fmt: skip
def test_command_line_form_is_kept(text):
    assert parse_policy(text).spec() == text
