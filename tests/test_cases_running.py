"""Faults from other people's public reports, tried here as kinds: files, shapes, memory, threads, dashboards.

The table of ``docs/CASES.md`` says which is which; what an older module already held is tested there.
"""

import copy
import functools
import gc
import itertools
import threading
import weakref

import gguf
import numpy as np
import pytest
import torch
import transformers as T
from conftest import VOCAB, build, prompt, reference
from test_api import characters
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import treespec
from treespec.cache import TreeCache
from treespec.compare import compare
from treespec.drafters import HeadDrafter, MixDrafter, ModelDrafter, NgramDrafter
from treespec.errors import InputError
from treespec.fast import speed_up
from treespec.head import FeatureHead, HeadConfig
from treespec.known import known_tokenizer
from treespec.model import TreeModel
from treespec.pairs import Pair, load_model, load_pair
from treespec.placement.configs import load_config
from treespec.policies import Uniform, parse_policies
from treespec.prompts import Prompt
from treespec.trace import Sampling, record

pytestmark = pytest.mark.thorough

# --- F1: .gguf files -----------------------------------------------------------------------------------------------


def in_halves(weight, heads):
    """Rotary rows as GGUF keeps them: pairs side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, arch="llama", half=False):
    """A Llama as llama.cpp would write it; its tokenizer has 97 tokens whatever the head's rows."""
    config, state = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    file = gguf.GGUFWriter(str(path), arch)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    tokens = sorted(characters().get_vocab().items(), key=lambda pair: pair[1])
    file.add_tokenizer_model("gpt2")
    file.add_token_list([token for token, _ in tokens])
    file.add_token_types([1] * len(tokens))
    file.add_token_scores([0.0] * len(tokens))
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config.tie_word_embeddings:
        names["output"] = "lm_head"
    for i in range(config.num_hidden_layers):
        inside = dict(
            attn_norm="input_layernorm", ffn_norm="post_attention_layernorm", attn_q="self_attn.q_proj",
            attn_k="self_attn.k_proj", attn_v="self_attn.v_proj", attn_output="self_attn.o_proj",
            ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj",
        )  # fmt: skip
        names |= {f"blk.{i}.{short}": f"model.layers.{i}.{long}" for short, long in inside.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for short, long in names.items():
        weight = state[f"{long}.weight"]
        if (kind := short.rpartition(".")[2]) in heads:
            weight = in_halves(weight, heads[kind])
        narrow = half and weight.ndim > 1
        file.add_tensor(f"{short}.weight", np.ascontiguousarray(weight, np.float16 if narrow else np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A model's folder and .gguf files: the same, with a longer head, with a tied head, of an unknown architecture."""
    folder = tmp_path_factory.mktemp("gguf")
    model = build("llama")
    model.save_pretrained(folder / "whole")
    characters().save_pretrained(folder / "whole")
    longer = build("llama", vocab_size=104)
    with torch.no_grad():
        for name, value in longer.state_dict().items():
            value[: len(model.state_dict()[name])] = model.state_dict()[name]
    write_gguf(folder / "same.gguf", model)
    write_gguf(folder / "longer.gguf", longer)
    write_gguf(folder / "half.gguf", model, half=True)
    write_gguf(folder / "tied.gguf", build("llama", tie_word_embeddings=True))
    write_gguf(folder / "odd.gguf", model, arch="nosuch")
    return folder


@pytest.mark.parametrize(
    ("target", "draft"),
    [("whole", "same.gguf"), ("whole", "longer.gguf"), ("same.gguf", "whole"), ("longer.gguf", "same.gguf"), ("same.gguf", "self")],
)  # fmt: skip
def test_a_gguf_file_is_a_model_like_any_other(packed, target, draft):
    pair = load_pair(str(packed / target), draft if draft == "self" else str(packed / draft))
    got = treespec.generate(
        pair.target, pair.draft, prompt(6), policy="linear:gamma=3", do_sample=False, max_new_tokens=25
    )
    assert torch.equal(got.sequences, reference(build("llama"), prompt(6), 25))
    assert got.stats.tokens_per_step == 4.0, "its twin is always right"


def test_a_gguf_file_has_the_dtype_that_was_asked_for(packed):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, tokenizer = load_model(str(packed / "half.gguf"), str(dtype).removeprefix("torch."))
        assert {p.dtype for p in model.parameters()} == {dtype} and tokenizer is not None
        assert model.config._attn_implementation in ("sdpa", "eager")
        known = known_tokenizer(str(packed / "half.gguf"))
        assert known("Tree?")["input_ids"] == characters()("Tree?")["input_ids"]


def test_a_tied_head_of_a_gguf_file_is_found(packed):
    model, want = load_model(str(packed / "tied.gguf"), "float32")[0], build("llama", tie_word_embeddings=True)
    got = treespec.generate(model, "ngram", prompt(6), policy="linear", do_sample=False, max_new_tokens=12)
    assert torch.equal(got.sequences, reference(want, prompt(6), 12))


def test_gguf_files_that_cannot_be_loaded_are_one_sentence(packed, tmp_path):
    whole = (packed / "same.gguf").read_bytes()
    damaged = {"empty": b"", "junk": b"GGUF" + bytes(range(200)), "head": whole[:300], "cut": whole[: len(whole) // 2],
               "none": b"PK\x03\x04"}  # fmt: skip
    for name, content in damaged.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(InputError, match=f"{name}.gguf") as error:
            load_pair(str(packed / "whole"), str(tmp_path / f"{name}.gguf"))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"head\.gguf"):
        load_config(str(tmp_path / "head.gguf"))
    assert known_tokenizer(str(tmp_path / "head.gguf")) is None
    for name, dtype, options, words in (
        (packed / "odd.gguf", "float32", {}, r"odd\.gguf.*architecture nosuch"),
        (tmp_path / "missing.gguf", "float32", {}, r"no file .*missing\.gguf"),
        (packed / "same.gguf", "int8", {}, "cannot be quantised again"),
        (packed / "same.gguf", "float32", {"device_map": {"": "disk"}}, "cannot be left on the disk"),
    ):
        with pytest.raises(InputError, match=words):
            load_model(str(name), dtype, **options)


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", b'{"a": 1}'), ("tokenizer.json", b"{"), ("model.safetensors", b""), ("model.safetensors", b"\x10" * 900),
    ("config.json", b"[1]"), ("config.json", b'{"model_type": "llama", "hidden_size": "x"}'),
    ("config.json", b'{"model_type": "llama", "num_attention_heads": 0}'),
], ids=str)  # fmt: skip
def test_a_damaged_folder_is_one_sentence(tmp_path, file, content):
    build("llama").save_pretrained(tmp_path)
    characters().save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match="cannot load a causal language model") as error:
        load_model(str(tmp_path), "float32")
    assert "\n" not in str(error.value)
    if file == "config.json":
        with pytest.raises(InputError, match="cannot read the config"):
            load_config(str(tmp_path))
        assert known_tokenizer(str(tmp_path)) is None


# --- B1: batches; U1: what is no decoder -----------------------------------------------------------------------------

GREEDY = dict(do_sample=False, pad_token_id=0)


def listened(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("inputs", "more"), [
    (torch.ones(2, 5).long(), {}), ([[1, 2], [3, 4]], {}), ([[1, 2], [3]], {}), (torch.ones(1, 1, 5).long(), {}),
    (["one", "two"], {}), ({"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 5).long()}, {}),
    (prompt(5), dict(num_return_sequences=2, do_sample=True)), (prompt(5), dict(attention_mask=torch.ones(1, 4).long())),
    (prompt(5), dict(attention_mask=torch.ones(2, 5).long())), (prompt(300), {}), (prompt(5), dict(num_beams=3)),
    (prompt(5), dict(rule="rrs", do_sample=True, policy="dynamic")), ([], {}), (torch.tensor(5), {}), ({}, {}),
], ids=range(15))  # fmt: skip
@pytest.mark.parametrize("entry", [treespec.generate, treespec.start])
def test_what_cannot_be_decoded_is_said_before_any_forward(entry, inputs, more):
    target, draft = build("llama"), build("llama")
    calls = listened(target), listened(draft)  # both new: not even the self-check has run
    with pytest.raises(ValueError) as error:
        entry(target, draft, inputs, **{**GREEDY, "policy": "linear", "max_new_tokens": 4, **more})
    assert isinstance(error.value, treespec.errors.TreespecError) and "\n" not in str(error.value)
    assert calls == ([], [])


def test_a_batch_is_refused_through_transformers_too():
    target, draft = build("llama"), build("llama")
    calls = listened(target), listened(draft)
    for ids, more in ((torch.ones(2, 5).long(), {}), (prompt(5), dict(num_return_sequences=2, do_sample=True))):
        with pytest.raises(InputError, match="batch of 2"):
            target.generate(
                ids, custom_generate=treespec.custom_generate(draft), **{**GREEDY, "max_new_tokens": 4, **more}
            )
    assert calls == ([], [])


SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB)
T5 = dict(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=VOCAB, decoder_start_token_id=0)
BART = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=VOCAB, max_position_embeddings=64)  # fmt: skip
FOREIGN = {
    "t5": lambda: T.T5ForConditionalGeneration(T.T5Config(**T5)),
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**BART)),
    "whisper": lambda: T.WhisperForConditionalGeneration(T.WhisperConfig(**BART, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "two halves": lambda: T.EncoderDecoderModel(T.EncoderDecoderConfig.from_encoder_decoder_configs(
        T.BertConfig(**SMALL), T.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SMALL)),
    "bert as a decoder that looks ahead": lambda: T.BertLMHeadModel(T.BertConfig(**SMALL)),
    "classifier": lambda: T.LlamaForSequenceClassification(T.LlamaConfig(**SMALL)),
    "no head": lambda: build("llama").model,
    "a name": lambda: "gpt2",
    "a config": lambda: T.LlamaConfig(**SMALL),
    "a module": lambda: torch.nn.Linear(3, 3),
    "nothing": lambda: None,
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_decoder_is_refused_as_target_and_as_draft(kind, llama):
    foreign = FOREIGN[kind]()
    if isinstance(foreign, torch.nn.Module):
        foreign.eval()
    with pytest.raises(treespec.errors.TreespecError) as error:
        treespec.generate(foreign, "ngram", prompt(5), policy="linear", max_new_tokens=4, **GREEDY)
    assert "target" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(treespec.errors.TreespecError) as error:
        treespec.generate(llama, foreign, prompt(5), policy="linear", max_new_tokens=4, **GREEDY)
    assert "draft" in str(error.value) and "\n" not in str(error.value)


# --- X2: returned caches ---------------------------------------------------------------------------------------------


def turn(model, ids, cache=None, new=8, draft="ngram", **more):
    options = {**GREEDY, "policy": "uniform:depth=3,width=2", "max_new_tokens": new, **more}
    return treespec.generate(model, draft, ids, cache=cache, **options)


def test_one_cache_for_two_branches_and_edited_texts(llama, twin):
    """Rows of another text must not be read as this one's, however long the cache is."""
    first = turn(llama, prompt(6), draft=twin)
    left, right = (torch.cat([first.sequences, prompt(n, seed=n)], 1) for n in (4, 9))
    edited = left.clone()
    edited[0, 3] = (edited[0, 3] + 1) % VOCAB
    for ids in (left, right, left[:, :9], edited, prompt(7, seed=8), first.sequences, left):
        got = turn(llama, ids, first.cache, draft=twin)
        assert torch.equal(got.sequences, reference(llama, ids, 8))


@pytest.mark.parametrize(
    "stop", [dict(new=1), dict(new=2), dict(eos=2), dict(eos=5), dict(do_sample=True, seed=4)], ids=str
)
def test_the_next_turn_is_a_fresh_prefill_whatever_ended_the_last(llama, twin, stop):
    more = dict(stop)
    if "eos" in more:
        more["eos_token_id"] = int(reference(llama, prompt(6), 8)[0, 6 + more.pop("eos")])
    first = turn(llama, prompt(6), draft=twin, **more)
    assert first.cache.length == first.sequences.shape[1] - 1 == len(first.cache.tokens)
    copied = copy.deepcopy(first.cache)
    longer = torch.cat([first.sequences, prompt(3, seed=2)], 1)
    for cache in (first.cache, copied):
        got = turn(llama, longer, cache, draft=twin)
        assert torch.equal(got.sequences, reference(llama, longer, 8))


def test_a_cache_survives_an_exception_and_transformers_own_loop(llama, twin):
    first = turn(llama, prompt(6), draft=twin)
    longer = torch.cat([first.sequences, prompt(3, seed=2)], 1)

    class Failing:
        def __init__(self):
            self.left = 7

        def put(self, value):
            self.left -= value.numel() if value.numel() == 1 else 0
            if self.left == 0:
                raise RuntimeError("mid-path")

    with pytest.raises(RuntimeError, match="mid-path"):
        turn(llama, longer, first.cache, draft=twin, streamer=Failing())
    assert torch.equal(turn(llama, longer, first.cache, draft=twin).sequences, reference(llama, longer, 8))
    theirs = llama.generate(longer, cache=first.cache, max_new_tokens=5, **GREEDY)
    other = torch.cat([longer, prompt(6, seed=5)], 1)
    for ids in (theirs, other):
        assert torch.equal(turn(llama, ids, first.cache, draft=twin).sequences, reference(llama, ids, 8))


def test_a_cache_of_another_model_is_refused(llama, stranger):
    first = turn(llama, prompt(6))
    with pytest.raises(InputError, match="another model"):
        turn(build("llama", seed=9), first.sequences, first.cache)


@pytest.mark.parametrize("name", ["llama-dynamic-16", "phi3-longrope-16"])
@pytest.mark.parametrize("lengths", [(5, 4, 3), (9, 9, 4), (20, 4, 3)])
def test_turns_across_a_change_of_frequencies(name, lengths):
    model, ids, cache = build(name), prompt(lengths[0]), None
    for number, more in enumerate((*lengths[1:], 0)):
        got = turn(model, ids, cache)
        assert torch.equal(got.sequences, reference(build(name), ids, 8)), number
        ids, cache = torch.cat([got.sequences, prompt(more, seed=7)], 1), got.cache


# --- K5: inference mode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-dynamic-16", "phi3-longrope-16", "gemma3-window-8"])
def test_inference_mode_here_and_not_there(name):
    model, want = build(name), reference(build(name), prompt(9), 14)
    for inside in (True, False, True, False):
        with torch.inference_mode(inside):
            got = turn(model, prompt(9), new=14, draft=build(name))
        assert torch.equal(got.sequences, want)
    with torch.inference_mode():
        under_way = treespec.start(model, "ngram", prompt(9), policy="linear", max_new_tokens=14, **GREEDY)
    for _ in under_way:  # taken outside
        pass
    assert torch.equal(under_way.sequences, want)


@pytest.mark.parametrize("fast", ["off", "cpu", "lean"])
def test_a_model_made_in_inference_mode(fast):
    with torch.inference_mode():
        model = build("llama")
        speed_up(model, fast)
        first = turn(model, prompt(6))
    longer = torch.cat([first.sequences, prompt(3, seed=2)], 1)
    assert torch.equal(turn(model, longer, first.cache).sequences, reference(build("llama"), longer, 8))


# --- R2: threads -----------------------------------------------------------------------------------------------------


def at_once(*works):
    """Run them in threads, all at the same time; the first error is raised."""
    ready, errors = threading.Barrier(len(works)), []

    def run(work):
        ready.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", ["llama-dynamic-16", "phi3-longrope-16", "gemma3-window-8"])
def test_threads_on_one_model_whose_frequencies_move(name):
    """One text is on this side of the change while another is past it; the target is its own draft in one thread."""
    model, draft = build(name), build(name)
    prompts = [prompt(n, seed=n) for n in (4, 9, 14, 22)]
    want = [reference(build(name), ids, 14) for ids in prompts]

    def work(i):
        for guess in (draft, "ngram", model):
            got = turn(model, prompts[i], new=14, draft=guess, policy="threshold:tau=0.01,budget=6")
            assert torch.equal(got.sequences, want[i]), (i, guess)

    at_once(*(functools.partial(work, i) for i in range(4)))


@pytest.fixture(scope="module")
def headed():
    """A target and a head of its shape, untrained: it guesses anything."""
    target = build("llama")
    config = HeadConfig.like(target, "llama", VOCAB)
    torch.manual_seed(0)
    weights = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return target, FeatureHead(config, *weights, torch.arange(VOCAB), torch.ones(32)).eval().requires_grad_(False)


@pytest.mark.parametrize("make", [lambda h: NgramDrafter(), HeadDrafter, MixDrafter, lambda h: ModelDrafter(build("llama"))],
                         ids=["ngram", "head", "mix", "model"])  # fmt: skip
@pytest.mark.parametrize("fast", ["off", "cpu"])
def test_one_drafter_serves_many_texts_at_once(headed, make, fast, tmp_path):
    """A pair holds one drafter; threads, or two texts taken step by step in turns, must not share its state."""
    target, head = headed
    speed_up(target, fast)
    drafter = make(head)
    prompts = [prompt(5 + 3 * i, seed=i) for i in range(4)]
    want = [reference(build("llama"), ids, 14) for ids in prompts]

    def work(i, policy="bestfirst:budget=6,floor=0"):
        assert torch.equal(turn(target, prompts[i], new=14, draft=drafter, policy=policy).sequences, want[i])

    def recording():
        pair = Pair(target, drafter, characters(), "llama")
        asked = [Prompt(str(i), "any", ["abcab" * (i + 1)]) for i in range(2)]
        recorded[:] = record(pair, asked, tmp_path / "t.parquet", sampling=Sampling(max_new_tokens=6))

    recorded = []
    at_once(recording, *(functools.partial(work, i) for i in range(4)))
    assert [info.new_tokens for info in recorded] == [6, 6]
    two = [
        treespec.start(target, drafter, ids, policy="linear:gamma=3", max_new_tokens=14, **GREEDY)
        for ids in prompts[:2]
    ]
    for _ in itertools.zip_longest(*two):
        pass
    assert all(torch.equal(text.sequences, w) for text, w in zip(two, want))
    speed_up(target, "off")


def test_threads_meet_at_the_first_self_check():
    """The check switches the model to eval mode and back; nobody may see it half done."""
    model = build("llama").train()
    at_once(*[lambda: TreeModel.of(model)] * 4)
    assert model.training


# --- K4: what an exception leaves behind ---------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


class Raises(LogitsProcessor, StoppingCriteria):
    """Raises at the sixth call, whatever it is called as."""

    name, levels, width, shape, predictable, deterministic = "raises", 4, 2, None, True, True

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 6:
            raise Boom("a cell that failed")
        as_processor = len(args) == 2 and torch.is_tensor(args[1])
        return args[1] if as_processor else torch.tensor([False])

    put = on_step = __call__

    def end(self):
        pass


def raising(where):
    """Arguments of a generation that fails at a place."""
    bad = Raises()
    policy = "linear:gamma=2"
    if where == "policy":
        policy = Uniform(3, 2)
        object.__setattr__(policy, "after_step", lambda seen: bad(seen) is not None and policy)
    return {
        "streamer": dict(streamer=bad),
        "on_step": dict(on_step=bad),
        "processor": dict(logits_processor=LogitsProcessorList([bad])),
        "criterion": dict(stopping_criteria=StoppingCriteriaList([bad])),
        "policy": {},
    }[where] | {"policy": policy}


@pytest.mark.parametrize("where", ["streamer", "on_step", "processor", "criterion", "policy"])
def test_no_cache_outlives_the_exception(llama, stranger, monkeypatch, where):
    made = []
    plain = TreeCache.__init__
    monkeypatch.setattr(
        TreeCache, "__init__", lambda self, *a, **k: (made.append(weakref.ref(self)), plain(self, *a, **k))[1]
    )
    drafter = ModelDrafter(stranger)  # held, as a pair holds it
    TreeModel.of(llama)
    made.clear()
    with pytest.raises(Boom):
        treespec.generate(llama, drafter, prompt(6), max_new_tokens=30, **GREEDY, **raising(where))
    assert len(made) == 2, "the target's and the draft's"
    gc.collect()
    assert [cache() for cache in made] == [None, None]
    assert torch.equal(turn(llama, prompt(6), draft=drafter).sequences, reference(llama, prompt(6), 8))
    gc.collect()
    assert all(cache() is None for cache in made)


# --- D6, K1: drafts that are worth nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HeadDrafter, MixDrafter], ids=["head", "mix"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("more", [{}, dict(repetition_penalty=1.2), dict(rule="coupled", do_sample=True)], ids=str)
def test_a_head_that_breaks_is_said_to_and_changes_nothing(headed, make, value, more):
    target, head = headed
    broken = copy.deepcopy(head)
    broken.mix.weight.fill_(value)
    want = turn(target, prompt(9), new=12, draft=None, **{"seed": 3, **more, "policy": "plain"})
    with pytest.warns(RuntimeWarning, match="non-finite"):
        got = turn(target, prompt(9), new=12, draft=make(broken), seed=3, **more)
    assert torch.equal(got.sequences, want.sequences)


def test_a_half_precision_draft_that_overflows_is_said_to(llama):
    draft = build("llama", dtype=torch.float16)
    with torch.no_grad():
        for p in draft.parameters():
            p.mul_(1e4)
    with pytest.warns(RuntimeWarning, match="non-finite"):
        got = turn(llama, prompt(6), draft=draft)
    assert torch.equal(got.sequences, reference(llama, prompt(6), 8))


def test_a_draft_of_permuted_ids_is_lossless_and_its_uselessness_shows(llama):
    draft = build("llama")
    with torch.no_grad():
        draft.lm_head.weight.copy_(
            draft.lm_head.weight[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))]
        )
    pair = Pair(llama, draft, characters(), "llama")
    rows = compare(pair, [Prompt("a", "any", ["abcab"])], parse_policies("plain,linear:gamma=3"), max_new_tokens=24)[
        "rows"
    ]
    plain, own = rows
    assert own["lossless"] and own["tokens_per_step"] < 1.2 and plain["tokens_per_step"] == 1.0
    assert own["draft_ms"] > 0 and own["nodes"] > 3
    assert own["speedup"] < 1, "three draft forwards for nothing cost something"


# --- Q1: absurd settings -------------------------------------------------------------------------------------------------

ABSURD = """uniform:depth=1,width=200|uniform:depth=2,width=20|uniform:depth=64,width=1|linear:gamma=256|linear:confidence=1|
linear:svip=1e-9|threshold:tau=1|threshold:tau=1e-30,width=30,depth=2,budget=8192|threshold:budget=1|dynamic:tau=1|dynamic:tau=1e-30|
dynamic:budget=1|dynamic:low=0,high=1e-9|dynamic:low=63,high=64,tau=1e-30,depth=1,deep=64,budget=2|dynamic:tau=auto,low=0,high=64|
dynamic:mid_widths=200/1000,low=0,high=64,tau=1e-30,depth=2,deep=2|dynamic:scope=level,tau=1e-30,low=0,high=64|specinfer:expansion=200|
specinfer:expansion=97/4|eagle2:total=2,depth=1,top_k=1|eagle2:top_k=97,depth=2,total=600|opttree:budget=1|opttree:delta=0|
sequoia:acceptance=0/0/0|sequoia:acceptance=1|sequoia:acceptance=0.5/0.5,budget=200,depth=64|bestfirst:budget=1,depth=1|
bestfirst:floor=1|bestfirst:floor=0,depth=3,budget=200|throughput:cost=article,rate=1e9|throughput:cost=article,rate=1e-9"""


@pytest.mark.parametrize("spec", ABSURD.replace("\n", "").split("|"))
def test_absurd_but_legal_trees_leave_the_text_alone(llama, twin, stranger, spec):
    """Wider than the vocabulary, deeper than the text, empty by its own threshold: the text is plain decoding's."""
    want, penalised = reference(llama, prompt(5), 9), reference(llama, prompt(5), 9, repetition_penalty=1.3)
    for draft in (twin, stranger, "ngram"):
        got = turn(llama, prompt(5), draft=draft, policy=spec, new=9)
        assert torch.equal(got.sequences, want), draft
        assert all(event.nodes <= len(event.tree) and not event.tree.kept()[0].children()[0].keys() - set(range(VOCAB))
                   for event in got.steps)  # fmt: skip
    assert torch.equal(
        turn(llama, prompt(5), draft=twin, policy=spec, new=9, repetition_penalty=1.3).sequences, penalised
    )
    three = build("llama", vocab_size=3)
    got = turn(three, torch.tensor([[1, 2]]), draft=build("llama", vocab_size=3, seed=4), policy=spec, new=9)
    assert torch.equal(got.sequences, reference(three, torch.tensor([[1, 2]]), 9))


# --- N2, N3, N5: half precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head", "gemma3-window-8", "gpt2"])
def test_half_precision_trees_at_every_cached_length(name, attn, dtype):
    """Masks are of the model's dtype and shape-agnostic: finite, and as far from the float32 oracle as rounding goes."""
    half, exact = build(name, attn, dtype=dtype, scale=2.0), build(name, attn="eager", scale=2.0)
    exact.load_state_dict(half.float().state_dict())
    half.to(dtype)
    tree = treespec.TokenTree.from_lists([11, 22, 33, 44, 55], [-1, 0, 0, 1, 2])
    owner = TreeModel.of(half)
    with torch.no_grad():
        for length in (1, 7, 8, 9, *range(31, 67, 1 if name == "llama" else 7)):
            session, ids = owner.session(16), prompt(length)
            session.extend(ids[0].tolist(), logits="none")
            got = session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors())
            assert got.dtype == dtype and bool(got.isfinite().all())
            for node in (0, 3, 4):
                want = exact(torch.cat([ids, tree.token[tree.path(node)][None]], 1)).logits[0, -1]
                assert float((got[node].float() - want).abs().max()) < 0.15 * float(want.std()), (length, node)


# --- D5, N8: models that must not be moved; K3: rows of logits; O2: no limit given ---------------------------------------


class Int8(torch.nn.Module):
    """A linear layer of 8-bit weights, as a quantiser leaves it: its only parameter is no float."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantised(seed=1):
    """A Llama with 8-bit layers between its embedding and its head that says no to being moved or cast."""
    model = build("llama", seed=seed)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Int8(child))

    def refuse(*args, **kwargs):
        raise ValueError("a dispatched or quantised model cannot be moved")

    for name in ("to", "cuda", "cpu", "half", "float", "bfloat16", "double", "_apply"):
        setattr(model, name, refuse)
    return model


@pytest.mark.parametrize("fast", ["off", "cpu", "lean"])
def test_a_model_that_was_given_is_never_moved(tmp_path, fast):
    target, draft = quantised(), quantised()
    speed_up(target, fast)
    owner = TreeModel.of(target)
    assert owner.dtype == torch.float32 and owner.device.type == "cpu" and owner.lean is None
    want = reference(quantised(), prompt(6), 12)
    for guess in (draft, "ngram", target):
        assert torch.equal(turn(target, prompt(6), draft=guess, new=12).sequences, want)
    pair = Pair(target, draft, characters(), "int8")
    asked = [Prompt("a", "any", ["abcab"])]
    rows = compare(pair, asked, parse_policies("plain,linear:gamma=3"), max_new_tokens=8)["rows"]
    assert rows[1]["lossless"] and rows[1]["tokens_per_step"] > 3
    assert record(pair, asked, tmp_path / "t.parquet", sampling=Sampling(max_new_tokens=6))[0].new_tokens == 6


@pytest.mark.parametrize("more", [{}, dict(repetition_penalty=1.2), dict(rule="rrs", do_sample=True),
                                  dict(output_logits=True, return_dict_in_generate=True)], ids=str)  # fmt: skip
def test_logits_are_made_for_trees_and_never_for_the_prompt(more):
    target, draft, rows = build("llama"), build("llama"), []
    TreeModel.of(target), TreeModel.of(draft, "draft")
    for model in (target, draft):
        model.lm_head.register_forward_hook(lambda m, i, o: rows.append(o.shape[1]))
    got = turn(target, prompt(200), draft=draft, policy="uniform:depth=2,width=2", new=12, **more)
    assert max(rows) == 7 and len(rows) >= 8
    kept = [v for event in got.steps for v in vars(event).values() if torch.is_tensor(v)]
    assert kept == [] and all(not event.tree.laws for event in got.steps)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # transformers', of its own limit
def test_without_any_limit_it_is_transformers_own(llama, twin):
    want = llama.generate(prompt(5), **GREEDY)
    for ids, more in ((prompt(5), {}), (prompt(5), dict(max_length=9)), (prompt(5), dict(max_length=9, max_new_tokens=3)),
                      (prompt(5), dict(generation_config=T.GenerationConfig(max_new_tokens=7, pad_token_id=0)))):  # fmt: skip
        own = {k: v for k, v in GREEDY.items() if "generation_config" not in more}
        want = llama.generate(ids, **own, **more)
        got = treespec.generate(llama, twin, ids, policy="linear:gamma=9", **own, **more)
        assert torch.equal(got.sequences, want), more


# --- K2: compiled by the caller ------------------------------------------------------------------------------------------


def test_a_model_that_the_caller_compiled():
    """Trees of every size: a handful of graphs, then no more, and no failure."""
    torch._dynamo.reset()
    graphs = []

    def count(module, example):
        graphs.append(1)
        return module.forward

    target = torch.compile(build("llama"), backend=count, dynamic=True)
    turn(target, prompt(6), policy="threshold:tau=0.01,budget=5", new=30)
    first = len(graphs)
    got = turn(target, prompt(6), policy="threshold:tau=0.01,budget=12", new=60)
    assert torch.equal(got.sequences, reference(build("llama"), prompt(6), 60))
    assert len({event.nodes for event in got.steps}) > 3, "trees of several sizes"
    assert 0 < first <= 12 and len(graphs) - first <= 4
    torch._dynamo.reset()
