"""Replay and regrowth on traces made by hand: no model, no file, every draft known, so that a mistake is seen at once."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from drafts import Along, by_hand, frontiers, grown, written
from hypothesis import given
from hypothesis import strategies as st

from treespec.cost import CostCurve
from treespec.errors import TraceError
from treespec.policies import (
    BestFirst,
    DynamicTreePruner,
    Eagle2,
    Linear,
    Observation,
    OptTree,
    Sequoia,
    SpecInfer,
    Threshold,
    Throughput,
    Uniform,
    parse_policy,
)
from treespec.trace import Caps, replay
from treespec.trace import regrow as module
from treespec.trace.grown import NONE
from treespec.trace.regrow import regrow
from treespec.tree import Reason

pytestmark = pytest.mark.thorough

LENGTH = 6
EVERYTHING = Caps(floor=0.0, depth=3, width=5, nodes=4000, narrow=())
SOME = Caps(floor=0.05, depth=3, width=3, nodes=5, narrow=(2,))
CURVE = CostCurve((1, 8, 32), (1.0, 1.1, 1.6), (1, 16), (0.05, 0.3), overhead=0.1, name="curve")
POLICIES = [
    Uniform(3, 2), Uniform(2, 4), Linear(3), Linear(3, 0.4, 0.1, 0.3), Threshold(0.05, 4, 3, 9), BestFirst(9, 0.02, 3),
    BestFirst(12, 0.0, 3, grow=0.1), DynamicTreePruner(0.05, 0.8, 1.8, depth=2, deep=3, budget=7), SpecInfer((2, 1, 3)),
    DynamicTreePruner(0.02, 0.5, 1.9, scope="level", depth=3, deep=3, budget=12), Eagle2(9, 3, 3), OptTree(7, 0.2, 3),
    Sequoia(9, 3, (0.5, 0.2, 0.1)), Throughput(CURVE, max_depth=3, budget=9), Throughput(CURVE, rate=2.0, spread=1.0, max_depth=3),
]  # fmt: skip
seeds = st.integers(0, 400)
every = st.sampled_from(POLICIES)


def live(seed, i, policy):
    """What the engine makes of position ``i``: the tree, the nodes it asked for level by level, what is accepted."""
    text = written(seed, LENGTH)
    draft = Along(seed, text[: i + 1])
    tree = grown(policy, draft, LENGTH - 1 - i)
    kept, _ = tree.kept()
    below, node, accepted = kept.children(), 0, 0
    while accepted < LENGTH - 1 - i and text[i + 1 + accepted] in below[node]:
        node, accepted = below[node][text[i + 1 + accepted]], accepted + 1
    return kept, draft.asked, accepted


def address(tree):
    """Every candidate as its token path, in the order of the tree."""
    return [tuple(tree.token[tree.path(i)[1:]].tolist()) for i in range(1, len(tree))]


def addresses(trace, kept):
    """The same of recorded nodes."""
    token, parent, node = (trace.nodes[name] for name in ("token", "parent", "node"))
    out = []
    for own in kept[kept != NONE].tolist():
        root, at, path = own - int(node[own]), own, []
        while at != root:
            path.append(int(token[at]))
            at = root + int(parent[at])
        out.append(tuple(path[::-1]))
    return out


def same(trace, grown_, row, seed, i, policy):
    """Whether the regrown tree is the live one, in every figure."""
    tree, asked, accepted = live(seed, i, policy)
    widths = [w for w in grown_.widths[row].tolist() if w]
    return (
        addresses(trace, grown_.kept[row]) == address(tree)
        and int(grown_.nodes[row]) == len(tree)
        and widths == asked
        and int(grown_.accepted[row]) == accepted
    )


@given(seeds, every)
def test_where_everything_was_recorded_every_tree_is_the_live_one(seed, policy):
    trace = by_hand((seed,), EVERYTHING)
    trees = regrow(trace.index, torch.arange(len(trace)), policy)
    assert not trees.truncated.any()
    assert all(same(trace, trees, i, seed, i, policy) for i in range(len(trace)))


@given(seeds, every, st.sampled_from(["greedy", "coupled"]))
def test_a_tree_is_the_live_one_or_said_to_be_truncated(seed, policy, sample):
    trace = by_hand((seed,), SOME, sample=sample)
    trees = regrow(trace.index, torch.arange(len(trace)), policy)
    for i in range(len(trace)):
        assert bool(trees.truncated[i]) or same(trace, trees, i, seed, i, policy)


@given(seeds, st.sampled_from([Uniform(3, 2), SpecInfer((2, 1, 3)), Sequoia(9, 3, (0.5, 0.2, 0.1))]))
def test_a_static_trees_figures_need_no_improbable_nodes(seed, policy):
    trace = by_hand((seed,), SOME, complete=True)
    trees = regrow(trace.index, torch.arange(len(trace)), policy)
    for i in range(len(trace)):
        tree, asked, accepted = live(seed, i, policy)
        assert not trees.truncated[i] and int(trees.nodes[i]) == len(tree)
        assert [w for w in trees.widths[i].tolist() if w] == asked and int(trees.accepted[i]) == accepted
        assert set(addresses(trace, trees.kept[i])) <= set(address(tree))


TEN = range(10)


@pytest.mark.parametrize("policy", [
    Linear(3), BestFirst(3, 0.05, 3), Threshold(0.05, 3, 3, 5), Threshold(0.06, 2, 3, 5), BestFirst(2, 0.1),
])  # fmt: skip
def test_what_lies_within_the_caps_is_not_truncated(policy):
    """The bounds on what was left out are tight enough to be of use."""
    trace = by_hand(TEN, SOME)
    assert not regrow(trace.index, torch.arange(len(trace)), policy).truncated.any()


@pytest.mark.parametrize("policy", [BestFirst(12, 0.0, 3), Uniform(3, 3), Threshold(0.001, 3, 3, 30)])
def test_what_lies_beyond_the_caps_is_truncated(policy):
    trace = by_hand(TEN, SOME)
    assert float(regrow(trace.index, torch.arange(len(trace)), policy).truncated.double().mean()) > 0.5


def test_a_chain_longer_than_the_recording_is_truncated_where_there_was_room_for_it():
    """Five positions a text, the first with room for five levels; three were recorded."""
    trace = by_hand(TEN, SOME)
    assert (
        regrow(trace.index, torch.arange(len(trace)), Linear(4)).truncated.tolist()
        == [True, True, False, False, False] * 10
    )


@pytest.mark.parametrize("policy", [BestFirst(9, 0.05, 3), Threshold(0.05, 4, 3, 9), BestFirst(5, 0.05, 2)])
def test_children_that_the_recorder_was_not_shown_may_be_as_probable_as_the_floor(policy):
    """All that it was shown of a node can be above the floor, and then so can the next child."""
    exact = 0
    for seed in range(12):
        trace = by_hand((seed,), SOME)
        trees = regrow(trace.index, torch.arange(len(trace)), policy)
        told = [i for i in range(len(trace)) if not trees.truncated[i]]
        assert all(same(trace, trees, i, seed, i, policy) for i in told)
        exact += len(told)
    assert exact > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caps", [EVERYTHING, SOME])
def test_rows_grown_apart_and_in_chunks_are_the_same(policy, caps, monkeypatch):
    trace = by_hand(range(4), caps)
    rows = torch.arange(len(trace))
    whole = regrow(trace.index, rows, policy)
    monkeypatch.setattr(module, "WORTH", 1)
    monkeypatch.setattr(module, "CHUNK", 5)
    parts = regrow(trace.index, rows, policy)
    assert not whole.differs(parts).any()
    assert torch.equal(whole.truncated, parts.truncated) and torch.equal(whole.accepted, parts.accepted)


@pytest.mark.parametrize("policy", [BestFirst(20, 0.0, 3), Threshold(0.01, 4, 3, 30)])
def test_a_wide_policy_is_shown_one_phantom_first(policy, monkeypatch):
    trace = by_hand(range(8), Caps(floor=0.03, depth=3, width=4, nodes=9, narrow=()))
    rows = torch.arange(len(trace))
    want = regrow(trace.index, rows, policy)
    monkeypatch.setattr(module, "NARROW", 1)
    got = regrow(trace.index, rows, policy)
    assert not want.differs(got).any() and torch.equal(want.truncated, got.truncated)


@given(seeds, every)
def test_the_policy_is_shown_what_it_is_shown_live(seed, policy):
    """Every frontier of one position, array by array, where everything was recorded."""
    trace = by_hand((seed,), EVERYTHING)
    text = written(seed, LENGTH)
    want = frontiers(policy, Along(seed, text[:1]))
    seen = []

    class Watched:
        def __getattr__(self, name):
            return getattr(policy, name)

        def decide(self, frontier):
            seen.append(frontier)
            return policy.decide(frontier)

    if policy.shape is not None and policy.shape.slots.shape[1] <= trace.index.everywhere:
        return
    regrow(trace.index, torch.tensor([0]), Watched())
    for mine, theirs in zip(seen, want):
        assert mine.depth == theirs.depth
        width = min(mine.child_logp.shape[-1], theirs.child_logp.shape[-1])
        torch.testing.assert_close(mine.child_logp[..., :width], theirs.child_logp[..., :width], atol=1e-6, rtol=0)
        for more in (mine, theirs):
            assert bool((more.child_logp[..., width:] == -torch.inf).all()), "what is not there is shown as that"
        for name in ("log_path", "entropy", "score", "alive", "ranks", "drawn"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-5, rtol=0)
        pool, other = mine.pool[0], theirs.pool[0]
        torch.testing.assert_close(pool[pool > -torch.inf], other[other > -torch.inf], atol=1e-5, rtol=0)
    assert len(seen) == len(want[: LENGTH - 1])


def walked(seeds_, policy, cost=None):
    """The steps of the live engine: ``(prompt, row within the text, tokens, accepted, nodes, widths)``."""
    out = []
    for number, seed in enumerate(seeds_):
        at, now = 0, policy
        while at < LENGTH - 1:
            tree, asked, accepted = live(seed, at, now)
            tokens = min(accepted + 1, LENGTH - 1 - at)
            out.append((number, at, tokens, accepted, len(tree), asked))
            if cost is not None:
                verify = cost.verify(len(tree))
                seconds = verify + sum(map(cost.draft, asked)) + cost.overhead
                now = now.after_step(Observation(tokens, len(tree), seconds, verify))
            at += tokens
    return out


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_replay_visits_the_steps_of_the_engine(policy):
    trace = by_hand(range(5), EVERYTHING)
    result, want = replay(trace, policy), walked(range(5), policy)
    frame = result.steps
    assert result.rows.tolist() == [(LENGTH - 1) * n + at for n, at, *_ in want]
    assert result.tokens.tolist() == [w[2] for w in want]
    assert frame.prompt.tolist() == [w[0] for w in want] and frame.position.tolist() == [20 + w[1] for w in want]
    assert frame.tokens.tolist() == [w[2] for w in want] and frame.accepted.tolist() == [w[3] for w in want]
    assert frame.nodes.tolist() == [w[4] for w in want] and frame.levels.tolist() == [len(w[5]) for w in want]
    assert frame.widths.tolist() == ["/".join(map(str, w[5])) for w in want] and not frame.truncated.any()
    assert (result.verify, result.draft, result.seconds, result.policies) == (None, None, None, [])
    totals = result.totals
    assert totals["policy"] == policy.spec() and totals["positions"] == 5 * (LENGTH - 1)
    assert totals["steps"] == len(want) and totals["truncated_share"] == 0
    assert totals["tokens_per_step"] == pytest.approx(5 * (LENGTH - 1) / len(want))
    assert totals["nodes"] == pytest.approx(np.mean([w[4] for w in want]))
    assert totals["levels"] == pytest.approx(np.mean([len(w[5]) for w in want]))
    assert totals["seconds"] is None and totals["speedup"] is None


def test_seconds_by_hand():
    trace, policy = by_hand(range(3), EVERYTHING), BestFirst(5, 0.02, 3)
    want = walked(range(3), policy)
    result = replay(trace, policy, CURVE)
    verify = [CURVE.verify(w[4]) for w in want]
    draft = [sum(map(CURVE.draft, w[5])) for w in want]
    assert result.verify.tolist() == pytest.approx(verify) and result.draft.tolist() == pytest.approx(draft)
    assert result.plain == pytest.approx(1.1) and result.overhead == 0.1
    seconds = sum(verify) + sum(draft) + 0.1 * len(want)
    assert result.seconds == pytest.approx(seconds) and result.totals["seconds"] == pytest.approx(seconds)
    assert result.totals["speedup"] == pytest.approx(1.1 * 3 * (LENGTH - 1) / seconds)
    assert list(result.steps.columns)[-3:] == ["truncated", "verify", "draft"]
    sums = result.by_prompt
    assert sums.index.name == "prompt" and sums.index.tolist() == [0, 1, 2]
    columns = ["steps", "tokens", "accepted", "nodes", "levels", "truncated", "verify", "draft"]
    assert list(sums.columns) == columns
    for number in range(3):
        own = [i for i, w in enumerate(want) if w[0] == number]
        row = sums.loc[number]
        assert row.steps == len(own) and row.tokens == LENGTH - 1 and row.truncated == 0
        assert row.accepted == sum(want[i][3] for i in own) and row.nodes == sum(want[i][4] for i in own)
        assert row.levels == sum(len(want[i][5]) for i in own)
        assert row.verify == pytest.approx(sum(verify[i] for i in own))
        assert row.draft == pytest.approx(sum(draft[i] for i in own))
    assert sums.nodes.dtype == sums.truncated.dtype == int and sums.verify.dtype == float


def test_plain_decoding_costs_what_the_curve_says_of_it():
    """A measured curve has its own time for a step without a tree."""
    curve = dataclasses.replace(CURVE, plain=1.05)
    result = replay(by_hand(range(2), EVERYTHING), "plain", curve)
    steps = 2 * (LENGTH - 1)
    assert len(result.rows) == steps and result.tokens.tolist() == [1] * steps
    assert result.grown.nodes.tolist() == [1] * steps and result.steps.widths.tolist() == [""] * steps
    assert result.seconds == pytest.approx(1.05 * steps) and result.totals["speedup"] == pytest.approx(1.0)
    assert result.verify.tolist() == [1.0] * steps and result.draft.tolist() == [0.0] * steps


@pytest.mark.parametrize("policy", [parse_policy("dynamic:tau=auto,high=9,depth=2,deep=3"), Throughput(CURVE, rate="auto", max_depth=3, budget=9)], ids=lambda p: p.name)  # fmt: skip
def test_an_adaptive_policy_learns_along_every_text_from_the_start(policy):
    trace = by_hand(range(4), EVERYTHING)
    result, want = replay(trace, policy, CURVE), walked(range(4), policy, CURVE)
    assert result.rows.tolist() == [(LENGTH - 1) * n + at for n, at, *_ in want]
    assert result.tokens.tolist() == [w[2] for w in want]
    frame = result.steps
    assert frame.nodes.tolist() == [w[4] for w in want] and frame.accepted.tolist() == [w[3] for w in want]
    assert frame.widths.tolist() == ["/".join(map(str, w[5])) for w in want]
    firsts = [i for i, w in enumerate(want) if w[1] == 0]
    assert (
        result.policy is policy
        and len(result.policies) == len(want)
        and all(result.policies[i] is policy for i in firsts)
    )
    assert result.verify.tolist() == pytest.approx([CURVE.verify(w[4]) for w in want])
    with pytest.raises(TraceError) as error:
        replay(trace, policy)
    assert (
        str(error.value) == f"{policy.spec()} adapts to the seconds of its steps: give a cost model to replay it with"
    )


@pytest.mark.parametrize("other", ["plain", "linear:gamma=2", "uniform:depth=3,width=5", "bestfirst:budget=3"])
def test_a_replay_beside_another_is_the_same_replay(other):
    """Only the positions that are looked at first are another's; those that it did not visit are grown afterwards."""
    trace, policy = by_hand(range(4), EVERYTHING), BestFirst(5, 0.02, 3)
    alone, beside = replay(trace, policy, CURVE), replay(trace, policy, CURVE, near=replay(trace, other))
    assert beside.steps.equals(alone.steps) and beside.rows.tolist() == alone.rows.tolist()
    assert beside.totals == alone.totals


def test_a_replay_by_names_is_the_replay_of_what_they_name():
    trace = by_hand(range(2), EVERYTHING)
    named, given_ = replay(trace, "bestfirst:budget=5", "article"), replay(trace, BestFirst(5), CURVE)
    assert named.policy == BestFirst(5) and named.totals["steps"] == given_.totals["steps"]
    assert named.seconds != given_.seconds and named.trace is trace


def test_a_steps_tree_marks_what_was_verified_and_accepted():
    trace, policy = by_hand((2,), EVERYTHING), BestFirst(5, 0.02, 3)
    result = replay(trace, policy)
    for step, (_, at, _, accepted, nodes, _) in enumerate(walked([2], policy)):
        tree = result.tree(step)
        want, _, _ = live(2, at, policy)
        assert len(tree) == int(trace.index.size[at]) > nodes and tree.candidates == nodes - 1
        assert address(tree.kept()[0]) == address(want)
        assert set(tree.reason.tolist()) == {Reason.KEPT, Reason.NOT_PROPOSED}
        assert len(tree.accepted) == accepted
        text = written(2, LENGTH)
        assert [int(tree.token[i]) for i in tree.accepted] == list(text[at + 1 : at + 1 + accepted])


def test_repr_by_hand():
    trace = by_hand(range(2), EVERYTHING)
    plain = replay(trace, "plain")
    assert repr(plain) == "Replay(plain: 10 steps, 1.00 tokens a step, 1.0 nodes, 0.0% truncated)"
    assert repr(replay(trace, "plain", CURVE)) == "Replay(plain: 10 steps, 1.00 tokens a step, 1.0 nodes, 1.00x, 0.0% truncated)"  # fmt: skip


def test_a_text_ends_where_it_ends():
    """A step that accepts up to the end emits no bonus token beyond it."""
    result = replay(by_hand((8,), EVERYTHING), Uniform(3, 4))
    assert result.grown.accepted.tolist() == [3, 1] and result.tokens.tolist() == [4, 1]


def test_what_was_shown_and_left_out_bounds_what_was_not_shown_only_where_children_come_by_probability():
    """Of a rank beyond the recorder's width: below the recorder's mark if a shown child was left out, else what is left."""
    tightened = 0
    for seed in TEN:
        for sample in ("greedy", "coupled"):
            trace = by_hand((seed,), SOME, sample=sample)
            index, rows = trace.index, torch.arange(len(trace))
            growing = module._Growing(index, rows, BestFirst(6, 0.0, 3), 3)
            own, beyond = index.root[rows], torch.full((len(trace),), SOME.width)
            found = growing._bound(0, own, rows, beyond)
            if sample == "coupled":
                assert found.tolist() == index.rest[own].clamp(max=0.0).tolist()
                continue
            mark = growing.mark[SOME.widths.index(SOME.width)]
            for i, node in enumerate(own.tolist()):
                last = float(index.logp[index.first[node] + index.count[node] - 1]) if index.count[node] else 0.0
                want = min(float(index.rest[node]), last)
                at = float(mark[i, 1])
                if int(index.count[node]) < SOME.width and at - module.GAP * max(abs(at), 1.0) < want:
                    want, tightened = at - module.GAP * max(abs(at), 1.0), tightened + 1
                assert float(found[i]) == pytest.approx(want, abs=1e-6)
    assert tightened > 0, "the rule was never the tightest"


def test_bounds_of_what_was_not_recorded_are_bounds():
    """What a phantom is shown with is never less than what the true child has."""
    assert math.isclose(module.GAP, 2e-6)
    for seed in TEN:
        trace = by_hand((seed,), SOME)
        index, text = trace.index, written(seed, LENGTH)
        growing = module._Growing(index, torch.arange(len(trace)), BestFirst(6, 0.0, 3), 3)
        rows = torch.arange(len(trace))
        own = index.root[rows][:, None]
        children, logp = growing._children(0, growing._known(0))
        for i in range(len(trace)):
            true = dict(enumerate(logp for _, logp in Along(seed, text[: i + 1]).children((), 4)))
            recorded = {int(index.rank[c]) for c in range(int(own[i]) + 1, int(own[i]) + 1 + int(index.count[own[i]]))}
            for rank in range(children.shape[-1]):
                if children[i, 0, rank] == module.PHANTOM:
                    assert rank not in recorded and float(logp[i, 0, rank]) >= float(true.get(rank, -99.0)) - 1e-6
                elif children[i, 0, rank] >= 0:
                    assert float(logp[i, 0, rank]) == pytest.approx(float(true.get(rank, -99.0)), abs=1e-6)
