"""Every policy against a slow, obvious reference on random draft tables; parameters; reasons; the command-line form."""

import math

import pytest
import torch
from drafts import Draft, frontier, frontiers, grown, kept_paths, reference, stacked
from hypothesis import given
from hypothesis import strategies as st

from treespec.errors import PolicyError
from treespec.policies import (
    POLICIES,
    Autoregressive,
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
    parse_policies,
    parse_policy,
)
from treespec.policies.base import over_budget, top_nodes
from treespec.policies.price import HIGH, LOW
from treespec.tree import Reason, TreeBatch

seeds = st.integers(0, 10_000)


@given(seeds, st.integers(1, 4), st.integers(1, 3))
def test_uniform_is_every_path_of_top_children(seed, depth, width):
    draft = Draft(seed)
    tree = grown(Uniform(depth, width), draft)
    assert len(tree) - 1 == sum(width**d for d in range(1, depth + 1))
    assert kept_paths(tree) == reference(draft, lambda d, h, p, r: d < depth and r < width)


@pytest.mark.parametrize("depth, width, nodes", [(4, 3, 120), (4, 4, 340)])
def test_the_articles_uniform_trees(depth, width, nodes):
    assert len(grown(Uniform(depth, width), Draft(0))) - 1 == nodes


@given(seeds, st.integers(1, 9))
def test_linear_is_the_argmax_chain(seed, gamma):
    draft = Draft(seed)
    tree = grown(Linear(gamma), draft)
    assert kept_paths(tree) == reference(draft, lambda d, h, p, r: d < gamma and r == 0)
    assert tree.depth.tolist() == list(range(gamma + 1))


@given(seeds, st.floats(0.005, 0.9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))
def test_threshold_against_the_reference(seed, tau, width, depth, budget):
    draft = Draft(seed)
    tree = grown(Threshold(tau, width, depth, budget), draft)
    want = reference(draft, lambda d, h, p, r: d < depth and r < width and p >= math.log(tau), budget)
    assert tree.candidates <= budget
    assert want is None or kept_paths(tree) == want


@given(seeds, st.floats(0.0, 0.3), st.integers(1, 5), st.integers(1, 40))
def test_best_first_against_the_reference(seed, floor, depth, budget):
    draft = Draft(seed)
    tree = grown(BestFirst(budget, floor, depth), draft)
    least = math.log(floor) if floor > 0 else -math.inf
    want = reference(draft, lambda d, h, p, r: d < depth and p >= least, budget, most=min(depth, budget))
    assert tree.candidates <= budget
    assert want is None or kept_paths(tree) == want


@given(seeds, st.floats(0.02, 0.5))
def test_best_first_pays_a_draft_forward_only_where_it_may_be_worth_it(seed, least):
    draft = Draft(seed)
    tree = grown(BestFirst(12, 0.0, 6, grow=least), draft)
    parents = {int(p) for p in tree.parent[1:]}
    assert all(math.exp(float(tree.log_path[p])) >= least - 1e-6 for p in parents)


bands = st.tuples(st.floats(0, 2.8), st.floats(0, 2.8)).map(sorted)


@given(seeds, st.floats(0.005, 0.6), bands, st.integers(1, 3), st.integers(0, 4), st.integers(1, 30))
def test_dynamic_by_node_against_the_reference(seed, tau, band, depth, more, budget):
    low, high = band
    policy = DynamicTreePruner(tau, low, high, (2, 3), depth, depth + more, budget)
    draft = Draft(seed)
    tree = grown(policy, draft)

    def decide(d, bits, log_path, rank):
        if log_path < math.log(tau) or bits >= high:
            return False
        if bits < low:
            return rank < 1 and d < depth + more
        return rank < (2 if bits < (low + high) / 2 else 3) and d < depth

    want = reference(draft, decide, budget)
    assert tree.candidates <= budget
    assert want is None or kept_paths(tree) == want


@given(seeds, st.floats(0.01, 0.3), bands)
def test_dynamic_by_level_uses_one_weighted_entropy(seed, tau, band):
    low, high = band
    draft = Draft(seed)
    tree = grown(DynamicTreePruner(tau, low, high, scope="level", budget=1000), draft)
    expanded = ~torch.isnan(tree.entropy)
    for depth in range(int(tree.depth.max()) + 1):
        here = expanded & (tree.depth == depth)
        if not bool(here.any()):
            continue
        weight = tree.log_path[here].exp()
        bits = float((weight * tree.entropy[here]).sum() / weight.sum())
        children = [i for i in range(len(tree)) if int(tree.depth[i]) == depth + 1 and tree.reason[i] == Reason.KEPT]
        most = 0 if bits >= high else 1 if bits < low else 2 if bits < (low + high) / 2 else 3
        for parent in torch.nonzero(here).flatten().tolist():
            assert sum(int(tree.parent[c]) == parent for c in children) <= most + (abs(bits - high) < 1e-5) * 3


every = st.sampled_from([Uniform(3, 2), Linear(4), Threshold(0.02, 4, 5, 9), DynamicTreePruner(0.02, 1, 2.6, budget=7), BestFirst(9, 0.01, 5),
                         DynamicTreePruner(0.01, 0.5, 2.7, scope="level", budget=12), Linear(4, 0.4, 0.1, 0.3), SpecInfer((2, 1, 3)),
                         Eagle2(9, 4, 3), OptTree(7, 0.2, 5), Sequoia(9, 4), Throughput(budget=9), Throughput(rate=8.0, spread=1.0)])  # fmt: skip


@given(every, seeds)
def test_trees_are_ancestor_closed_ordered_and_repeatable(policy, seed):
    tree, again = grown(policy, Draft(seed)), grown(policy, Draft(seed))
    kept, _ = tree.kept()  # raises if a node is kept without its parent
    assert torch.equal(tree.token, again.token) and torch.equal(tree.reason, again.reason)
    assert bool((tree.parent[1:] < torch.arange(1, len(tree))).all())
    assert bool((tree.log_path[1:] <= tree.log_path[tree.parent[1:]]).all())
    assert set(tree.reason.tolist()) <= {r.value for r in Reason if r != Reason.NOT_PROPOSED}


@given(every, seeds)
def test_a_batch_decides_as_its_members_do(policy, seed):
    """The replay calls policies with many trees at once, padded; each must come out as if it were alone."""
    several = [frontiers(policy, Draft(seed + i)) for i in range(3)]
    for level in zip(*several):  # as deep as the shallowest goes
        together = policy.decide(stacked(level))
        for b, alone in enumerate(level):
            want, own = policy.decide(alone), alone.alive.shape[1]
            assert torch.equal(together.reason[b, :own], want.reason[0])
            assert torch.equal(together.expand[b, :own], want.expand[0])
            assert bool((together.reason[b, own:] == Reason.NOT_PROPOSED).all()) and not bool(
                together.expand[b, own:].any()
            )


@given(every, seeds)
def test_a_batch_is_trimmed_as_its_members_are(policy, seed):
    trees = [grown(policy, Draft(seed + i)) for i in range(3)]
    batch = TreeBatch.stack(trees)
    proposed = batch.present & ((batch.reason == Reason.KEPT) | (batch.reason == Reason.OVER_BUDGET))
    drawn = torch.ones(3, 4, dtype=torch.long)
    together = policy.trim(batch.log_path, proposed, drawn)
    for b, tree in enumerate(trees):
        alone = policy.trim(tree.log_path[None], proposed[b : b + 1, : len(tree)], drawn[:1])
        assert torch.equal(together[b, : len(tree)], alone[0]) and not bool(together[b, len(tree) :].any())


def test_every_death_has_its_reason():
    """One node of each fate, by hand."""
    policy = DynamicTreePruner(tau=0.1, low=1.0, high=2.0, mid_widths=(2, 3), depth=1, deep=3, budget=2)

    def decide(depth, entropy, probabilities):
        logp = torch.tensor([[probabilities]]).log()
        return policy.decide(frontier(depth, torch.tensor([[entropy]]), logp)).reason[0, 0].tolist()

    kept, tau, cap = Reason.KEPT, Reason.BELOW_TAU, Reason.ENTROPY_CAP
    assert decide(0, 0.5, [0.9, 0.05, 0.05]) == [kept, Reason.NOT_PROPOSED, Reason.NOT_PROPOSED]
    assert decide(0, 1.2, [0.6, 0.05, 0.05]) == [kept, tau, Reason.NOT_PROPOSED]
    assert decide(0, 1.6, [0.6, 0.2, 0.15]) == [kept, kept, Reason.OVER_BUDGET]
    assert decide(0, 2.0, [0.4, 0.3, 0.3]) == [cap] * 3
    assert decide(0, math.inf, [0.4, 0.3, 0.3]) == [cap] * 3
    assert decide(1, 1.2, [0.6, 0.2, 0.2])[:2] == [Reason.TOO_DEEP] * 2
    assert decide(2, 0.5, [0.9, 0.1, 0.0])[0] == kept and decide(3, 0.5, [0.9, 0.1, 0.0])[0] == Reason.TOO_DEEP


def test_a_lost_root_gives_an_empty_tree():
    tree = grown(DynamicTreePruner(high=0.0, low=0.0), Draft(0))
    assert tree.candidates == 0 and set(tree.reason[1:].tolist()) == {Reason.ENTROPY_CAP}


@given(st.lists(st.floats(-6, 0, width=16), min_size=1, max_size=30), st.integers(1, 12), st.data())
def test_budget_keeps_the_best_and_breaks_ties_towards_the_root(steps, budget, data):
    """Scores come from float16 here, so ties are everywhere; ancestors must still be kept."""
    parent = [-1] + [data.draw(st.integers(0, i)) for i in range(len(steps))]
    log_path = [0.0]
    for i, step in enumerate(steps):
        log_path.append(float(torch.tensor(log_path[parent[i + 1]] + step).half()))
    keep = top_nodes(torch.tensor([log_path]).half(), torch.ones(1, len(parent), dtype=torch.bool), budget)[0]
    assert bool(keep[0]) and int(keep.sum()) == min(budget, len(steps)) + 1
    assert all(bool(keep[parent[i]]) for i in range(1, len(parent)) if keep[i])
    worst_kept = min((log_path[i] for i in range(1, len(parent)) if keep[i]), default=0)
    assert all(log_path[i] <= worst_kept for i in range(1, len(parent)) if not keep[i])


@given(seeds, st.integers(1, 15))
def test_cutting_hopeless_nodes_early_changes_no_tree(seed, budget):
    """over_budget saves draft forwards; the tree must be what growing everything and trimming gives."""
    policy, draft = Threshold(0.001, 3, 3, budget), Draft(seed, step=1e-3)
    early = grown(policy, draft)
    saved = sum(draft.asked)
    free = Draft(seed, step=1e-3)
    whole = grown(Threshold(0.001, 3, 3, 8000), free)
    keep = policy.trim(whole.log_path[None], (whole.reason == Reason.KEPT)[None], torch.ones(1, 3))[0]
    assert kept_paths(early) == kept_paths(whole.select(torch.nonzero(keep).flatten()))
    assert saved <= sum(free.asked)


def test_over_budget_counts_the_pool():
    seen = frontier(1, torch.zeros(1, 1), torch.tensor([[[-1.0, -3.0]]]), pool=[[-0.5, -2.0]])
    path, kept = seen.child_log_path(), torch.ones(1, 1, 2, dtype=torch.bool)
    assert over_budget(seen, path, kept, 2).tolist() == [[[False, True]]]
    assert over_budget(seen, path, kept, 4).tolist() == [[[False, False]]]


def test_auto_tau_rises_with_the_price_of_a_node():
    def run(per_node):
        policy = DynamicTreePruner(tau="auto")
        for i in range(60):
            nodes = 1 + (7 * i) % 30
            verify = 0.05 + per_node * nodes
            policy = policy.after_step(Observation(2, nodes, verify + 0.005, verify))
        return policy.threshold

    cheap, dear, free = run(0.0002), run(0.004), run(0.0)
    assert free == pytest.approx(LOW, abs=1e-3) and cheap < dear <= HIGH
    # the price itself: tokens per second times seconds per node
    rate = 2 / (0.055 + 0.004 * 15.5)
    assert dear == pytest.approx(min(rate * 0.004, HIGH), rel=0.15)


def test_auto_tau_waits_until_sizes_differ_and_leaves_the_original_alone():
    policy = DynamicTreePruner(tau="auto")
    later = policy.after_step(Observation(1, 10, 0.1, 0.1)).after_step(Observation(1, 10, 0.1, 0.1))
    assert later.threshold == policy.threshold == 0.08
    assert DynamicTreePruner().after_step(Observation(1, 9, 1, 1)).threshold == 0.08
    assert later == policy  # the price is state, not a parameter


@pytest.mark.parametrize("text, wrong", [
    ("nonsense", "known: plain"), ("dynamc", "did you mean 'dynamic'"), ("dynamic:tua=0.1", "did you mean 'tau'"),
    ("dynamic:tau", "no parameter"), ("dynamic:tau=0", r"\(0, 1\]"), ("dynamic:tau=1.5", r"\(0, 1\]"),
    ("dynamic:tau=-0.1", r"\(0, 1\]"), ("dynamic:tau=nan", r"\(0, 1\]"), ("dynamic:tau=zero", "a number"),
    ("dynamic:low=3,high=2", "low must not exceed high"), ("dynamic:budget=0", "budget"), ("dynamic:budget=1.5", "whole"),
    ("dynamic:scope=tree", "scope"), ("dynamic:mid_widths=2", "mid_widths"), ("dynamic:mid_widths=a/b", "2/3"),
    ("dynamic:deep=2,depth=4", "deep"), ("dynamic:low=auto", "low"), ("threshold:tau=0", r"\(0, 1\]"),
    ("threshold:budget=-4", "budget"), ("uniform:depth=0", "depth"), ("uniform:depth=6,width=8", "nodes"),
    ("linear:gamma=0", "gamma"), ("plain:x=1", "takes none"), ("", "unknown policy"), ("dynamic:tau=inf", r"\(0, 1\]"),
])  # fmt: skip
def test_bad_policies_get_one_sentence(text, wrong):
    with pytest.raises(PolicyError, match=wrong) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


def test_edges_that_are_allowed():
    assert parse_policy("threshold:tau=1.0").tau == 1.0
    assert parse_policy("dynamic:budget=1").budget == 1
    assert parse_policy("uniform:depth=1,width=200").width == 200
    assert DynamicTreePruner(mid_widths=[1, 2]).mid_widths == (1, 2)


@pytest.mark.parametrize("policy", [cls() for cls in POLICIES.values()] + [
    DynamicTreePruner(0.05, 0.5, 2.2, (1, 4), 3, 9, 32, "level"), DynamicTreePruner(tau="auto"), Uniform(4, 4), Linear(3)
])  # fmt: skip
def test_command_line_form_goes_there_and_back(policy):
    assert parse_policy(policy.spec()) == policy


def test_lists_of_policies():
    got = parse_policies("plain, linear:gamma=3,dynamic:tau=0.05,budget=32 ,uniform,depth=2")
    assert got == [Autoregressive(), Linear(3), DynamicTreePruner(tau=0.05, budget=32), Uniform(depth=2)]
    with pytest.raises(PolicyError, match="no policy"):
        parse_policies(" , ")


def test_plain_never_asks_the_draft():
    draft = Draft(0)
    assert len(grown(Autoregressive(), draft)) == 1 and draft.asked == []


def test_policies_describe_themselves():
    for name, cls in POLICIES.items():
        assert cls.source and cls.name == name and "Cost per step" in (cls.__doc__ or "")
        assert cls.deterministic
