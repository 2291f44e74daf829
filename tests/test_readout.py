"""What a step reads off a device, with the CPU as stand-in: one read, whatever the rule and the processors."""

import collections
import types

import pytest
import torch
from conftest import build, prompt
from test_rules import POLICY, toy_pair, transitions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList

import treespec
from treespec import readout
from treespec.errors import NonFiniteLogitsError
from treespec.exactness import drawn_tree, outcomes, plain_law, total_variation
from treespec.policies import parse_policy
from treespec.readout import Readout, to_host
from treespec.sampling import Law
from treespec.verify import Match

pytestmark = pytest.mark.thorough

SAMPLED = dict(do_sample=True, top_k=0, seed=3)
SHAPED = dict(temperature=0.8, top_p=0.95, repetition_penalty=1.2)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(readout, "reads_at_once", lambda device: True)


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: reads of tensors that come from the marked ones.

    On the CPU ``tolist`` and ``cpu`` never reach the dispatcher, so they are counted where they are called.
    """

    OPS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self, monkeypatch):
        super().__init__()
        self.count, self._off = 0, monkeypatch
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, honest):
        def method(tensor, *args, **kwargs):
            if not hasattr(tensor, "far"):
                return honest(tensor, *args, **kwargs)
            self.count += 1
            out = honest(tensor, *args, **kwargs)
            if isinstance(out, torch.Tensor):  # a copy on the host, which is read for nothing
                out = out.clone()
                del out.far
            return out

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        far = any(hasattr(t, "far") for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        out = func(*args, **kwargs)
        if far:
            mask = any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:]))
            self.count += func.overloadpacket.__name__ in self.OPS or (func.overloadpacket.__name__ == "index" and mask)
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    t.far = True
        return out


def reads(monkeypatch, target, draft, **options):
    """Reads off the "device" in the emitting half of every step but the first, and the generation."""
    counts = []
    honest = treespec.decode.Decoding._emit

    def emit(self, index, tree, origin, kept, logits, *rest):
        logits.far = self._ids.far = True
        for law in kept.laws.values():
            law.probability.far = True
        with pytest.MonkeyPatch.context() as patch, Waits(patch) as waits:
            event = honest(self, index, tree, origin, kept, logits, *rest)
        counts.append(waits.count)
        return event

    monkeypatch.setattr(treespec.decode.Decoding, "_emit", emit)
    return counts, treespec.generate(target, draft, prompt(7), max_new_tokens=24, **options)


RUNS = [
    *((rule, policy, {**SAMPLED, **more}) for more in ({}, SHAPED) for rule, policy in POLICY.items()),
    *((rule, policy, {**SAMPLED, **more}) for more in ({}, SHAPED) for rule in ("match", "coupled")
      for policy in ("linear:gamma=4", "bestfirst:budget=8")),
    *(("match", policy, {"do_sample": False, **more}) for more in ({}, dict(repetition_penalty=1.3))
      for policy in ("plain", "linear:gamma=4", "bestfirst:budget=8")),
]  # fmt: skip


@pytest.mark.parametrize("rule, policy, options", RUNS, ids=str)
def test_a_step_reads_once(llama, twin, monkeypatch, at_once, rule, policy, options):
    counts, run = reads(monkeypatch, llama, twin, rule=rule, policy=policy, **options)
    assert set(counts) == {1}, counts
    assert policy == "plain" or max(len(e.tokens) for e in run.steps) > 1, "no tree was followed"


def test_the_count_sees_reads_token_by_token(llama, twin, monkeypatch):
    counts, run = reads(monkeypatch, llama, twin, rule="rrs", policy="linear:gamma=4", **SAMPLED)
    assert max(counts) > 4


def test_kept_scores_cost_no_read(llama, twin, monkeypatch, at_once):
    kept = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    options = dict(policy="linear:gamma=4", do_sample=False, **kept)
    counts, run = reads(monkeypatch, llama, twin, **options)
    assert set(counts) == {1}
    monkeypatch.undo()
    want = treespec.generate(llama, twin, prompt(7), max_new_tokens=24, **options)
    assert run.tokens == want.tokens
    torch.testing.assert_close(torch.cat(run.scores), torch.cat(want.scores))
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(want.logits))


@pytest.mark.parametrize("options", [
    dict(do_sample=False), dict(do_sample=False, repetition_penalty=1.3), dict(do_sample=False, rule="coupled"),
    dict(SAMPLED, rule="coupled"), dict(SAMPLED, **SHAPED, rule="coupled"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("policy", ["plain", "linear:gamma=4", "uniform:depth=3,width=3", "bestfirst:budget=8"])
def test_texts_that_do_not_depend_on_draws_stay(llama, stranger, monkeypatch, options, policy):
    run = lambda: treespec.generate(llama, stranger, prompt(7), policy=policy, max_new_tokens=24, **options)  # noqa: E731
    want = run()
    monkeypatch.setattr(readout, "reads_at_once", lambda device: True)
    got = run()
    assert torch.equal(got.sequences, want.sequences)
    assert [e.path for e in got.steps] == [e.path for e in want.steps]


@pytest.mark.parametrize("rule", POLICY)
def test_drawn_laws_stay(rule, at_once):
    assert transitions(rule) > 1e-3


def test_drawn_laws_stay_under_match(at_once):
    assert transitions("match", policy="uniform:depth=2,width=2") > 1e-3


@pytest.mark.parametrize("rule", ["rrs", "hybrid", "match"])
@pytest.mark.parametrize("policy", ["linear:gamma=2", "uniform:depth=1,width=2"])
def test_the_law_by_enumeration(rule, policy, at_once):
    """Every random outcome of a step that is read at once, those of nodes off the path too: so three nodes at most."""
    generator = torch.Generator().manual_seed(4)
    tables = torch.rand(2, 4, 3, dtype=torch.float64, generator=generator) ** 2
    target, draft = (lambda path, t=t: (t := t[path[-1] + 1 if path else 0]) / t.sum() for t in tables)
    make = treespec.verify.SAMPLED.get(rule)
    rules = lambda chance: Match(chance) if make is None else make(chance, chance)  # noqa: E731
    grown = drawn_tree(rules, parse_policy(policy), draft, 2)
    law = collections.defaultdict(float)
    longest = 0
    for tree_weight, tree in outcomes(grown):
        kept = tree.kept()[0]
        rows = [tuple(kept.token[i].item() for i in kept.path(node)[1:]) for node in range(len(kept))]
        logits = torch.stack([target(path).log() for path in rows]).float()
        for weight, tokens in outcomes(lambda chance: emitted(rules(chance), kept, logits)):  # noqa: B023
            longest = max(longest, len(tokens))
            for text, p in plain_law(target, 3, tokens[:3]).items():
                law[text] += tree_weight * weight * p
    assert sum(law.values()) == pytest.approx(1.0)
    assert total_variation(law, plain_law(target, 3)) < 1e-6  # float32 scores
    assert longest == (3 if "linear" in policy else 2), "no path was followed to its end"


def emitted(rule, tree, logits):
    """The tokens of one walk, read at once."""
    config = types.SimpleNamespace(return_dict_in_generate=False, output_scores=False, output_logits=False)
    request = types.SimpleNamespace(processors=LogitsProcessorList(), config=config)
    text = types.SimpleNamespace(length=1, emitted=0, sequences=torch.zeros(1, 1, dtype=torch.long))
    return tuple(token for token, _ in Readout(request, rule).walk(text, tree, logits))


def test_processors_that_may_keep_state_see_tokens_one_by_one(llama, twin, at_once):
    seen = []

    class Keeps(treespec.request.LogitsProcessorList):
        def __call__(self, ids, scores):
            seen.append(ids.shape)
            return scores

    treespec.generate(llama, twin, prompt(7), policy="linear:gamma=4", do_sample=False, max_new_tokens=12,
                      logits_processor=LogitsProcessorList([Keeps()]))  # fmt: skip
    assert seen == [(1, 7 + i) for i in range(12)]


@pytest.mark.parametrize("rule", [*POLICY, "match"])
def test_nan_is_named_where_it_is_read_at_once(twin, at_once, rule):
    model = build("llama")
    options = dict(SAMPLED, policy=POLICY.get(rule, "linear"), rule=rule, max_new_tokens=9)
    treespec.generate(model, None, prompt(4), max_new_tokens=2)  # the self-check, before it breaks
    model.lm_head.register_forward_hook(lambda m, i, o: o * torch.nan if o.shape[1] > 1 else o)
    with pytest.raises(NonFiniteLogitsError, match="hold NaN after 1 new tokens"):
        treespec.generate(model, twin, prompt(4), **options)


def test_tensors_come_to_the_host_as_they_are(at_once):
    tensors = [torch.rand(2, 3), torch.rand(4).double(), torch.rand(()), torch.rand(0), torch.rand(5)]
    for got, want in zip(to_host(tensors), tensors):
        assert torch.equal(got, want) and got.dtype == want.dtype and got.shape == want.shape


def test_a_law_is_not_overwritten_by_a_test():
    """The tree keeps what its children were drawn from; a rule works on copies."""
    target, draft = toy_pair()
    law = Law(torch.tensor([0.5, 0.25, 0.25, 0.0]))
    rule = treespec.verify.make_rule("rrs", sample=True, seed=0, vocabulary=4)
    for _ in range(20):
        rule.choose(torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), law.dense(torch.zeros(4)), [0, 1])
    assert law.probability.tolist() == [0.5, 0.25, 0.25, 0.0]
