"""model.generate(custom_generate=…): one line of existing code changes, everything else behaves as there."""

import pytest
import torch
from conftest import prompt, reference
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)

import treespec
from treespec.api import check_vocabularies
from treespec.errors import InputError, VocabularyError

GREEDY = dict(do_sample=False, pad_token_id=0, max_new_tokens=20)


def characters(count=97, start=0):
    """A byte-level tokenizer of ``count`` one-character tokens."""
    alphabet = sorted(ByteLevel.alphabet())[start : start + count]
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Recorder:
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def test_one_line_changes(llama, twin):
    engine = treespec.custom_generate(draft=twin, policy="uniform:depth=3,width=2")
    assert torch.equal(llama.generate(prompt(6), custom_generate=engine, **GREEDY), reference(llama, prompt(6), 20))


def test_draft_and_policy_can_be_given_by_name(llama, twin):
    seen = []
    engine = treespec.custom_generate(on_step=seen.append)
    got = llama.generate(prompt(6), custom_generate=engine, draft=twin, policy="linear:gamma=3", **GREEDY)
    assert torch.equal(got, reference(llama, prompt(6), 20)) and max(len(e.tokens) for e in seen) == 4


def test_processors_criteria_and_config_behave_as_there(llama, twin):
    engine = treespec.custom_generate(draft=twin, policy="threshold:tau=0.01")
    g = reference(llama, prompt(6), 20)[0, 6:].tolist()
    for more in (
        dict(logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])),
        dict(eos_token_id=[g[5], 96]),
        dict(max_new_tokens=7),
        dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4, eos_token_id=g[2]),
        dict(attention_mask=torch.ones(1, 6).long()),
        dict(use_cache=False),
    ):
        options = {**GREEDY, **more}
        got = llama.generate(prompt(6), custom_generate=engine, **options)
        assert torch.equal(got, llama.generate(prompt(6), **options)), more


def test_return_dict_scores_and_logits(llama, twin):
    options = dict(GREEDY, return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    want = llama.generate(prompt(6), **options)
    got = llama.generate(
        prompt(6), custom_generate=treespec.custom_generate(twin, "uniform:depth=3,width=2"), **options
    )
    assert type(got) is type(want) and torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        mine, theirs = torch.stack(getattr(got, name)), torch.stack(getattr(want, name))
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    assert got.cache.get_seq_length() == want.cache.get_seq_length()


def test_a_bound_streamer_gets_prompt_tokens_and_end(llama, twin):
    streamer = Recorder()
    engine = treespec.custom_generate(draft=twin, streamer=streamer, policy="linear:gamma=3")
    got = llama.generate(prompt(6), custom_generate=engine, **GREEDY)
    theirs = Recorder()
    llama.generate(prompt(6), streamer=theirs, **GREEDY)
    assert streamer.puts == theirs.puts and streamer.ended == theirs.ended == 1
    assert [t for put in streamer.puts for t in put] == got[0].tolist()


def test_sampling_follows_torchs_seed(llama, twin):
    options = dict(GREEDY, do_sample=True, top_k=0, custom_generate=treespec.custom_generate(twin, "linear:gamma=3"))
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(llama.generate(prompt(6), **options).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_coupled_through_transformers_equals_the_library(llama, twin):
    engine = treespec.custom_generate(twin, "uniform:depth=3,width=2", rule="coupled", seed=11)
    options = dict(GREEDY, do_sample=True, top_k=0)
    got = llama.generate(prompt(6), custom_generate=engine, **options)
    want = treespec.generate(llama, "ngram", prompt(6), policy="plain", rule="coupled", seed=11, **options)
    assert torch.equal(got, want.sequences)


@pytest.mark.parametrize("span", [1, 2, 3])
def test_stop_strings_end_at_the_same_token(llama, twin, span):
    tokenizer = characters()
    g = reference(llama, prompt(5), 20)[0, 5:].tolist()
    for k in range(0, 20 - span, 3):
        stop = tokenizer.decode(g[k : k + span])
        options = dict(GREEDY, stop_strings=[stop], tokenizer=tokenizer)
        want = llama.generate(prompt(5), **options)
        streamer = Recorder()
        got = treespec.generate(llama, twin, prompt(5), policy="uniform:depth=6,width=2", streamer=streamer, **options)
        assert torch.equal(got.sequences, want), (k, stop)
        assert [t for put in streamer.puts for t in put] == want[0].tolist()
        bound = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
        engine = treespec.custom_generate(twin, "uniform:depth=6,width=2")
        assert torch.equal(llama.generate(prompt(5), custom_generate=engine, stopping_criteria=bound, **GREEDY), want)


def test_text_prompts_labels_and_text(llama, twin):
    tokenizer = characters()
    got = treespec.generate(llama, twin, "Tree?", policy="linear", tokenizer=tokenizer, **GREEDY)
    assert got.text == tokenizer.decode(got.tokens)
    root = got.steps[1].tree
    assert root.label(0) == tokenizer.decode(root.token[:1])
    assert "tokens per step" in repr(got) and got.steps[1]._repr_html_().startswith("<div")
    batch = tokenizer("Tree?", return_tensors="pt")
    assert treespec.generate(llama, twin, batch, policy="linear", **GREEDY).tokens == got.tokens


def test_stats_add_up(llama, twin):
    got = treespec.generate(llama, twin, prompt(6), policy="uniform:depth=3,width=2", **GREEDY)
    s = got.stats
    assert s.tokens == 20 and s.steps == len(got.steps) - 1 and s.step_tokens == 19
    assert (
        s.tokens_per_step == pytest.approx(19 / s.steps)
        and s.seconds >= s.prefill_seconds + s.draft_seconds + s.verify_seconds
    )
    assert set(s.as_dict()) >= {
        "tokens",
        "tokens_per_step",
        "nodes",
        "draft_ms",
        "verify_ms",
        "overhead_ms",
        "prune_ms",
    }
    plain = treespec.generate(llama, None, prompt(6), **GREEDY).stats
    assert plain.tokens_per_step == 1.0 and plain.nodes == 1.0 and plain.draft_seconds == 0


def test_without_a_draft_the_default_is_plain_and_with_one_dynamic(llama, twin):
    assert treespec.generate(llama, None, prompt(6), **GREEDY).stats.tokens_per_step == 1.0
    seen = treespec.start(llama, twin, prompt(6), **GREEDY)
    assert seen.policy == treespec.policies.DynamicTreePruner()


def test_tokenizers_are_compared_by_their_tokens():
    check_vocabularies(97, 97, characters(), characters(50))  # a smaller one with the same ids
    with pytest.raises(VocabularyError, match="0 of 97 tokens agree"):
        check_vocabularies(97, 97, characters(), characters(start=100))
    with pytest.raises(VocabularyError, match=r"has id \d+ there and \d+ here"):
        check_vocabularies(97, 97, characters(), characters(96, start=1))


def test_a_flat_list_holds_no_padding(llama):
    """A tokenizer's last token may be the one that pads; a tensor is read as transformers reads it."""
    ids = [5, 9, 0]
    options = dict(do_sample=False, pad_token_id=0, max_new_tokens=6)
    got = treespec.generate(llama, None, ids, policy="plain", **options)
    want = llama.generate(torch.tensor([ids]), attention_mask=torch.ones(1, 3, dtype=torch.long), **options)
    assert got.tokens == want[0, 3:].tolist()
    with pytest.raises(InputError, match="masked out"):
        treespec.generate(llama, None, torch.tensor([ids]), policy="plain", **options)
