"""The feature head: its training steps are its drafting steps, it survives a trip to disk, it changes no text."""

import json
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import VOCAB, build

from treespec import generate, native
from treespec.distill.store import Text
from treespec.distill.train_head import HeadData, Unrolled, draft_vocabulary, moved, new_head
from treespec.drafters import HeadDrafter, MixDrafter
from treespec.drafters.base import DraftRequest
from treespec.drafters.mix import DISCOUNTS
from treespec.errors import InputError, VocabularyError
from treespec.head import is_head, load_head
from treespec.packed import Packed, can_pack
from treespec.policies import BestFirst, Linear

FIRST = {}  # what the first way gave
IDS = [5, 9, 11, 20, 33, 40, 2]


def texts(model, count=4, prompt=5, new=12, seed=0):
    """Answers of a tiny target, with its hidden states."""
    torch.manual_seed(seed)
    out = []
    for index in range(1, count + 1):
        ids = torch.randint(2, VOCAB, (1, prompt + index % 3))
        full = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0]
        with torch.no_grad():
            hidden = model(full[None, :-1], output_hidden_states=True).hidden_states[-1][0]
        out.append(Text(index, full.int(), ids.shape[1], 0.0, hidden.half()))
    return out


@pytest.fixture(scope="module")
def target():
    return build("llama")


@pytest.fixture(scope="module")
def head(target):
    made = new_head(target, "tiny", texts(target), VOCAB, seed=0)
    torch.manual_seed(3)
    with torch.no_grad():  # attention and MLP start at zero, which would hide mistakes in them
        for p in (made.out.weight, made.down.weight):
            p.normal_(std=0.2)
    return made.eval()


@pytest.fixture(params=["kernel", "packed", "torch"])
def way(request, monkeypatch):
    """How a head is computed: by the C kernel, without a compiler, and as on a GPU; made anew for each."""
    monkeypatch.setattr("treespec.drafters.head._MADE", WeakKeyDictionary())
    if request.param != "kernel":
        monkeypatch.setattr("treespec.drafters.head.native_head", lambda head: False)
    if request.param == "torch":
        monkeypatch.setattr("treespec.drafters.head.can_pack", lambda weight: False)
    return request.param


def test_every_way_gives_the_same_trees_and_text(target, head, way):
    drafter = HeadDrafter(head)
    kind = {"kernel": "_NativeHead", "packed": "FeatureHead", "torch": "FeatureHead"}[way]
    assert type(drafter.forward._layer).__name__ == kind or native.kernel() is None
    assert isinstance(drafter.forward._logits, Packed) == (way == "packed" and can_pack(head.output))
    drafter.begin(DraftRequest([*IDS, 3], 64, VOCAB))
    with torch.no_grad():
        drafter.read(target(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0], 0)
        tree = drafter.grow(BestFirst(budget=10), 4).tree
    guessed: dict = {}
    for token, parent, logp in zip(tree.token.tolist(), tree.parent.tolist(), tree.log_path.tolist()):
        guessed[(*(list(guessed)[parent] if parent >= 0 else ()), token)] = logp
    first = FIRST.setdefault("guessed", guessed)
    both = first.keys() & guessed.keys()
    assert len(both) > 0.8 * len(guessed), "but for what bfloat16 makes equal"
    assert all(abs(first[path] - guessed[path]) < 0.1 for path in both)
    want = target.generate(torch.tensor([IDS]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    for policy in ("bestfirst:budget=12", "linear:gamma=3"):
        got = generate(target, HeadDrafter(head), [IDS], policy=policy, max_new_tokens=30, pad_token_id=0)
        assert torch.equal(got.sequences, want) and got.stats.nodes > 1.5


def test_training_steps_are_drafting_steps(target, head, way):
    """Unrolled training on a text equals drafting the chain that this text is, from every root, true features before it."""
    text = texts(target)[1]
    batch = HeadData(head, [text]).batch([text])
    run, features = Unrolled(head, batch), batch.answer_features
    trained = []
    with torch.no_grad():
        for _ in range(3):
            out = run.step(features)
            trained.append(head.logits(out)[0])
            features = moved(out, 1)
    tokens = text.tokens.tolist()
    drafter = HeadDrafter(head)
    for a in range(len(tokens) - 1 - text.prompt - 2):
        root = text.prompt + a
        drafter.begin(DraftRequest(tokens[: root + 1], 64, VOCAB))
        with torch.no_grad():
            drafter.read(text.features[:root].float(), 0)
            chain = _chain(drafter, tokens[root + 1 : root + 3])
        for j, got in enumerate(chain):
            torch.testing.assert_close(got, trained[j][a + j], rtol=0, atol=1e-2)  # bfloat16 output matrix


def _chain(drafter, following):
    """The drafter's logits at the root and below it along given tokens."""
    seen = []

    class Along(Linear):
        pass

    propose = drafter._propose

    def spy(logits, growth, nodes, noise):
        seen.append(logits[0].clone())
        depth = growth.depth[nodes[0]]
        found = propose(logits, growth, nodes, noise)
        if depth < len(following):
            found.token[0, 0] = following[depth]
        return found

    drafter._propose = spy
    drafter.grow(Along(gamma=len(following) + 1), len(following) + 1)
    drafter._propose = propose
    return seen


@pytest.mark.parametrize("make", [HeadDrafter, MixDrafter])
@pytest.mark.parametrize(
    "policy", ["linear:gamma=3", "bestfirst:budget=12", "uniform:depth=3,width=2", "dynamic:high=9,tau=0.01"]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2-window-8", "phi3-longrope-16"])
def test_greedy_text_is_the_targets(make, policy, name):
    model = build(name)
    made = new_head(model, "tiny", texts(model), 40, seed=0)
    ids = torch.tensor([IDS])
    want = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    got = generate(model, make(made), ids, policy=policy, max_new_tokens=30, pad_token_id=0)
    assert torch.equal(got.sequences, want)
    assert got.stats.nodes > 1.5, "no tree was drafted: nothing was tested"


@pytest.mark.parametrize("make", [HeadDrafter, MixDrafter])
@pytest.mark.parametrize("processors", [{}, {"top_k": 5, "temperature": 0.7}, {"repetition_penalty": 1.5, "top_k": 0}])
def test_coupled_sampling_does_not_depend_on_the_head(target, head, make, processors):
    options = dict(do_sample=True, rule="coupled", seed=5, max_new_tokens=24, pad_token_id=0, **processors)
    plain = generate(target, None, [IDS], policy="plain", **options)
    tree = generate(target, make(head), [IDS], policy="bestfirst:budget=12", **options)
    assert torch.equal(plain.sequences, tree.sequences)
    assert tree.stats.nodes > 1.5


def test_an_earlier_turns_cache(target, head):
    """Tokens whose keys came from an earlier turn have no known hidden state; the rest of the text does."""
    first = generate(target, None, [IDS], policy="plain", max_new_tokens=6, pad_token_id=0)
    more = [*first.sequences[0].tolist(), 7, 8, 9]
    want = target.generate(torch.tensor([more]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    got = generate(
        target,
        HeadDrafter(head),
        [more],
        policy="bestfirst:budget=8",
        max_new_tokens=20,
        pad_token_id=0,
        cache=first.cache,
    )
    assert torch.equal(got.sequences, want) and got.stats.nodes > 1.5


def test_growing_twice_gives_the_same_tree(target, head):
    drafter = MixDrafter(head)
    drafter.begin(DraftRequest([*IDS, 3], 64, VOCAB))
    with torch.no_grad():
        hidden = target(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0]
        drafter.read(hidden, 0)
        one, two = (drafter.grow(BestFirst(budget=10), 4).tree for _ in range(2))
    assert one.token.tolist() == two.token.tolist()
    torch.testing.assert_close(one.log_path, two.log_path)


def test_mix_backs_off_to_the_head(target, head):
    drafter = MixDrafter(head)
    text = [3, 4, 5, 6, 3, 4, 5]
    drafter.begin(DraftRequest(text, 64, VOCAB))
    seen, rest = drafter._seen(_Root(), 0)
    assert seen.keys() == {6} and 0 < rest < 1
    assert abs(sum(seen.values()) + rest - 1) < 1e-6
    longer, shorter = DISCOUNTS[1], DISCOUNTS[0]
    assert seen[6] == pytest.approx((1 - longer) + longer * (1 - shorter))
    drafter.begin(DraftRequest([3, 4, 5, 6], 64, VOCAB))
    assert drafter._seen(_Root(), 0) == ({}, 1.0)


def test_mixture_is_one_distribution(target, head):
    """Children, their probabilities and the entropy are those of (head x what is left) + what was seen."""
    drafter = MixDrafter(head)
    drafter.begin(DraftRequest([3, 4, 5, 6, 3, 4, 5], 64, VOCAB))
    drafter._width = 5
    logits = torch.randn(1, len(head.token_of))
    found = drafter._propose(logits, _Root(), [0], None)
    seen, rest = drafter._seen(_Root(), 0)
    want = torch.zeros(VOCAB)
    want[head.token_of] = logits[0].softmax(-1) * rest
    for token, p in seen.items():
        want[token] += p
    best = want.topk(5)
    assert found.token[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(found.logp[0].exp(), best.values)
    bits = -(want[want > 0] * want[want > 0].log2()).sum()
    torch.testing.assert_close(found.entropy[0], bits, rtol=1e-4, atol=1e-4)


class _Root:
    def path_tokens(self, node):
        return []


def test_saved_and_loaded(target, head, tmp_path):
    head.save(tmp_path)
    assert is_head(tmp_path) and not is_head(tmp_path / "nowhere")
    again = load_head(tmp_path, target)
    for name, value in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(again.spread, head.spread)
    assert torch.equal(again.token_of, head.token_of)


def test_a_head_for_another_target_is_refused(head, tmp_path):
    head.save(tmp_path)
    with pytest.raises(VocabularyError, match="this head was made for tiny"):
        load_head(tmp_path, build("llama", hidden_size=64))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "treespec_head"}))
    with pytest.raises(InputError, match="no readable feature head"):
        load_head(tmp_path, build("llama"))


def test_draft_vocabulary_takes_what_is_said_most():
    text = Text(1, torch.tensor([9, 9, 9, 5, 5, 7]), 2, 0.0, None)
    assert draft_vocabulary([text], 2, 20).tolist() == [5, 9]
    assert 5 in draft_vocabulary([text], 1, 20).tolist()
    assert draft_vocabulary([text], 6, 20).tolist() == [0, 1, 2, 5, 7, 9]


def test_discounts_are_checked(head):
    with pytest.raises(InputError, match="discounts"):
        MixDrafter(head, [])
    with pytest.raises(InputError, match="discounts"):
        MixDrafter(head, [1.5])
