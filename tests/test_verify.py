"""Sampling laws: enumeration and goodness-of-fit for `match`, token-for-token equality for `coupled`."""

import collections

import pytest
import torch
from conftest import build, prompt
from scipy import stats
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import treespec
from treespec.chance import Draws
from treespec.errors import InputError
from treespec.noise import PositionNoise
from treespec.toy import TableModel
from treespec.tree import TokenTree
from treespec.verify import RULES, Coupled, Match, follow, make_rule

# Four tokens of a vocabulary of four: the first comes from the prefill, so the steps behind it have trees of depth 2
# and 1. The tables are peaked: on a flat law a goodness-of-fit test sees nothing.
IDS, NEW, DRAWS, SHARPNESS = torch.tensor([[3, 1, 2]]), 4, 300, 1.5
GRID = [
    {},
    dict(temperature=0.7, top_k=3),
    dict(top_p=0.8),
    dict(temperature=1.5, top_k=2, top_p=0.9),
    dict(repetition_penalty=1.3),
]


def pair(sizes=(4, 4)):
    target = TableModel.random(sizes[0], 1, SHARPNESS)
    return target, target.blurred(2, 1.5) if sizes[0] == sizes[1] else TableModel.random(sizes[1], 2, SHARPNESS)


def chain(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0):
    """transformers' own order of processors."""
    out = LogitsProcessorList()
    if repetition_penalty != 1.0:
        out.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1.0:
        out.append(TemperatureLogitsWarper(temperature))
    if top_k:
        out.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        out.append(TopPLogitsWarper(top_p))
    return out


@torch.no_grad()
def law(model, ids, n, processors, eos=None):
    """{continuation of n tokens, shorter where eos ends it: its exact probability}."""
    out = {}

    def walk(seq, p):
        new = seq.shape[1] - ids.shape[1]
        if new == n or (new and eos is not None and int(seq[0, -1]) == eos):
            out[tuple(seq[0, ids.shape[1] :].tolist())] = p
            return
        q = processors(seq, model(seq).logits[:, -1].float()).double().softmax(-1)[0]
        for t in torch.nonzero(q).flatten().tolist():
            walk(torch.cat([seq, torch.tensor([[t]])], 1), p * float(q[t]))

    walk(ids, 1.0)
    return out


def fit(draws, exact):
    """p-value of draws against the law; 0 for an impossible draw; rare outcomes are pooled."""
    counts, n = collections.Counter(draws), len(draws)
    if any(d not in exact for d in counts):
        return 0.0
    common = [k for k, p in exact.items() if p * n >= 5]
    observed, expected = [counts[k] for k in common], [exact[k] * n for k in common]
    if (rest := n - sum(expected)) > 1e-6:
        observed, expected = [*observed, n - sum(observed)], [*expected, rest]
    return stats.chisquare(observed, expected, sum_check=False).pvalue if len(observed) > 1 else 1.0


def draw(target, draft, policy, sampling, rule, **more):
    options = {"top_k": 0, "do_sample": True, "max_new_tokens": NEW, **sampling, **more}
    runs = [treespec.generate(target, draft, IDS, policy=policy, rule=rule, seed=s, **options) for s in range(DRAWS)]
    if draft is not None:
        assert any(e.path for r in runs for e in r.steps), "no tree was ever followed: nothing was tested"
    return [tuple(r.tokens) for r in runs]


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", GRID, ids=str)
def test_law_under_match_is_the_targets(sampling):
    target, draft = pair()
    draws = draw(target, draft, "uniform:depth=2,width=2", sampling, "match")
    assert fit(draws, law(target, IDS, NEW, chain(**sampling))) > 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GRID[0], GRID[3]], ids=str)
def test_law_under_coupled_is_the_targets(sampling):
    target, draft = pair()
    draws = draw(target, draft, "uniform:depth=2,width=2", sampling, "coupled")
    assert fit(draws, law(target, IDS, NEW, chain(**sampling))) > 1e-4


@pytest.mark.thorough
def test_law_with_an_end_token_and_pruned_trees():
    target, draft = pair()
    draws = draw(target, draft, "dynamic:tau=0.02,low=0.5,high=1.9", {}, "match", eos_token_id=1, pad_token_id=0)
    assert fit(draws, law(target, IDS, NEW, chain(), eos=1)) > 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_law_with_vocabularies_of_different_size(sizes):
    target, draft = pair(sizes)
    draws = draw(target, draft, "uniform:depth=2,width=3", {}, "match")
    assert fit(draws, law(target, IDS, NEW, chain())) > 1e-4


@pytest.mark.thorough
def test_the_goodness_of_fit_test_can_fail():
    """Draws of another temperature must be told apart with these very numbers of draws."""
    target, _ = pair()
    wrong = draw(target, None, "plain", dict(temperature=0.75), "match")
    assert fit(wrong, law(target, IDS, NEW, chain())) < 1e-4


@pytest.mark.thorough
def test_a_biased_rule_is_caught(monkeypatch):
    """Accepting whatever child the draft ranks first, if the target gives it a fair chance, is a plausible mistake."""
    target, draft = pair()
    honest = Match.choose

    def biased(self, scores, position):
        token = honest(self, scores, position)
        return int(scores.argmax()) if float(scores.softmax(-1).max()) > 0.5 else token

    monkeypatch.setattr(Match, "choose", biased)
    draws = draw(target, draft, "uniform:depth=2,width=2", {}, "match")
    assert fit(draws, law(target, IDS, NEW, chain())) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, sampling",
    [
        ("llama", {}),
        ("llama", dict(temperature=0.6, top_p=0.9)),
        ("llama", dict(repetition_penalty=1.4)),
        ("gemma3-window-8", dict(temperature=0.6, top_p=0.9)),
        ("gpt2", dict(repetition_penalty=1.4)),
    ],
    ids=str,
)
def test_coupled_text_depends_on_seed_and_target_alone(name, sampling):
    target, drafts = build(name), [build(name), build("llama", seed=9), "ngram"]
    options = dict(rule="coupled", do_sample=True, top_k=0, max_new_tokens=24, **sampling)
    texts = set()
    for seed in (1, 2):
        plain = treespec.generate(target, None, prompt(9), seed=seed, **options).tokens
        texts.add(tuple(plain))
        for draft in drafts:
            for policy in (
                "linear",
                "uniform:depth=3,width=2",
                "threshold:tau=0.01",
                "dynamic:tau=0.01,low=2,high=6.5",
            ):
                got = treespec.generate(target, draft, prompt(9), policy=policy, seed=seed, **options)
                assert got.tokens == plain, (seed, policy)
    assert len(texts) == 2


@pytest.mark.thorough
def test_shared_noise_makes_draft_and_target_agree(llama):
    """The point of coupling: a good draft is accepted far more often than by independent draws."""
    near = build("llama")
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    options = dict(do_sample=True, top_k=0, max_new_tokens=60, policy="linear:gamma=3")
    per_step = {
        rule: sum(
            treespec.generate(llama, near, prompt(9), rule=rule, seed=s, **options).stats.tokens_per_step
            for s in range(4)
        )
        for rule in ("match", "coupled")
    }
    assert per_step["coupled"] > 1.3 * per_step["match"]


def test_greedy_is_the_limit_of_both_rules(llama, stranger):
    for rule in ("match", "coupled"):
        got = treespec.generate(llama, stranger, prompt(7), rule=rule, do_sample=False, max_new_tokens=16).sequences
        cold = treespec.generate(
            llama, stranger, prompt(7), rule=rule, do_sample=True, temperature=1e-6, top_k=0, max_new_tokens=16
        ).sequences
        assert torch.equal(got, cold)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy_not_nan(llama, stranger, temperature):
    greedy = treespec.generate(llama, None, prompt(7), do_sample=False, max_new_tokens=12).tokens
    for more in ({}, dict(top_p=0.9), dict(top_k=5)):
        options = dict(
            do_sample=True, temperature=temperature, max_new_tokens=12, policy="uniform:depth=2,width=2", **more
        )
        assert treespec.generate(llama, stranger, prompt(7), **options).tokens == greedy
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            treespec.generate(llama, stranger, prompt(7), do_sample=True, temperature=bad, max_new_tokens=2)


def test_same_seed_same_text_and_the_global_generator_is_untouched(llama, stranger):
    before = torch.random.get_rng_state()
    options = dict(do_sample=True, top_k=0, max_new_tokens=12)
    a, b, c = (treespec.generate(llama, stranger, prompt(5), seed=s, **options).tokens for s in (3, 3, 4))
    assert a == b != c and torch.equal(before, torch.random.get_rng_state())


def test_without_a_seed_torchs_own_generator_counts(llama):
    options = dict(seed=None, do_sample=True, top_k=0, max_new_tokens=12)
    texts = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        texts.append(treespec.generate(llama, None, prompt(5), **options).tokens)
    assert texts[0] == texts[1] != texts[2]


def test_tokens_outside_top_k_and_top_p_never_appear():
    """p is one-hot: everything else must never be drawn, whatever the noise."""
    target, _ = pair()
    options = dict(
        do_sample=True, temperature=1e-3, top_k=0, max_new_tokens=8, rule="coupled", policy="uniform:depth=3,width=3"
    )
    greedy = treespec.generate(target, None, IDS, do_sample=False, max_new_tokens=8).tokens
    assert all(treespec.generate(target, pair()[0], IDS, seed=s, **options).tokens == greedy for s in range(30))


def walk_of(rule, tree, rows):
    return list(rule.walk(tree, lambda n: rows[n], 5))


def one_hot(token, size=6):
    return torch.full((size,), -9.0).index_fill(0, torch.tensor([token]), 9.0)


def test_a_walk_matches_parents_not_just_depth():
    """Token 2 at depth 2 exists under another parent only: it must not be accepted."""
    tree = TokenTree.from_lists([0, 1, 3, 2], [-1, 0, 0, 2])
    rows = [one_hot(1), one_hot(2), one_hot(5), one_hot(5)]
    assert walk_of(Match(None), tree, rows) == [(1, 1), (2, None)]


def test_an_argmax_of_zero_accepts_no_phantom():
    tree = TokenTree.from_lists([4, 1], [-1, 0])
    assert walk_of(Match(None), tree, [one_hot(0), one_hot(2)]) == [(0, None)]


def test_the_walk_follows_second_children_to_the_end():
    tree = TokenTree.from_lists([0, 1, 2, 3, 4], [-1, 0, 0, 2, 2])
    assert walk_of(Match(None), tree, [one_hot(2), one_hot(5), one_hot(4), one_hot(5), one_hot(3)]) == [
        (2, 2),
        (4, 4),
        (3, None),
    ]


def test_fresh_randomness_at_every_position():
    """One draw reused at every step was a real fault; noise of neighbouring positions must differ."""
    rule = Coupled(3, 6)
    flat = torch.zeros(6)
    assert len({rule.choose(flat, t) for t in range(40)}) > 2


def test_unknown_rules_and_bad_seeds():
    for name, seed, words in (("rejection", 0, "unknown acceptance rule"), ("match", -1, "seed")):
        with pytest.raises(InputError, match=words):
            make_rule(name, sample=True, seed=seed, vocabulary=8)


class Asked:
    """A chance that answers with the least probable token, and remembers the laws it was asked about."""

    def __init__(self):
        self.laws = []

    def token(self, p):
        self.laws.append(p)
        return int(p.argmin())


def test_match_draws_from_the_softmax_of_the_nodes_scores():
    tree, rows = TokenTree.from_lists([0, 1, 2], [-1, 0, 1]), torch.tensor([[0.0, -1, 2], [3, 0, 1], [1, 2, 3]])
    chance = Asked()
    assert walk_of(Match(chance), tree, rows) == [(1, 1), (1, None)]
    torch.testing.assert_close(torch.stack(chance.laws), rows[:2].softmax(-1))
    assert walk_of(Match(None), tree, rows) == [(2, None)]


def test_a_walk_counts_positions_from_the_one_it_was_given():
    tree, asked = TokenTree.from_lists([0, 1, 2], [-1, 0, 1]), []

    def token_at(node, position):
        asked.append((node, position))
        return [1, 2, 9][node]

    assert list(follow(tree, token_at, 30)) == [(1, 1), (2, 2), (9, None)]
    assert asked == [(0, 30), (1, 31), (2, 32)]


def test_coupled_adds_the_noise_of_the_position():
    rule, noise = Coupled(3, 6), PositionNoise(3, 6)
    scores = torch.tensor([0.0, 1.0, 0.5, -1.0, 0.2, 0.3])
    want = [int((scores + noise.gumbel(t)).argmax()) for t in range(40)]
    assert [rule.choose(scores, t) for t in range(40)] == want and len(set(want)) > 2
    assert torch.equal(rule.noise(7), noise.gumbel(7)) and Match(None).noise is None
    assert rule.chance is None, "nothing is left to chance"
    tree = TokenTree.from_lists([0, want[5], want[6]], [-1, 0, 1])
    assert list(rule.walk(tree, lambda node: scores, 5)) == [(want[5], 1), (want[6], 2), (want[7], None)]


def test_greedy_coupled_knows_no_noise():
    rule = Coupled(3, 6, greedy=True)
    assert rule.noise is None and all(rule.choose(torch.arange(6.0), t) == 5 for t in range(40))


def test_choices_at_all_nodes_are_those_of_the_walk():
    """Nodes of one depth share a position and its noise."""
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    tree = TokenTree.from_lists([0, 1, 2, 3, 4], [-1, 0, 0, 1, 3], [0.0, -1.0, -1.0, -1.0, -1.0], [1.0] * 5)
    positions = [8 + depth for depth in tree.depth.tolist()]
    assert positions == [8, 9, 9, 10, 11]
    rule = Coupled(3, 6)
    want = [rule.choose(row, t) for row, t in zip(logits, positions)]
    chosen = [rule.choose_from(row, []) for row in rule.table(tree, logits, 8).tolist()]
    assert chosen == want != logits.argmax(-1).tolist()
    for greedy in (Match(None), Coupled(3, 6, greedy=True)):
        assert greedy.table(tree, logits, 8).flatten().tolist() == logits.argmax(-1).tolist()


def test_the_rules_by_name():
    made = {name: make_rule(name, sample=True, seed=9, vocabulary=5) for name in RULES}
    assert {name: type(rule).__name__ for name, rule in made.items()} == {
        "match": "Match", "coupled": "Coupled", "rrs": "Rrs", "hybrid": "Hybrid", "block": "Block", "traversal": "Traversal",
    }  # fmt: skip
    assert all(rule.name == name for name, rule in made.items())
    assert {name for name, rule in made.items() if rule.ahead} == {"block", "traversal"}
    assert torch.equal(made["coupled"].noise(2), PositionNoise(9, 5).gumbel(2))
    p = torch.full((50,), 0.02)
    for stream, draws in ((0, made["match"].chance), (0, made["rrs"].chance), (1, made["rrs"].draft)):
        own = Draws(9, stream)
        assert [draws.token(p) for _ in range(9)] == [own.token(p) for _ in range(9)]


@pytest.mark.parametrize("name", RULES)
def test_without_sampling_every_rule_takes_the_largest_score(name):
    rule = make_rule(name, sample=False, seed=9, vocabulary=5)
    assert rule.name == ("coupled" if name == "coupled" else "match")
    assert rule.chance is None and rule.noise is None and rule.sampler is None
    assert all(rule.choose(torch.tensor([0.0, 2.0, 1.0, 0.0, 0.0]), t) == 1 for t in range(9))
    assert make_rule(name, sample=False, seed=None, vocabulary=5).name == rule.name


def test_a_missing_seed_is_drawn_once_from_torchs_generator():
    noises = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        noises.append(make_rule("coupled", sample=True, seed=None, vocabulary=20).noise(0))
        after = torch.rand(())
        torch.manual_seed(manual)
        seed = int(torch.randint(2**62, (1,)))
        assert torch.equal(noises[-1], PositionNoise(seed, 20).gumbel(0)) and torch.equal(after, torch.rand(()))
    assert torch.equal(noises[0], noises[1]) and not torch.equal(noises[0], noises[2])


def test_a_refused_rule_says_what_there_is():
    with pytest.raises(InputError) as error:
        make_rule("rejection", sample=True, seed=0, vocabulary=8)
    assert str(error.value) == (
        "unknown acceptance rule 'rejection'; known: match, coupled, rrs, hybrid, block, traversal"
    )
    with pytest.raises(InputError, match="seed"):
        make_rule("match", sample=False, seed=-1, vocabulary=8)
