"""Laws by trying every random outcome, with the live rules, samplers and growth loop.

Exact pairs must come out at rounding; pairs known to be biased must come out biased, and be refused by the engine.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import prompt
from scipy import stats

import treespec
from treespec.chance import Draws
from treespec.drafters import Drafted
from treespec.errors import PolicyError
from treespec.exactness import Replay, drawn_tree, emitted_law, outcomes, plain_law, step_law, total_variation
from treespec.policies import BestFirst, DynamicTreePruner, Linear, Policy, Threshold, Uniform, parse_policy
from treespec.policies.base import Decision, present_children, reasons, top_nodes
from treespec.rejection import Hybrid, Rrs
from treespec.sampling import Law, TopAndOne, WithoutReplacement
from treespec.traversal import Block, Traversal
from treespec.tree import TokenTree
from treespec.verify import Match

pytestmark = pytest.mark.thorough

EXACT = 1e-12
PUBLISHED = ["specinfer:expansion=2/1", "sequoia:budget=4,depth=2", "linear:gamma=2,confidence=0.5,svip=0.3"]
CHAIN, TWINS = Linear(gamma=3), Uniform(depth=2, width=2)


def table(vocabulary, seed, sharpness=1.5, keep=None):
    """Distributions by path; with ``keep``, only that many tokens are possible anywhere."""

    @dict_of
    def law(path):
        generator = torch.Generator().manual_seed(seed * 7919 + sum((t + 2) * 11**i for i, t in enumerate(path)))
        x = sharpness * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        if keep is not None:
            x[x.argsort(descending=True)[keep:]] = -torch.inf
        return x.softmax(-1)

    return law


class dict_of(dict):
    def __init__(self, function):
        self.function = function

    def __missing__(self, key):
        self[key] = self.function(key)
        return self[key]

    def __call__(self, key):
        return self[key].clone()  # a rule must not spoil it


def both(cls):
    return lambda chance: cls(chance, chance)


def bias(rule, tree, target, length):
    return total_variation(emitted_law(rule, tree, target, length), plain_law(target, length))


def drawn_bias(cls, policy, target, draft, depth):
    return bias(both(cls), drawn_tree(both(cls), policy, draft, depth), target, depth + 1)


@dataclass(frozen=True)
class ByEntropy(Policy):
    """Widths from the node's entropy, growth from its path probability: adaptive, yet decided before the draw."""

    name = "by-entropy"
    predictable = True
    depth: int = 2
    levels, width = 2, 2

    def decide(self, frontier):
        kept = present_children(frontier, torch.where(frontier.entropy < 1.2, 1, 2)[..., None])
        return Decision(reasons(kept), kept & (frontier.child_log_path() > -1.5))


@dataclass(frozen=True)
class BySiblings(ByEntropy):
    """A level's nodes get two children while their path probability is the level's largest, else one."""

    name = "by-siblings"

    def decide(self, frontier):
        best = frontier.log_path == frontier.log_path.amax(-1, keepdim=True)
        kept = present_children(frontier, torch.where(best, 2, 1)[..., None])
        return Decision(reasons(kept), kept)


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Block, Traversal])
@pytest.mark.parametrize("vocabulary", [3, 5])
def test_chains(cls, vocabulary):
    assert drawn_bias(cls, CHAIN, table(vocabulary, 1), table(vocabulary, 2), 3) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
@pytest.mark.parametrize("policy", [TWINS, Uniform(1, 3), ByEntropy(), BySiblings()], ids=Policy.spec)
def test_trees(cls, policy):
    """Widths of two and of the whole vocabulary, and shapes that depend on what was drawn before."""
    assert drawn_bias(cls, policy, table(3, 3), table(3, 4), policy.levels) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
@pytest.mark.parametrize("policy", PUBLISHED)
def test_published_trees(cls, policy):
    assert drawn_bias(cls, parse_policy(policy), table(3, 3), table(3, 4), 2) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
@pytest.mark.parametrize("keep", [(2, None), (None, 2), (2, 2), (1, 3), (3, 1)], ids=str)
def test_supports_that_differ(cls, keep):
    """After top-p either side may rule tokens out that the other proposes or needs; children may be fewer than asked."""
    assert drawn_bias(cls, TWINS, table(3, 5, keep=keep[0]), table(3, 6, keep=keep[1]), 2) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
@pytest.mark.parametrize("vocabulary, width", [(4, 4), (5, 2)])
def test_wider_vocabularies(cls, vocabulary, width):
    assert drawn_bias(cls, Uniform(1, width), table(vocabulary, 5), table(vocabulary, 6), 1) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
def test_a_draft_that_is_the_target_is_always_accepted(cls):
    both_are = table(3, 7)
    assert drawn_bias(cls, TWINS, both_are, both_are, 2) < EXACT
    if cls is not Hybrid:  # whose first children are no sample
        assert mean_length(cls, TWINS, both_are, both_are, 2) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "policy",
    [CHAIN, TWINS, Threshold(tau=0.2, width=2), DynamicTreePruner(tau=0.1, low=0.8, high=1.55), BestFirst(budget=3)],
    ids=Policy.spec,
)
def test_match_takes_any_tree(policy):
    target, draft = table(3, 8), table(3, 9)
    assert bias(Match, drawn_tree(Match, policy, draft, 3), target, 4) < EXACT


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Block, Traversal])
def test_without_a_tree_the_rules_are_plain_sampling(cls):
    assert bias(both(cls), lambda chance: TokenTree.root_only(0), table(5, 1), 1) < EXACT


# --- pairs known to be biased -----------------------------------------------------------------------------------------


def fixed_children(draft, policy=TWINS, depth=2):
    """The draft's first children, passed off as drawn."""

    def run(chance):
        tree = drawn_tree(Match, policy, draft, depth)(chance)
        inner = [n for n in range(len(tree)) if n in tree.parent.tolist()]
        tree.laws = {n: Law(draft(tuple(tree.token[tree.path(n)[1:]].tolist()))) for n in inner}
        return tree

    return run


def pruned_after(grow_tree, budget):
    """Drawn, then cut down to the most probable nodes, as best-first and thresholds do."""

    def run(chance):
        tree = grow_tree(chance)
        stays = top_nodes(tree.log_path[None], torch.ones(1, len(tree), dtype=torch.bool), budget)[0]
        return tree.select(torch.nonzero(stays).flatten())

    return run


def ranked_after(grow_tree):
    """Drawn, then tested with the draft's favourite first."""

    def run(chance):
        tree = grow_tree(chance)
        order = sorted(range(len(tree)), key=lambda n: (int(tree.depth[n]), -float(tree.logp[n])))
        new = {old: i for i, old in enumerate(order)}
        again = TokenTree.from_lists(
            tree.token[order].tolist(),
            [new.get(p, -1) for p in tree.parent[order].tolist()],
            tree.logp[order].tolist(),
        )
        again.laws = {new[n]: law for n, law in tree.laws.items()}
        return again

    return run


def other_law(grow_tree, power):
    """Drawn at one temperature, tested at another."""

    def run(chance):
        tree = grow_tree(chance)
        tree.laws = {n: Law(law.probability**power) for n, law in tree.laws.items()}
        return tree

    return run


@pytest.mark.parametrize("cls, least", [(Rrs, 0.3), (Traversal, 0.7), (Block, 0.7)])
def test_children_that_were_not_drawn_are_biased(cls, least):
    target, draft = table(3, 12), table(3, 13)
    policy, depth = (CHAIN, 3) if cls is Block else (TWINS, 2)
    assert bias(both(cls), fixed_children(draft, policy, depth), target, depth + 1) > least


@pytest.mark.parametrize("cls", [Rrs, Traversal])
@pytest.mark.parametrize("change", [lambda grow: pruned_after(grow, 1), ranked_after], ids=["pruned", "ranked"])
def test_drawn_first_and_pruned_or_ranked_after_is_biased(cls, change):
    target, draft = table(3, 12), table(3, 13)
    grow = drawn_tree(both(cls), Uniform(1, 2), draft, 1)
    assert bias(both(cls), grow, target, 2) < EXACT
    assert bias(both(cls), change(grow), target, 2) > 0.15


@pytest.mark.parametrize("cls", [Rrs, Hybrid, Traversal])
def test_testing_another_q_than_was_drawn_from_is_biased(cls):
    target, draft = table(3, 18), table(3, 19)
    grow = drawn_tree(both(cls), Uniform(1, 2), draft, 1)
    assert bias(both(cls), other_law(grow, 1.0), target, 2) < EXACT
    assert bias(both(cls), other_law(grow, 2.0), target, 2) > 0.09


# --- and refused ------------------------------------------------------------------------------------------------------

LIVE = dict(do_sample=True, top_k=0, max_new_tokens=6)


@pytest.mark.parametrize("rule", ["rrs", "hybrid", "block", "traversal"])
@pytest.mark.parametrize("policy", ["threshold", "dynamic", "bestfirst:budget=4"])
def test_policies_that_look_first_are_refused(llama, stranger, rule, policy):
    with pytest.raises(
        PolicyError, match=f"rule '{rule}' would be biased with policy '{policy}.*looks at the children"
    ):
        treespec.generate(llama, stranger, prompt(5), policy=policy, rule=rule, **LIVE)


def test_block_refuses_trees(llama, stranger):
    with pytest.raises(PolicyError, match=r"rule 'block' verifies chains.*use policy linear"):
        treespec.generate(llama, stranger, prompt(5), policy="uniform:depth=2,width=2", rule="block", **LIVE)


@dataclass(frozen=True)
class Pretender(Uniform):
    """Says that it decides first, and drops drawn children all the same."""

    name = "pretender"
    late: bool = False

    def decide(self, frontier):
        kept = present_children(frontier, self.width)
        return Decision(reasons(kept & (frontier.child_logp > (-torch.inf if self.late else -1.0))), kept)

    def trim(self, score, kept, drawn=None):
        return top_nodes(score, kept, 2)


@pytest.mark.parametrize("late", [False, True])
def test_a_policy_that_only_claims_to_decide_first_is_caught(llama, stranger, late):
    with pytest.raises(PolicyError, match="dropped some of them afterwards"):
        treespec.generate(llama, stranger, prompt(5), policy=Pretender(2, 2, late), rule="rrs", **LIVE)


class Stubborn:
    """A drafter that knows nothing of drawing."""

    depth_room = 9

    def begin(self, request):
        self.root = request.ids[-1]

    def commit(self, path, tokens):
        self.root = tokens[-1]

    def grow(self, policy, max_depth):
        return Drafted(TokenTree.from_lists([self.root, 5, 6], [-1, 0, 0]))


def test_drafters_that_cannot_draw_are_refused(llama):
    with pytest.raises(PolicyError, match="Stubborn does not say what it draws them from"):
        treespec.generate(llama, Stubborn(), prompt(5), policy="uniform:depth=1,width=2", rule="rrs", **LIVE)
    options = dict(policy="uniform:depth=1,width=2", do_sample=False, max_new_tokens=6)
    greedy = treespec.generate(llama, Stubborn(), prompt(5), rule="rrs", **options).tokens
    assert greedy == treespec.generate(llama, None, prompt(5), do_sample=False, max_new_tokens=6).tokens


# --- the enumerator and the samplers themselves -----------------------------------------------------------------------


def test_all_outcomes_of_a_small_procedure():
    def run(chance):
        first = chance.token(torch.tensor([0.5, 0.0, 0.25]))
        return (first, chance.coin(0.25)) if first == 0 else (first,)

    found = list(outcomes(run))
    assert sum(w for w, _ in found) == pytest.approx(1.0)
    assert {r: pytest.approx(w) for w, r in found} == {(0, True): 1 / 6, (0, False): 1 / 2, (2,): 1 / 3}
    assert Replay([]).coin(1.0) and not Replay([]).coin(0.0)


def orders(q, k):
    """{drawing order: probability}, by the product formula of drawing without replacement."""
    out = {}
    for order in itertools.permutations(range(len(q)), k):
        p, left = 1.0, 1.0
        for token in order:
            p, left = p * q[token] / left, left - q[token]
        out[order] = p
    return out


def test_drawing_in_sequence_and_gumbel_top_k_have_one_law():
    q = torch.tensor([0.45, 0.3, 0.2, 0.05], dtype=torch.float64)
    exact, found = orders(q.tolist(), 2), {}
    for weight, row in outcomes(lambda c: tuple(c.ranking(q[None], 2)[0].tolist())):
        found[row] = found.get(row, 0.0) + weight
    assert found == pytest.approx(exact)
    draws = Draws(1).ranking(q.expand(20000, -1), 2)
    expected = np.array(list(exact.values())) * len(draws)
    observed = [int(((draws[:, 0] == a) & (draws[:, 1] == b)).sum()) for a, b in exact]
    assert stats.power_divergence(observed, expected, lambda_=0).pvalue > 1e-3  # the G-test
    deceived = np.array(list(orders([0.42, 0.33, 0.2, 0.05], 2).values())) * len(draws)
    assert stats.power_divergence(observed, deceived, lambda_=0).pvalue < 1e-6


def test_impossible_tokens_are_never_drawn():
    law = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for chance in (Draws(2), Replay([])):
        rows = chance.ranking(law, 3)
        assert sorted(rows[0].tolist()) == [-1, 0, 2] and rows[1].tolist() == [-1] * 3


def test_hybrids_children_are_the_top_and_one_off_it():
    law = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4], [0.6, 0.4, 0.0, 0.0]])
    last = set()
    for seed in range(30):
        rows = TopAndOne(Draws(seed)).children(law, torch.tensor([3, 1, 3]))
        assert rows[0, :2].tolist() == [0, 2] and rows[2].tolist() == [0, 1, -1]
        last.add((int(rows[0, 2]), int(rows[1, 0])))
    assert {a for a, _ in last} == {1, 3} and {b for _, b in last} == {0, 1, 2, 3}


def test_streams_are_independent_and_seeds_repeat():
    p = torch.full((1000,), 1e-3)
    assert Draws(5).token(p) == Draws(5).token(p)
    assert len({Draws(5).token(p), Draws(5, 1).token(p), Draws(5, 2).token(p), Draws(6, 1).token(p)}) == 4
    law = p.expand(2, -1)
    rows = WithoutReplacement(Draws(5)).children(law, torch.tensor([4, 2]))
    assert rows.shape == (2, 4) and rows[0].tolist() != rows[1].tolist()
    assert Draws(2**64 - 1).coin(1.0) and not Draws(2**64 - 1).coin(0.0)


def block_lengths(p, q, chain):
    """Acceptance lengths of a chain by block verification as its paper states it."""
    gamma, h = len(chain), [1.0]
    for i, x in enumerate(chain):
        h.append(min(1.0, h[-1] * float(p[i][x] / q[i][x])))
    accept = []
    for i in range(1, gamma):
        s = float((h[i] * p[i] - q[i]).clamp(min=0).sum())
        accept.append(s / (s + 1 - h[i]) if s else 0.0)
    accept.append(h[gamma])
    out, left = {}, 1.0
    for i in range(gamma, 0, -1):
        out[i], left = left * accept[i - 1], left * (1 - accept[i - 1])
    return {0: left, **out}


def paths(tree, law):
    return [law(tuple(tree.token[tree.path(n)[1:]].tolist())) for n in range(len(tree))]


def test_block_accepts_as_long_as_its_paper_says():
    target, draft = table(4, 12), table(4, 13)
    for _, tree in itertools.islice(outcomes(drawn_tree(both(Block), CHAIN, draft, 3)), 40):
        p, q = paths(tree, target), paths(tree, draft)
        want = block_lengths(p, q, tree.token[1:].tolist())
        got = dict.fromkeys(range(4), 0.0)
        for tokens, w in step_law(both(Block), lambda chance, tree=tree: tree, target).items():
            got[len(tokens) - 1] += w
        assert got == pytest.approx(want, abs=1e-12)


def mean_length(cls, policy, target, draft, depth):
    law = step_law(both(cls), drawn_tree(both(cls), policy, draft, depth), target)
    return sum(p * len(tokens) for tokens, p in law.items())


def test_from_the_leaves_up_more_is_accepted():
    """The point of block and traversal; and the point of drawing at all against match with the draft's first child."""
    target, draft = table(3, 14), table(3, 15)
    chains = {cls: mean_length(cls, CHAIN, target, draft, 3) for cls in (Rrs, Block)}
    trees = {cls: mean_length(cls, TWINS, target, draft, 2) for cls in (Rrs, Traversal)}
    assert chains[Block] > chains[Rrs] + 1e-3 and trees[Traversal] > trees[Rrs] + 1e-3
