"""The drawn-children rules live: laws of long texts, processors, drafters, and what each test would catch."""

import collections
import warnings

import pytest
import torch
from conftest import build, prompt
from scipy import stats
from test_head import texts
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

import treespec
from treespec import readout, shaping
from treespec.distill.train_head import new_head
from treespec.drafters import HeadDrafter, MixDrafter, NgramDrafter
from treespec.errors import InputError, PolicyError
from treespec.sampling import Law
from treespec.toy import TableModel
from treespec.tree import TokenTree

POLICY = {"block": "linear:gamma=3", "rrs": "uniform:depth=2,width=2", "traversal": "uniform:depth=2,width=2"}
POLICY["hybrid"] = POLICY["rrs"]
# after two tokens the toy's law is known, so one text gives as many observations as tokens: far cheaper than one text
# per observation, and every place of every tree counts
TOKENS = 600
# the bias depends on the node's own last token: with the wrong prefix the law is another
SAMPLING = dict(temperature=1.3, top_p=0.95, sequence_bias={(a, (a + 1) % 4): 1.5 for a in range(4)})


def toy_pair():
    target = TableModel.random(4, 1, 1.5)
    return target, target.blurred(2, 1.5)


def transitions(rule, sampling=SAMPLING, draft=None, policy=None):
    """p-value of a text's transitions against the target's own, processors included; 0 for an impossible one."""
    target, blurred = toy_pair()
    options = {"top_k": 0, "do_sample": True, "max_new_tokens": TOKENS, **sampling}
    policy = POLICY[rule] if policy is None else policy
    run = treespec.generate(target, draft or blurred, [[3, 1, 2]], policy=policy, rule=rule, seed=5, **options)
    assert run.stats.tokens_per_step > 1.2, "no tree was ever followed: nothing was tested"
    request = treespec.request.prepare(target, torch.tensor([[3, 1, 2]]), **options)
    text = [1, 2, *run.tokens]
    seen = collections.defaultdict(collections.Counter)
    for a, b, c in zip(text, text[1:], text[2:]):
        seen[a, b][c] += 1
    total, freedom = 0.0, 0
    for (a, b), counts in seen.items():
        p = request.processors(torch.tensor([[a, b]]), target.table[a, b][None].clone())[0].double().softmax(-1)
        expected, observed = p * sum(counts.values()), torch.tensor([counts[t] for t in range(4)])
        if bool((observed[p == 0] > 0).any()):
            return 0.0
        often = expected >= 5
        expected = torch.cat([expected[often], expected[~often].sum()[None]])
        observed = torch.cat([observed[often], observed[~often].sum()[None]])
        observed, expected = observed[expected > 0], expected[expected > 0]
        total += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    return float(stats.chi2.sf(total, freedom))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", POLICY)
def test_the_law_is_the_targets(rule):
    assert transitions(rule) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("rule", POLICY)
def test_testing_another_q_would_be_seen(rule, monkeypatch):
    honest = Law.dense

    def dishonest(self, like):
        q = honest(self, like)
        q = q**3 if rule == "hybrid" else (q > 0).double()
        return q / q.sum()

    monkeypatch.setattr(Law, "dense", dishonest)
    assert transitions(rule) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_scores_with_the_roots_prefix_would_be_seen(rule, monkeypatch):
    monkeypatch.setattr(readout, "node_scores", lambda processors, ids, tree, x: processors(ids.expand(len(x), -1), x))
    assert transitions(rule) < 1e-6


def test_the_law_with_n_grams_drawn_from_what_was_seen():
    assert transitions("rrs", dict(temperature=0.8), draft="ngram") > 1e-3


@pytest.mark.parametrize("rule", POLICY)
def test_greedy_is_the_limit(rule, llama, twin):
    """Without sampling the rules are one, so any policy and any drafter will do."""
    want = treespec.generate(llama, None, prompt(7), do_sample=False, max_new_tokens=12).tokens
    for policy in ("bestfirst:budget=6", "uniform:depth=2,width=2"):
        got = treespec.generate(llama, twin, prompt(7), rule=rule, policy=policy, do_sample=False, max_new_tokens=12)
        assert got.tokens == want and got.stats.tokens_per_step > 1.5


def sampled(target, draft, rule, **more):
    options = dict(do_sample=True, top_k=0, max_new_tokens=20, policy=POLICY[rule], rule=rule, seed=3) | more
    return treespec.generate(target, draft, prompt(6), **options)


@pytest.mark.parametrize("rule", POLICY)
def test_the_target_as_its_own_draft_is_accepted_whole(rule, llama, twin):
    run = sampled(llama, twin, rule, temperature=0.8, top_p=0.9, max_new_tokens=25)
    whole = [len(e.tokens) for e in run.steps[1:-1]]
    assert rule == "hybrid" or min(whole) == (4 if rule == "block" else 3), "q was not the one that was tested"


@pytest.mark.parametrize("rule", POLICY)
def test_seeds_repeat_and_differ_and_no_event_keeps_a_law(rule, llama, stranger):
    one, again, other = (sampled(llama, stranger, rule, seed=s) for s in (3, 3, 4))
    assert one.tokens == again.tokens != other.tokens
    assert all(not e.tree.laws for e in one.steps) and any(len(e.tree) > 2 for e in one.steps)


@pytest.mark.parametrize("rule", POLICY)
def test_scores_and_logits_are_those_of_the_emitted_text(rule, llama, stranger):
    """The rules that look ahead read scores of many nodes; what is returned is one row per new token all the same."""
    run = sampled(
        llama, stranger, rule, temperature=0.7, repetition_penalty=1.3,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert len(run.scores) == len(run.logits) == len(run.tokens) == 20
    with torch.no_grad():
        want = llama(run.sequences).logits[0, 5:-1]
    torch.testing.assert_close(torch.cat(run.logits), want, atol=2e-4, rtol=1e-4)
    for i, row in enumerate(run.scores):
        ids = run.sequences[:, : 6 + i]
        again = RepetitionPenaltyLogitsProcessor(1.3)(ids, run.logits[i].clone()) / 0.7
        torch.testing.assert_close(row, again)


class Counting(LogitsProcessor):
    def __call__(self, ids, scores):
        self.calls = getattr(self, "calls", 0) + 1
        return scores


def test_processors_that_may_keep_state_are_refused_only_where_branches_are_asked_about(llama, stranger):
    for rule in POLICY:
        own = LogitsProcessorList([Counting()])
        if rule in ("block", "traversal"):
            with pytest.raises(InputError, match=f"rule '{rule}'.*Counting may keep state"):
                sampled(llama, stranger, rule, logits_processor=own)
        else:
            assert len(sampled(llama, stranger, rule, logits_processor=own).tokens) == own[0].calls == 20


def test_scores_by_depth_are_scores_one_by_one():
    tree = TokenTree.from_lists([4, 1, 2, 3, 1, 2, 5], [-1, 0, 0, 1, 1, 2, 4])
    ids, logits = torch.tensor([[7, 3, 4]]), torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), TopPLogitsWarper(0.8)])
    got = shaping.node_scores(chain, ids, tree, logits)
    for node in range(7):
        own = torch.cat([ids, tree.token[tree.path(node)[1:]][None]], dim=1)
        torch.testing.assert_close(got[node], chain(own, logits[node][None].clone())[0])
    assert shaping.node_scores(LogitsProcessorList(), ids, tree, logits) is logits


@pytest.mark.parametrize("rule", ["rrs", "traversal"])
def test_nothing_behind_a_stop_token(rule):
    target, draft = toy_pair()
    for seed in range(8):
        options = dict(do_sample=True, top_k=0, max_new_tokens=30, eos_token_id=2, pad_token_id=0, seed=seed)
        run = treespec.generate(target, draft, [[3, 1, 2]], rule=rule, policy=POLICY[rule], **options)
        assert 2 not in run.tokens[:-1]


@pytest.mark.parametrize("name", treespec.policies.POLICIES)
def test_every_policy_either_fixes_its_shape_first_or_is_refused(name, llama, twin):
    """A policy that is added and claims too much is caught here by the growth loop."""
    policy = treespec.policies.POLICIES[name]()
    if policy.predictable:
        assert len(sampled(llama, twin, "rrs", policy=policy).tokens) == 20
    else:
        with pytest.raises(PolicyError, match="looks at the children"):
            sampled(llama, twin, "rrs", policy=policy)


def test_draft_and_target_have_their_own_streams():
    rule = treespec.verify.make_rule("rrs", sample=True, seed=9, vocabulary=1000)
    p = torch.full((1000,), 1e-3)
    assert [rule.chance.token(p) for _ in range(4)] != [rule.draft.token(p) for _ in range(4)]


@torch.no_grad()
def drawn_children(drafter, ids=(5, 6, 7, 5, 6), vocabulary=97, shape=None, hidden=None):
    """A tree grown by a drafter for ``rrs``, and its laws over the whole vocabulary."""
    rule = treespec.verify.make_rule("rrs", sample=True, seed=9, vocabulary=vocabulary)
    drafter.begin(treespec.drafters.DraftRequest(list(ids), 64, vocabulary, shape, sampler=rule.sampler))
    if hidden is not None:
        drafter.read(hidden, 0)
    tree = drafter.grow(treespec.policies.Uniform(2, 2), 2).tree
    laws = {n: law.dense(torch.zeros(vocabulary)) for n, law in tree.laws.items()}
    for node, parent in enumerate(tree.parent.tolist()):
        if node:
            assert float(laws[parent][tree.token[node]].log()) == pytest.approx(float(tree.logp[node]), abs=1e-3)
    return tree, laws


def test_n_grams_draw_from_what_they_have_seen():
    tree, laws = drawn_children(NgramDrafter())
    assert set(tree.token.tolist()) <= {5, 6, 7} and len(tree) > 1
    assert all(
        float(q.sum()) == pytest.approx(1) and set(torch.nonzero(q).flatten().tolist()) <= {5, 6, 7}
        for q in laws.values()
    )
    tree, laws = drawn_children(NgramDrafter(), ids=(5, 6, 7))
    assert len(tree) == 1 and not laws, "nothing was seen, so nothing is drawn"


@pytest.mark.parametrize("size", [89, 97, 104])
def test_laws_of_smaller_and_larger_vocabularies(size):
    tree, laws = drawn_children(treespec.ModelDrafter(build("llama", vocab_size=size)))
    assert sorted(laws) == [0, 1, 2] and all(float(q.sum()) == pytest.approx(1) for q in laws.values())


@pytest.mark.parametrize("shape", [None, LogitsProcessorList([TopPLogitsWarper(0.8)])], ids=["raw", "top-p"])
@pytest.mark.parametrize("make", [HeadDrafter, MixDrafter])
def test_laws_of_heads(make, shape, llama):
    """A head's law lies on its own vocabulary; the mixture's also on what the text has seen."""
    text = [3, 4, 5, 6, 3, 4, 5]
    head = new_head(llama, "tiny", texts(llama), 40, seed=0).eval()
    with torch.no_grad():
        hidden = llama(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    tree, laws = drawn_children(make(head), text, shape=shape, hidden=hidden)
    assert 0 in laws and all(float(q.sum()) == pytest.approx(1) for q in laws.values())
    allowed = {*head.token_of.tolist(), *(text if make is MixDrafter else ())}
    real = {t for q in laws.values() for t in torch.nonzero(q > 1e-20).flatten().tolist()}
    assert real <= allowed and len(tree) > 2


def test_a_draft_that_breaks_draws_nothing(llama):
    broken = build("llama", seed=3)
    with torch.no_grad():
        broken.lm_head.weight[5] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run = sampled(llama, broken, "rrs")
    assert len(run.tokens) == 20 and run.stats.tokens_per_step == 1.0
