"""Drafters: cache bookkeeping of the model drafter, probabilities of the n-gram drafter."""

import math

import pytest
import torch
from conftest import VOCAB, build, prompt, reference
from hypothesis import given
from hypothesis import strategies as st

import treespec
from treespec.drafters import DraftRequest, ModelDrafter, NgramDrafter
from treespec.errors import InputError
from treespec.policies import Threshold, Uniform


def request(ids, **more):
    return DraftRequest(list(ids), 128, VOCAB, **more)


def uncached(model, text, path):
    with torch.no_grad():
        return model(torch.tensor([text + path])).logits[0, -1].log_softmax(-1)


def check_tree(drafter, model, text, policy=None):
    """Every proposed probability must be the model's own, from a forward without a cache."""
    tree = drafter.grow(policy or Uniform(3, 2), 9).tree
    for i in range(1, len(tree)):
        path = tree.token[tree.path(i)[1:]].tolist()
        want = uncached(model, text, path[:-1])[path[-1]]
        assert float(tree.logp[i]) == pytest.approx(float(want), abs=1e-4)
    return tree


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window-8", "mistral-window-8"])
def test_model_drafter_stays_in_step_with_the_text(name):
    """Accept nothing, a middle path, a second child, everything; grow twice; commit without growing."""
    model = build(name)
    drafter, text = ModelDrafter(model), prompt(9)[0].tolist()
    drafter.begin(request(text))
    tree = check_tree(drafter, model, text)
    full = [i for i in range(len(tree)) if int(tree.depth[i]) == 3]
    second = next(i for i in range(len(tree)) if int(tree.depth[i]) == 2 and int(tree.rank[i]) == 1)
    for leaf in (None, second, full[0], full[-1], "without growing", None):
        path = [] if leaf in (None, "without growing") else tree.path(leaf)[1:]
        if leaf != "without growing":
            drafter.grow(Uniform(3, 2), 9)  # growing again replaces the tree that was there
        tokens = [*tree.token[path].tolist(), 7]
        drafter.commit(path, tokens)
        text = text + tokens
        tree = check_tree(drafter, model, text)


def test_a_new_text_forgets_the_old_one(llama):
    drafter = ModelDrafter(llama)
    for seed in (1, 2):
        text = prompt(8, seed)[0].tolist()
        drafter.begin(request(text))
        check_tree(drafter, llama, text)


def test_a_draft_like_the_target_accepts_everything_for_200_tokens(llama, twin):
    """A fully accepted path leaves the draft's cache one token short unless the leaf is fed again."""
    out = treespec.generate(llama, twin, prompt(10), policy=Uniform(4, 1), do_sample=False, max_new_tokens=200)
    whole = out.steps[1:-1]
    assert [len(e.tokens) for e in whole] == [5] * len(whole) and len(out.tokens) == 200
    assert torch.equal(out.sequences, reference(llama, prompt(10), 200))


def test_draft_forwards_are_counted_and_timed(llama, twin):
    out = treespec.generate(llama, twin, prompt(5), policy=Uniform(3, 2), do_sample=False, max_new_tokens=20)
    for event in out.steps[1:]:
        assert len(event.draft_forwards) == int(event.tree.depth.max())
        assert all(t > 0 for t in event.draft_forwards) and sum(event.draft_forwards) == pytest.approx(
            event.times.draft
        )


def test_a_broken_draft_warns_once_and_changes_nothing(llama):
    broken = build("llama", seed=3)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    drafter = ModelDrafter.__new__(ModelDrafter)  # the self-check would refuse such a model; a real one breaks later
    drafter.owner = treespec.model.TreeModel(broken, "draft")
    with pytest.warns(RuntimeWarning, match="non-finite") as seen:
        out = treespec.generate(llama, drafter, prompt(6), policy="threshold", do_sample=False, max_new_tokens=12)
    assert len(seen) == 1 and torch.equal(out.sequences, reference(llama, prompt(6), 12))


def test_the_drafts_own_context_ends_quietly(llama):
    short = build("gpt2", n_positions=16)
    out = treespec.generate(llama, short, prompt(10), policy=Uniform(4, 2), do_sample=False, max_new_tokens=20)
    assert torch.equal(out.sequences, reference(llama, prompt(10), 20))
    assert any(len(e.tree) > 1 for e in out.steps) and len(out.steps[-1].tree) == 1


# --- n-grams -----------------------------------------------------------------------------------------------------


def dense(drafter, context):
    seen, rest = drafter.distribution(context)
    p = torch.full((VOCAB,), rest / max(VOCAB - len(seen), 1), dtype=torch.float64)
    for token, value in seen.items():
        p[token] = value
    return p


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(2, 6), st.lists(st.integers(0, 8), max_size=6))
def test_ngram_probabilities_sum_to_one_and_entropy_is_theirs(text, order, context):
    drafter = NgramDrafter(order, corpus=[[1, 2, 3, 1, 2, 4]])
    drafter.begin(request(text))
    p = dense(drafter, context)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-9) and bool((p >= 0).all())
    tree = drafter.grow(Threshold(1e-9, 3, 1, 10), 1).tree
    mine = dense(drafter, text[-(order - 1) :])
    positive = mine[mine > 0]
    assert float(tree.entropy[0]) == pytest.approx(float(-(positive * positive.log2()).sum()), abs=1e-4)
    for i in range(1, len(tree)):
        assert float(tree.logp[i]) == pytest.approx(math.log(float(mine[tree.token[i]])), abs=1e-4)


def test_longer_contexts_count_more_and_repeats_raise_confidence():
    drafter = NgramDrafter(4)
    drafter.begin(request([1, 2, 3, 9, 2, 3, 5, 1, 2, 3]))
    p = dense(drafter, [1, 2, 3])
    assert float(p[9]) > float(p[5])  # 1 2 3 was followed by 9, plain 2 3 also by 5
    drafter.commit([], [9, 1, 2, 3, 9, 1, 2, 3])
    assert float(dense(drafter, [1, 2, 3])[9]) > float(p[9])


def test_ngram_trees_branch_and_follow_their_paths():
    drafter = NgramDrafter(3)
    drafter.begin(request([1, 2, 3, 1, 2, 4, 1, 2]))
    tree = drafter.grow(Uniform(2, 2), 9).tree
    assert sorted(tree.token[tree.parent == 0].tolist()) == [3, 4]
    assert set(tree.token[tree.depth == 2].tolist()) == {1}


def test_a_corpus_helps_and_the_text_overrules_it():
    drafter = NgramDrafter(3, corpus=[[1, 2, 7]] * 3)
    drafter.begin(request([5, 1, 2]))
    assert drafter.grow(Uniform(1, 1), 1).tree.token[1] == 7
    drafter.begin(request([1, 2, 8, 1, 2]))
    assert drafter.grow(Uniform(1, 1), 1).tree.token[1] == 8


def test_nothing_seen_nothing_guessed():
    drafter = NgramDrafter()
    drafter.begin(request([1, 2, 3]))
    tree = drafter.grow(Uniform(3, 2), 9).tree
    assert len(tree) == 1 and float(tree.entropy[0]) == pytest.approx(math.log2(VOCAB), abs=1e-4)


@pytest.mark.parametrize(
    "arguments", [dict(order=1), dict(order=99), dict(discount=0), dict(discount=1), dict(weight=0)]
)
def test_bad_ngram_parameters(arguments):
    with pytest.raises(InputError, match="n-gram"):
        NgramDrafter(**arguments)
