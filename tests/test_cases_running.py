"""Faults from other people's public reports, tried here as kinds: files, shapes, memory, threads, dashboards.

The table of ``docs/CASES.md`` says which is which; what an older module already held is tested there.
"""

import gguf
import numpy as np
import pytest
import torch
from conftest import build, prompt, reference
from test_api import characters

import treespec
from treespec.errors import InputError
from treespec.pairs import known_tokenizer, load_model, load_pair
from treespec.placement.needs import load_config

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
