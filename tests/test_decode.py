"""The loop: the text is model.generate's own, for every family, policy, drafter, limit and stop."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from conftest import SUPPORTED, VOCAB, build, prompt, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import treespec
from treespec.errors import InputError, NonFiniteLogitsError, OutOfMemoryError, VocabularyError

POLICIES = ["plain", "linear:gamma=4", "uniform:depth=3,width=2", "threshold:tau=0.01", "dynamic:tau=0.01,low=3,high=7",
            "dynamic:tau=0.02,low=2,high=6.5,scope=level,budget=5", "dynamic:tau=auto,low=3,high=7"]  # fmt: skip
GREEDY = dict(do_sample=False, pad_token_id=0)


def spec(target, draft, ids, policy="uniform:depth=6,width=2", **kwargs):
    return treespec.generate(target, draft, ids, policy=policy, **{**GREEDY, **kwargs})


class Scripted:
    """A drafter that guesses given continuations: where the truth stands among its siblings is up to the test."""

    depth_room = 99

    def __init__(self, truth, place=1, width=2, depth=4):
        self.truth, self.place, self.width, self.depth = truth, place, width, depth

    def begin(self, request):
        self.text = list(request.ids)

    def commit(self, path, tokens):
        self.text = self.text + tokens

    def grow(self, policy, max_depth):
        token, parent, spine, at = [self.text[-1]], [-1], 0, len(self.text)
        for level in range(min(self.depth, max_depth, len(self.truth) - at)):
            right = self.truth[at + level]
            row = [(right + 1 + k) % VOCAB for k in range(self.width)]
            row[self.place] = right
            parent += [spine] * self.width
            spine = len(token) + self.place
            token += row
        from treespec.drafters import Drafted

        return Drafted(treespec.TokenTree.from_lists(token, parent), [0.0])


@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_text_is_model_generates_own(name):
    model = build(name)
    drafts = itertools.cycle([build(name), build("llama", seed=5), "ngram"])
    lengths = (3, 7, 20)
    want = {n: reference(build(name), prompt(n)) for n in lengths}
    for policy, length in zip(POLICIES, itertools.cycle(lengths)):
        got = spec(model, next(drafts), prompt(length), policy, max_new_tokens=24)
        assert torch.equal(got.sequences, want[length]), (length, policy)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3-window-8", "gpt2", "cohere2-window-8"])
def test_any_sibling_may_win_at_every_level(name, place):
    """The accepted path is then no prefix of the tree's rows: wrong gathers show at once."""
    model = build(name)
    want = reference(model, prompt(9), 40)
    got = spec(model, Scripted(want[0].tolist(), place, width=3), prompt(9), max_new_tokens=40)
    assert torch.equal(got.sequences, want)
    assert got.stats.tokens_per_step > 4


def test_an_early_exit_is_no_cheat(llama, twin):
    """A target that disagrees with its draft at one place gets its own token there."""
    want = reference(llama, prompt(9), 20)
    lie = want[0].tolist()
    lie[14] = (lie[14] + 1) % VOCAB
    got = spec(llama, Scripted(lie), prompt(9), max_new_tokens=20)
    assert torch.equal(got.sequences, want)


@pytest.mark.thorough
@settings(max_examples=40)
@given(
    st.sampled_from(["llama", "qwen3", "gpt2"]),
    st.integers(1, 12),
    st.integers(1, 16),
    st.sampled_from([*POLICIES[1:], "bestfirst:budget=9", "eagle2:total=9", "opttree:budget=9", "specinfer"]),
    st.integers(0, 3),
    st.sets(st.integers(3, 96), max_size=12),
    st.booleans(),
)
def test_any_prompt_policy_limit_and_end_set(name, length, new, policy, seed, ends, alike):
    """Text, cache and accounts of a random target, a draft that is or is not like it, a tree, a limit, an end set."""
    target, draft = build(name, seed=seed), build(name, seed=seed + (not alike))
    ids, eos = prompt(length, seed), sorted(ends) or None
    forwards: list = []
    spec(target, None, ids, "plain", max_new_tokens=1)  # a model is checked at its first use
    counted = target.register_forward_hook(lambda *_: forwards.append(1))
    got = spec(target, draft, ids, policy, max_new_tokens=new, eos_token_id=eos)
    counted.remove()
    assert torch.equal(got.sequences, reference(target, ids, new, eos_token_id=eos))
    accounts_add_up(got, len(forwards))
    held = got.cache.length
    assert held >= length + len(got.tokens) - 1 - len(got.steps[-1].tokens)
    with torch.no_grad():
        alone = target(got.sequences[:, :held], use_cache=True).past_key_values
    for ours, plain in zip(got.cache.layers, alone.layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, plain.values, rtol=1e-4, atol=1e-4)


def accounts_add_up(got, forwards):
    """Tokens, nodes and seconds of the steps, one by one and in sum."""
    stats, steps = got.stats, [event for event in got.steps if not event.is_prefill]
    for event in got.steps:
        assert len(event.path) + (event.bonus is not None) == len(event.tokens)
        assert [int(event.tree.token[i]) for i in event.path] == event.tokens[: len(event.path)]
        assert event.nodes == event.tree.candidates + 1
        assert event.times.total >= event.times.draft + event.times.verify and event.times.overhead >= 0
    assert [token for event in got.steps for token in event.tokens] == got.tokens
    assert stats.tokens == len(got.tokens) and stats.steps == len(steps) == forwards - 1
    assert stats.step_nodes == sum(event.nodes for event in steps)
    assert stats.step_tokens == sum(len(event.tokens) for event in steps)
    for phase in ("draft", "prune", "verify"):
        assert getattr(stats, f"{phase}_seconds") == pytest.approx(sum(getattr(e.times, phase) for e in steps))
    assert stats.step_seconds == pytest.approx(sum(event.times.total for event in steps))


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8])
def test_no_overshoot(llama, twin, new):
    assert torch.equal(spec(llama, twin, prompt(5), max_new_tokens=new).sequences, reference(llama, prompt(5), new))
    long = llama.generate(prompt(5), do_sample=False, pad_token_id=0, max_length=5 + new)
    assert torch.equal(spec(llama, twin, prompt(5), max_length=5 + new).sequences, long)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj"])
def test_learned_positions_are_used_to_the_last_one(name):
    key = {"gpt2": "n_positions", "gptj": "n_positions", "opt": "max_position_embeddings"}[name]
    target, draft = build(name, **{key: 32}), build(name, **{key: 32})
    for length, new in ((26, 6), (31, 2), (32, 1), (1, 32)):
        got = spec(target, draft, prompt(length), max_new_tokens=new)
        assert torch.equal(got.sequences, reference(target, prompt(length), new)), (length, new)
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    for length, new, words in ((33, 1, "context is 32"), (32, 4, "room for 1 new"), (27, 20, "room for 6 new")):
        with pytest.raises(InputError, match=words):
            spec(target, draft, prompt(length), max_new_tokens=new)
    assert not calls


def test_prompts_longer_than_a_rotary_context_are_refused():
    target = build("llama", max_position_embeddings=16)
    with pytest.raises(InputError, match="context is 16"):
        spec(target, None, prompt(17), policy="plain", max_new_tokens=2)


@pytest.mark.parametrize("ids", [[[5]], [5], torch.tensor([5, 9], dtype=torch.int32), [5, 9, 11]])
def test_tiny_prompts_of_any_type(llama, twin, ids):
    for new in (1, 2, 6):
        tensor = torch.as_tensor(ids).reshape(1, -1).long()
        assert torch.equal(spec(llama, twin, ids, max_new_tokens=new).sequences, reference(llama, tensor, new))


# --- stops -------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.thorough
def test_an_end_token_anywhere_ends_there(llama, twin):
    g = reference(llama, prompt(5), 20)[0, 5:].tolist()
    for k in range(20):
        for eos in (g[k], [96, g[k]], [g[k], 96]):
            streamer = Recorder()
            got = spec(llama, twin, prompt(5), max_new_tokens=20, eos_token_id=eos, streamer=streamer)
            want = reference(llama, prompt(5), 20, eos_token_id=eos)
            assert torch.equal(got.sequences, want), (k, eos)
            assert streamer.got == want[0].tolist() and streamer.ended == 1
            assert got.cache.length == want.shape[1] - 1, "nothing behind the stop is context for the next turn"
    assert len(spec(llama, twin, prompt(5), max_new_tokens=20, eos_token_id=None).tokens) == 20


def test_end_token_as_root_sibling_or_never(llama):
    ids = prompt(6)
    g = reference(llama, ids, 12)[0].tolist()
    root = int(ids[0, -1])
    for eos in (root, (g[8] + 1) % VOCAB, 96):  # in the prompt; a sibling off the path; anything
        got = spec(llama, Scripted(g, place=1), ids, max_new_tokens=12, eos_token_id=eos)
        assert torch.equal(got.sequences, reference(llama, ids, 12, eos_token_id=eos))


def test_min_new_tokens_holds_off_the_end(llama, twin):
    g = reference(llama, prompt(5), 20)[0, 5:].tolist()
    options = dict(max_new_tokens=20, eos_token_id=[g[1], g[4]], min_new_tokens=7)
    got = spec(llama, twin, prompt(5), **options)
    assert torch.equal(got.sequences, llama.generate(prompt(5), do_sample=False, pad_token_id=0, **options))


class AfterToken(StoppingCriteria):
    """Stops after a token, and remembers how often it was asked with which text."""

    def __init__(self, token):
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return torch.tensor([int(input_ids[0, -1]) == self.token])


def test_custom_criteria_see_every_token_once(llama, twin):
    g = reference(llama, prompt(5), 20)[0, 5:].tolist()
    mine, theirs = AfterToken(g[9]), AfterToken(g[9])
    got = spec(llama, twin, prompt(5), max_new_tokens=20, stopping_criteria=StoppingCriteriaList([mine]))
    want = reference(llama, prompt(5), 20, stopping_criteria=StoppingCriteriaList([theirs]))
    assert torch.equal(got.sequences, want) and mine.asked == theirs.asked


# --- processors --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("options", [
    dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[11], [20, 33]]),
    dict(suppress_tokens=[4, 5, 6]), dict(sequence_bias={(7,): 5.0}), dict(repetition_penalty=1.2, no_repeat_ngram_size=3),
    dict(exponential_decay_length_penalty=(4, 1.5), eos_token_id=8), dict(forced_eos_token_id=8, eos_token_id=8),
], ids=str)  # fmt: skip
def test_processors_see_each_nodes_own_prefix(llama, twin, stranger, options):
    want = llama.generate(prompt(5), do_sample=False, pad_token_id=0, max_new_tokens=20, **options)
    for draft, policy in itertools.product((twin, stranger, "ngram"), POLICIES[1:6]):
        got = spec(llama, draft, prompt(5), policy, max_new_tokens=20, **options)
        assert torch.equal(got.sequences, want), policy


class Counting(LogitsProcessor):
    """Forbids the token chosen k calls ago, by its own count: wrong if any branch or rejection advances it."""

    def __init__(self):
        self.texts = []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (len(self.texts) * 7) % VOCAB] += 4.0
        return scores


def test_stateful_processors_are_called_once_per_token_in_order(llama, twin):
    mine, theirs = Counting(), Counting()
    got = spec(llama, twin, prompt(5), max_new_tokens=20, logits_processor=LogitsProcessorList([mine]))
    want = reference(llama, prompt(5), 20, logits_processor=LogitsProcessorList([theirs]))
    assert torch.equal(got.sequences, want) and mine.texts == theirs.texts


def test_draft_knows_the_penalty(llama, twin):
    """Ranked without it the twin would propose what the target may not say."""
    got = spec(llama, twin, prompt(5), "linear:gamma=4", max_new_tokens=40, repetition_penalty=1.5)
    assert got.stats.tokens_per_step > 4


# --- what cannot be decoded ----------------------------------------------------------------------------------------


def test_batches_beams_embeddings_and_empty_prompts_are_refused(llama, twin):
    calls = []
    hook = llama.register_forward_hook(lambda *_: calls.append(1))
    embeds = torch.zeros(1, 3, 32)
    for ids, more, words in (
        (torch.ones(2, 5).long(), {}, "batch of 2"),
        (prompt(4), dict(num_return_sequences=2, do_sample=True), "batch of 2"),
        (prompt(4), dict(num_beams=2), "num_beams"),
        (torch.zeros(1, 0).long(), {}, "empty"),
        (torch.zeros(1, 3), {}, "whole numbers"),
        ([[5, 99]], {}, "0 to 96"),
        ("text", {}, "tokenizer"),
        (None, {}, "prompt must be"),
        ([["a"]], {}, "prompt must be"),
        (prompt(4), dict(stop_strings=["x"]), "tokenizer"),
        (prompt(4), dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
        (prompt(4), dict(prompt_lookup_num_tokens=3), "prompt_lookup"),
        (prompt(4), dict(attention_mask=torch.zeros(1, 4).long()), "hides|masked"),
        (prompt(4), dict(position_ids=torch.tensor([[3, 4, 5, 6]])), "position_ids"),
        (prompt(4), dict(cache_implementation="static"), "StaticCache"),
    ):
        with pytest.raises(InputError, match=words) as error:
            spec(llama, twin, ids, max_new_tokens=4, **more)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="token ids"):
        llama.generate(inputs_embeds=embeds, max_new_tokens=2, custom_generate=treespec.custom_generate("ngram"))
    hook.remove()
    assert not calls


def test_a_drafter_with_another_root_is_caught(llama):
    """Verifying under a wrong root would change the text without a sign."""
    lying = Scripted(reference(llama, prompt(6), 9)[0].tolist())
    lying.commit = lambda path, tokens: None
    with pytest.raises(InputError, match="root"):
        spec(llama, lying, prompt(6), max_new_tokens=9)


def test_drafts_that_do_not_fit(llama):
    with pytest.raises(VocabularyError, match=r"33.*97"):
        spec(llama, build("llama", vocab_size=33), prompt(4), max_new_tokens=4)
    with pytest.raises(InputError, match="needs a draft"):
        spec(llama, None, prompt(4), "linear", max_new_tokens=4)
    with pytest.raises(InputError, match="draft must be"):
        spec(llama, 3, prompt(4), "linear", max_new_tokens=4)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(105, 97), (97, 105)])
def test_padded_and_smaller_draft_vocabularies(sizes):
    target, draft = build("llama", vocab_size=sizes[0]), build("llama", vocab_size=sizes[1])
    with torch.no_grad():
        draft.lm_head.weight[97:] += 30.0  # a draft that loves ids the target may not have
    for policy in POLICIES[1:]:
        for more in ({}, dict(repetition_penalty=1.3)):
            got = spec(target, draft, prompt(6), policy, max_new_tokens=24, **more)
            assert torch.equal(got.sequences, reference(target, prompt(6), 24, **more))


def test_nan_logits_are_named_not_swallowed(llama, twin, monkeypatch):
    target = build("llama")
    spec(target, twin, prompt(5), max_new_tokens=2)
    head = target.lm_head.forward
    calls = itertools.count()
    monkeypatch.setattr(target.lm_head, "forward", lambda x: head(x) * (torch.nan if next(calls) > 2 else 1.0))
    with pytest.raises(NonFiniteLogitsError, match=r"position \d+ hold NaN after \d+ new tokens"):
        spec(target, twin, prompt(5), max_new_tokens=30)


def test_out_of_memory_says_what_to_lower(llama, monkeypatch):
    target = build("llama")
    spec(target, None, prompt(5), "plain", max_new_tokens=2)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target.model, "forward", full)
    with pytest.raises(OutOfMemoryError, match="lower the policy's budget"):
        spec(target, None, prompt(5), "plain", max_new_tokens=2)


# --- padding, turns, threads, failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window-8"])
def test_left_padding_and_holes(name):
    model, draft, ids = build(name), build(name), prompt(5)
    padded = torch.cat([torch.zeros(1, 4).long(), ids], 1)
    mask = torch.tensor([[0] * 4 + [1] * 5])
    got = spec(model, draft, padded, attention_mask=mask, max_new_tokens=12)
    assert got.tokens == reference(model, ids, 12)[0, 5:].tolist()
    assert torch.equal(got.sequences[:, :9], padded)
    hole = torch.tensor([[1, 1, 0, 1, 1]])
    got = spec(model, draft, ids, attention_mask=hole, max_new_tokens=12)
    assert got.tokens == reference(model, ids, 12, attention_mask=hole)[0, 5:].tolist()


def test_a_returned_cache_serves_the_next_turn(llama, twin):
    first = spec(llama, twin, prompt(6), max_new_tokens=9)
    longer = torch.cat([first.sequences, prompt(4, seed=3)], 1)
    want = reference(llama, longer, 9)
    lengths = []
    hook = llama.register_forward_pre_hook(lambda m, a, k: lengths.append(k["input_ids"].shape[1]), with_kwargs=True)
    second = spec(llama, twin, longer, max_new_tokens=9, cache=first.cache)
    hook.remove()
    assert torch.equal(second.sequences, want)
    assert lengths[0] == 5, "only what the cache does not hold is read: the last token and the new turn"
    third = torch.cat([second.sequences, prompt(3, seed=4)], 1)
    got = llama.generate(third, do_sample=False, pad_token_id=0, max_new_tokens=5, cache=second.cache)
    assert torch.equal(got, reference(llama, third, 5)), "transformers' own loop can go on with it, too"


def test_a_cache_from_before_the_longrope_switch_is_read_anew():
    model = build("phi3-longrope-16")
    first = spec(model, "ngram", prompt(6), "linear", max_new_tokens=6)
    longer = torch.cat([first.sequences, prompt(8, seed=3)], 1)
    got = spec(model, "ngram", longer, "linear", max_new_tokens=8, cache=first.cache)
    assert torch.equal(got.sequences, reference(build("phi3-longrope-16"), longer, 8))


def test_four_threads_on_one_target(llama, twin):
    prompts = [prompt(5 + i, seed=i) for i in range(4)]
    want = [reference(llama, ids, 24) for ids in prompts]
    got, errors = {}, []

    def work(i):
        try:
            for _ in range(3):
                got[i] = spec(llama, twin, prompts[i], "threshold:tau=0.01", max_new_tokens=24).sequences
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and all(torch.equal(got[i], want[i]) for i in range(4))


class Interrupting(Recorder):
    def put(self, value):
        super().put(value)
        if len(self.got) > 12:
            raise KeyboardInterrupt


def test_an_interrupt_leaves_nothing_behind(llama, twin):
    weights = [p.clone() for p in llama.parameters()]
    with pytest.raises(KeyboardInterrupt):
        spec(llama, twin, prompt(6), max_new_tokens=30, streamer=Interrupting())
    assert torch.equal(spec(llama, twin, prompt(6), max_new_tokens=9).sequences, reference(llama, prompt(6), 9))
    assert all(torch.equal(a, b) for a, b in zip(weights, llama.parameters()))


def test_a_failed_generation_frees_its_cache(llama, twin):
    seen = []

    def fail():
        decoding = treespec.start(llama, twin, prompt(6), policy="linear", **GREEDY, max_new_tokens=9)
        seen.append(weakref.ref(decoding.cache))
        next(iter(decoding))
        raise RuntimeError("a cell that failed")

    with pytest.raises(RuntimeError):
        fail()
    gc.collect()
    assert seen[0]() is None


def test_steps_can_be_taken_one_by_one(llama, twin):
    steps = treespec.steps(llama, twin, prompt(5), policy="linear:gamma=2", max_new_tokens=10, **GREEDY)
    first, second = next(steps), next(steps)
    assert first.is_prefill and first.index == 0 and len(first.tokens) == 1
    assert second.index == 1 and len(second.tokens) == 3 and second.position == 5 and not second.finished
    assert [e.finished for e in steps][-1]


def test_inference_mode_around_the_call_is_fine(llama, twin):
    with torch.inference_mode():
        first = spec(llama, twin, prompt(6), max_new_tokens=6)
    again = spec(llama, twin, first.sequences, max_new_tokens=6, cache=first.cache)
    assert torch.equal(again.sequences, reference(llama, first.sequences, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_diverges_only_at_near_ties(dtype):
    model = build("llama", dtype=dtype, scale=2.0, hidden_size=64, vocab_size=500)
    noise = torch.finfo(dtype).eps
    for seed in range(6):
        ids = prompt(8, seed, 500)
        want = reference(model, ids, 30)[0].tolist()
        got = spec(
            model, build("llama", dtype=dtype, scale=2.0, hidden_size=64, vocab_size=500), ids, max_new_tokens=30
        )
        text = got.sequences[0].tolist()
        where = next((i for i in range(len(want)) if want[i] != text[i]), None)
        if where is not None:
            with torch.no_grad():
                logits = model(torch.tensor([want[:where]])).logits[0, -1].float()
            gap = float(logits[want[where]] - logits[text[where]]).__abs__()
            assert gap <= 16 * noise * float(logits.abs().max()), (seed, where, gap)
