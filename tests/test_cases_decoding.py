"""Kinds of requests that broke other systems: limits, masks, stop strings and modes that a tree cannot serve."""

import numpy as np
import pytest
import torch
from conftest import build, prompt, reference
from test_api import characters
from transformers import DynamicCache, GenerationConfig, StaticCache

import treespec
from treespec import decode, readout
from treespec.errors import InputError, TreespecError

GREEDY = dict(do_sample=False, pad_token_id=0)


def spec(target, draft, ids, policy="uniform:depth=6,width=2", **options):
    return treespec.generate(target, draft, ids, policy=policy, **{**GREEDY, "max_new_tokens": 12, **options})


def counted(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


# --- S5, P1, P4, B1: what is refused costs no forward, not even the self-check's ------------------------------------------


@pytest.mark.parametrize(
    "ids, options, words",
    [
        (prompt(33), dict(max_new_tokens=1), "context is 32"),
        (prompt(32), dict(max_new_tokens=2), "room for 1 new"),
        (torch.zeros(1, 0).long(), {}, "empty"),
        (torch.ones(2, 5).long(), {}, "batch of 2"),
        (prompt(5), dict(max_new_tokens=0), "`max_new_tokens` must be greater than 0"),
        (prompt(5), dict(max_new_tokens=1.5), "whole numbers; got a length of 6.5"),
        (prompt(5), dict(max_length=5, max_new_tokens=None), "`max_length` is set to 5"),
        (prompt(5), dict(do_sample=True, temperature=0.0), "temperature"),
        (prompt(5), dict(do_sample=True, temperature=-1.0), "temperature"),
        (prompt(5), dict(foo=1), "foo"),
        ([5.0, 3.7], {}, "whole numbers"),
        ([True, False], {}, "whole numbers"),
        (np.array([0.5]), {}, "whole numbers"),
        ({"attention_mask": torch.ones(1, 5)}, {}, "must hold input_ids"),
    ],
    ids=str,
)
def test_what_cannot_be_decoded_is_refused_before_any_forward(ids, options, words):
    target, draft = build("gpt2", n_positions=32), build("gpt2", n_positions=32)
    calls = [counted(target), counted(draft)]
    with pytest.raises(TreespecError, match=words) as error:
        spec(target, draft, ids, **options)
    assert "\n" not in str(error.value) and calls == [[], []]


def test_a_long_prompt_costs_no_forward_behind_transformers_either():
    target = build("gpt2", n_positions=32)
    calls = counted(target)
    with pytest.raises(InputError, match="context is 32"):
        target.generate(prompt(33), custom_generate=treespec.custom_generate("ngram"), max_new_tokens=1, **GREEDY)
    assert not calls


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_arrays_are_prompts(llama, twin, dtype):
    ids = prompt(5)
    for given in (ids.numpy().astype(dtype), ids[0].numpy().astype(dtype)):
        assert torch.equal(spec(llama, twin, given).sequences, reference(llama, ids, 12))


# --- P1: a limit far beyond the text ----------------------------------------------------------------------------------


def test_a_limit_far_beyond_the_text_allocates_nothing(llama, twin):
    end = reference(llama, prompt(5), 12)[0, -1].item()
    got = spec(llama, twin, prompt(5), max_new_tokens=10**10, eos_token_id=end)
    assert torch.equal(got.sequences, reference(llama, prompt(5), 12, eos_token_id=end))
    assert got.cache.nbytes < 1 << 23


@pytest.mark.parametrize("at_once", [False, True])
def test_a_text_longer_than_was_planned_goes_on(llama, twin, monkeypatch, at_once):
    monkeypatch.setattr(decode, "PLANNED", 3)
    monkeypatch.setattr(decode, "TREE_ROOM", 1)
    monkeypatch.setattr(readout, "reads_at_once", lambda device: at_once)
    for policy in ("plain", "uniform:depth=3,width=2"):
        got = spec(llama, twin, prompt(2), policy, max_new_tokens=90)
        assert torch.equal(got.sequences, reference(llama, prompt(2), 90))


# --- M2: masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.tensor([[1] * 5 + [0] * 4]), "pad on the left"),
        (torch.zeros(1, 9), "hides the whole prompt"),
        (torch.ones(2, 9), r"shape \[1, 9\]; got shape \[2, 9\]"),
        (torch.ones(1, 8), r"got shape \[1, 8\]"),
        (torch.ones(1, 10), r"got shape \[1, 10\]"),
        (torch.ones(1, 1, 9, 9), r"got shape \[1, 1, 9, 9\]"),
        (torch.full((1, 9), 2), "other values"),
        (torch.full((1, 9), torch.nan), "other values"),
        (torch.tensor([[-1e4] * 4 + [0.0] * 5]), "other values"),
        ("mask", "zeros and ones"),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_masks_that_are_none_are_refused(llama, twin, mask, words):
    with pytest.raises(InputError, match=words):
        spec(llama, twin, torch.cat([torch.zeros(1, 4).long(), prompt(5)], 1), attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3-window-8"])
@pytest.mark.parametrize("kind", ["bool", "float", "list", "flat"])
def test_masks_of_any_kind(name, kind):
    model, ids = build(name), prompt(5)
    padded = torch.cat([torch.zeros(1, 4).long(), ids], 1)
    mask = torch.tensor([[0] * 4 + [1] * 5])
    given = {"bool": mask.bool(), "float": mask.float(), "list": mask.tolist(), "flat": mask[0].tolist()}[kind]
    got = spec(model, model, padded, attention_mask=given)
    assert got.tokens == reference(model, ids, 12)[0, 5:].tolist()
    both = {"input_ids": padded[0].tolist(), "attention_mask": given}
    assert spec(model, model, both).tokens == got.tokens


# --- E1: stop strings wherever transformers reads them ----------------------------------------------------------------


@pytest.mark.parametrize("place", ["argument", "config", "model", "both"])
def test_stop_strings_are_honoured_wherever_they_stand(twin, place):
    target, tokenizer = build("llama"), characters()
    g = reference(target, prompt(5), 12)[0, 5:].tolist()
    strings = [tokenizer.decode(g[6:9]), "no such text", tokenizer.decode(g[4:6])]
    more = {}
    if place == "argument":
        more["stop_strings"] = strings
    if place in ("config", "both"):
        more["generation_config"] = GenerationConfig(stop_strings=strings)
    if place in ("model", "both"):
        target.generation_config.stop_strings = strings
    want = target.generate(prompt(5), tokenizer=tokenizer, max_new_tokens=12, **GREEDY, **more)
    got = spec(target, twin, prompt(5), tokenizer=tokenizer, **more)
    assert torch.equal(got.sequences, want) and len(got.tokens) < 12
    assert got.cache.length == want.shape[1] - 1
    if place != "argument":
        assert (more.get("generation_config") or target.generation_config).stop_strings == strings
    with pytest.raises(InputError, match="needs tokenizer"):
        spec(target, twin, prompt(5), **more)


@pytest.mark.parametrize("strings", [[5], [""], []], ids=str)
def test_stop_strings_that_are_none_are_refused(llama, twin, strings):
    with pytest.raises(InputError, match="stop_strings must be"):
        spec(llama, twin, prompt(5), stop_strings=strings, tokenizer=characters())


# --- L1: modes and processors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    dict(prefix_allowed_tokens_fn=lambda batch, ids: [int(ids[-1]) % 7 + k for k in range(40)]),
    dict(renormalize_logits=True, repetition_penalty=1.3), dict(guidance_scale=1.5),
    dict(encoder_repetition_penalty=1.5), dict(encoder_no_repeat_ngram_size=2), dict(begin_suppress_tokens=[5, 6]),
    dict(forced_bos_token_id=7), dict(remove_invalid_values=True), dict(min_length=11, eos_token_id=list(range(50))),
], ids=lambda o: next(iter(o)))  # fmt: skip
def test_processors_of_every_kind(llama, twin, options):
    want = llama.generate(prompt(5), max_new_tokens=12, **GREEDY, **options)
    got = spec(llama, twin, prompt(5), **options)
    assert torch.equal(got.sequences, want)
    plain = reference(llama, prompt(5), 12)
    changes = {"prefix_allowed_tokens_fn", "guidance_scale", "min_length"} & options.keys()
    assert not (changes and torch.equal(want, plain)), "nothing was tested"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
        (dict(dola_layers="low"), "dola"),
        (dict(num_beams=3), "beam search"),
        (dict(force_words_ids=[[5]], num_beams=2), "beam search"),
    ],
    ids=str,
)
def test_other_ways_to_decode_are_refused_not_passed_over(llama, twin, options, words):
    with pytest.raises(InputError, match=words):
        spec(llama, twin, prompt(5), **options)
    with pytest.raises(InputError, match=words):
        engine = treespec.custom_generate(twin, "linear")
        llama.generate(prompt(5), custom_generate=engine, max_new_tokens=12, **{**GREEDY, **options})


# --- C3: caches that cannot keep a path -------------------------------------------------------------------------------


def test_foreign_caches_are_refused(llama, twin):
    filled = DynamicCache()
    with torch.no_grad():
        llama(prompt(5), cache=filled)
    static = StaticCache(config=llama.config, max_cache_len=64)
    for cache, words in ((filled, "DynamicCache"), (static, "StaticCache")):
        with pytest.raises(InputError, match=f"{words} cannot keep"):
            spec(llama, twin, prompt(5), cache=cache)
    for empty in (DynamicCache(), DynamicCache(config=llama.config)):
        assert torch.equal(spec(llama, twin, prompt(5), cache=empty).sequences, reference(llama, prompt(5), 12))


# --- T1: vocabularies of other sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(128, 97), (97, 128), (97, 98)])
@pytest.mark.parametrize("rule", ["match", "coupled", "rrs", "hybrid", "traversal"])
def test_padded_heads_propose_and_emit_what_both_have(sizes, rule):
    target, draft = (build("llama", vocab_size=size) for size in sizes)
    with torch.no_grad():
        draft.lm_head.weight[97:] += 30.0
    options = dict(do_sample=True, temperature=0.9, top_k=0, rule=rule, seed=3)
    for more in ({}, dict(repetition_penalty=1.3, top_p=0.9)):
        got = spec(target, draft, prompt(6), "uniform:depth=2,width=3", max_new_tokens=20, **options, **more)
        assert len(got.tokens) == 20 and max(got.tokens) < sizes[0]
        assert all(int(t) < min(sizes) or sizes[1] > sizes[0] for e in got.steps for t in e.tree.token[1:])
        assert all(int(t) < sizes[0] for e in got.steps for t in e.tree.token)
    assert torch.equal(
        spec(target, draft, prompt(6), "uniform:depth=2,width=3").sequences, reference(target, prompt(6), 12)
    )
