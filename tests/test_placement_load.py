"""Loading that follows a map: the CPU and the disk stand in for GPUs, texts are those of a whole model."""

import gc
import glob
import importlib.util
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from conftest import build, prompt, reference
from test_api import characters

import treespec
from treespec.errors import InputError, OutOfMemoryError
from treespec.head import FeatureHead, HeadConfig, load_head
from treespec.pairs import load_model, load_pair
from treespec.placement import load, parse_devices, plan
from treespec.placement.load import find_places
from treespec.placement.needs import model_needs

pytestmark = pytest.mark.thorough

LAYERS = 4
PARTS = [
    "model.embed_tokens",
    *(f"model.layers.{i}" for i in range(LAYERS)),
    "model.norm",
    "model.rotary_emb",
    "lm_head",
]
SPLITS = {
    "all on the cpu": {},
    "a layer on the disk": {"model.layers.1": "disk"},
    "both ends on the disk": {"model.embed_tokens": "disk", "lm_head": "disk"},
    "most on the disk": {f"model.layers.{i}": "disk" for i in range(1, LAYERS)} | {"model.norm": "disk"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    build("llama", num_hidden_layers=LAYERS, tie_word_embeddings=request.param).save_pretrained(where)
    characters().save_pretrained(where)
    return where


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """Where offloaded weights go: processes beside this one have folders of their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def placed(split):
    return {part: split.get(part, "cpu") for part in PARTS}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("policy", ["uniform:depth=3,width=2", "bestfirst:budget=8"])
def test_texts_are_those_of_the_whole_model(folder, split, policy):
    whole = load_model(str(folder), "float32")[0]
    pair = load_pair(str(folder), "self", device=placed(SPLITS[split]))
    for options in (dict(do_sample=False), dict(do_sample=True, rule="coupled", seed=5)):
        got = treespec.generate(pair.target, pair.draft, prompt(6), policy=policy, max_new_tokens=16, **options)
        want = treespec.generate(whole, None, prompt(6), policy="plain", max_new_tokens=16, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert got.stats.tokens_per_step > 1.5 or options["do_sample"]
    assert torch.equal(
        treespec.generate(
            pair.target, pair.draft, prompt(6), policy=policy, do_sample=False, max_new_tokens=16
        ).sequences,
        reference(whole, prompt(6), 16),
    )


def test_a_plan_is_followed(folder):
    found = plan(str(folder), "self", "cpu:8GB", dtype="float32")
    assert found.fits and found.draft_device == "cpu"
    pair = load_pair(str(folder), "self", device=found)
    assert {p.device.type for p in pair.target.parameters()} == {"cpu"}
    assert (
        pair.generate("Tree?", policy="linear", max_new_tokens=9).tokens
        == load_pair(str(folder), "none").generate("Tree?", max_new_tokens=9).tokens
    )


def write_gguf(path):
    """A small Llama of random weights, with a tokenizer of single characters."""
    gguf = pytest.importorskip("gguf")
    draws = np.random.default_rng(0)
    tokens = [*map(chr, range(33, 127)), "ab", "<s>", "</s>"]
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(256)
    out.add_embedding_length(32)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(48)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(8)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    out.add_token_merges(["a b"])
    out.add_bos_token_id(len(tokens) - 2)
    out.add_eos_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    for i in range(LAYERS):
        own = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "attn_norm": (32,),
               "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48), "ffn_norm": (32,)}  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        numbers = np.ones(shape) if len(shape) == 1 else 0.5 * draws.standard_normal(shape)
        out.add_tensor(f"{name}.weight", numbers.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_a_gguf_file_is_planned_and_placed_like_any_other_target(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    found = plan(str(file), "self", "cpu:8GB", dtype="float32")
    whole = load_pair(str(file), "none")
    assert found.target.parameters == sum(p.numel() for p in whole.target.parameters())
    want = reference(whole.target, prompt(6), 12, eos_token_id=None)
    for device in (found, placed({})):  # unpacked weights cannot be left on the disk
        pair = load_pair(str(file), "self", device=device)
        got = treespec.generate(
            pair.target, pair.draft, prompt(6), policy="linear", do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        assert torch.equal(got.sequences, want) and got.stats.tokens_per_step > 2


def test_a_plan_that_does_not_fit_is_not_followed(folder):
    found = plan(str(folder), "none", "cpu:20KB", dtype="float32")
    assert not found.fits
    with pytest.raises(InputError, match="does not fit"):
        load_pair(str(folder), "none", device=found)


def test_split_tied_weights_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    build("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True).save_pretrained(tmp_path)
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match=r"embed_tokens on cpu and lm_head on disk, but they are one tied weight"):
        load_pair(str(tmp_path), "none", device=placed({"lm_head": "disk"}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
@pytest.mark.parametrize("where", ["cuda:0", 3])
def test_no_such_gpu_is_one_sentence(folder, where):
    with pytest.raises(InputError, match=r"this machine has no GPU") as error:
        load_pair(str(folder), "none", device=placed({}) | {"model.layers.2": where})
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="no device cuda:0 on this machine"):
        load_pair(str(folder), "none", device="cuda:0")


def offload_folders():
    return set(glob.glob(str(Path(tempfile.gettempdir()) / "treespec-offload-*")))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("boom"), OSError("gone")])
def test_interrupted_loads_leave_nothing(folder, monkeypatch, error):
    before = offload_folders()

    def half(*args, offload_folder=None, **kwargs):
        (Path(offload_folder) / "half.dat").write_bytes(b"x")
        raise error

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", half)
    with pytest.raises((KeyboardInterrupt, InputError)):
        load_pair(str(folder), "none", device=placed({"model.layers.1": "disk"}))
    assert offload_folders() == before


def test_what_was_offloaded_goes_with_the_model(folder):
    gc.collect()  # models of other tests
    before = offload_folders()
    pair = load_pair(str(folder), "none", device=placed({"model.layers.1": "disk"}))
    own = offload_folders() - before
    del pair
    gc.collect()
    assert len(own) == 1 and not own & offload_folders()


def test_a_load_that_breaks_in_the_middle_keeps_no_memory(folder, tmp_path):
    """The weights' file is cut short: by then the model has been made and part of it filled."""
    shutil.copytree(folder, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])

    def alive():
        """Models with weights; a plan remembers an empty one."""
        models = [o for o in gc.get_objects() if issubclass(type(o), T.LlamaForCausalLM)]
        return sum(any(not p.is_meta for p in model.parameters()) for model in models)

    gc.collect()
    before, folders = alive(), offload_folders()
    refused = 0
    for split in SPLITS.values():
        try:  # pytest.raises would keep the last error, and its frames
            load_pair(str(tmp_path / "cut"), "none", device=placed(split))
        except InputError as error:
            refused += "cannot load" in str(error)
    assert refused == len(SPLITS)
    gc.collect()
    assert alive() == before and offload_folders() == folders


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
])  # fmt: skip
def test_out_of_memory_while_loading_says_what_to_lower(folder, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(OutOfMemoryError, match=r"out of memory while loading .* on cpu.* narrower dtype"):
        load_pair(str(folder), "none")


@pytest.mark.parametrize("config", [
    T.BitsAndBytesConfig(load_in_4bit=True), T.GPTQConfig(bits=4), T.AwqConfig(bits=4), {"quant_method": "torchao", "quant_type": "int8"},
], ids=["bitsandbytes", "gptq", "awq", "torchao"])  # fmt: skip
def test_quantisation_configs_are_passed_through(folder, monkeypatch, config):
    seen = {}

    def caught(*args, **kwargs):
        seen.update(kwargs)
        raise OSError("enough")

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", caught)
    with pytest.raises(InputError, match="enough"):
        load_pair(str(folder), "none", "bfloat16", quantization=config)
    assert seen["quantization_config"] is config and seen["dtype"] == torch.bfloat16


QUANTISED = {
    "bitsandbytes": lambda: T.BitsAndBytesConfig(load_in_4bit=True), "gptqmodel": lambda: T.GPTQConfig(bits=4, dataset="c4"),
    "torchao": lambda: {"quant_method": "torchao", "quant_type": "int8"},
}  # fmt: skip


@pytest.mark.parametrize("library", QUANTISED)
def test_a_missing_library_is_named_with_what_to_do(folder, library):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is here")
    words = rf"{library}|optimum"
    if library == "gptqmodel" and importlib.util.find_spec("optimum"):
        words = "GPU is required"
    with pytest.raises(InputError, match=words) as error:
        load_pair(str(folder), "none", "bfloat16", quantization=QUANTISED[library]())
    assert "\n" not in str(error.value) and "Give 'smollm2'" not in str(error.value)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_narrow_dtypes_are_bitsandbytes_or_one_sentence(folder, dtype):
    if importlib.util.find_spec("bitsandbytes"):
        assert load_pair(str(folder), "none", dtype).generate("Tree?", max_new_tokens=3).tokens
        return
    with pytest.raises(InputError, match=r"cannot load .*bitsandbytes.*Install it"):
        load_pair(str(folder), "none", dtype)


@pytest.mark.parametrize("config, bits", [
    (T.BitsAndBytesConfig(load_in_4bit=True), 4.5), (T.BitsAndBytesConfig(load_in_8bit=True), 8), (T.GPTQConfig(bits=4, dataset="c4"), 4.16),
    (T.AwqConfig(bits=4, group_size=64), 4.31), ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 8),
], ids=["4bit", "8bit", "gptq", "awq", "torchao"])  # fmt: skip
def test_where_a_quantised_target_goes_counts_its_quantisation(monkeypatch, config, bits):
    """An 8B in 16 bits would not fit these devices."""
    monkeypatch.setattr(load, "chosen_devices", lambda names: parse_devices("14GB"))
    with pytest.raises(InputError, match="does not fit"):
        find_places("llama-3.1-8b", "none", "bfloat16", "auto")
    places, _ = find_places("llama-3.1-8b", "none", "bfloat16", "auto", config)
    assert set(places.values()) == {0}
    ends = 2 * 2 * 128256 * 4096
    inner = (8_030_261_248 * 2 - ends) / 2
    assert model_needs("llama-3.1-8b", "bf16", config).weight_bytes == pytest.approx(ends + inner * bits / 8, rel=0.01)


def test_mixed_dtypes_are_one_sentence():
    model = build("llama")
    model.model.layers[1].to(torch.bfloat16)
    with pytest.raises(
        treespec.TreespecError, match="weights are of bfloat16 and float32; load it with one dtype"
    ) as error:
        treespec.generate(model, None, prompt(5), max_new_tokens=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["both ends on the disk", "a layer on the disk"])
def test_a_feature_head_takes_its_rows_from_wherever_they_are(folder, tmp_path, split):
    from safetensors.torch import save_file

    from treespec.files import write_json

    whole = load_model(str(folder), "float32")[0]
    config = HeadConfig.like(whole, "x", 40)
    torch.manual_seed(0)
    head = FeatureHead(config, whole.get_input_embeddings().weight, whole.get_output_embeddings().weight,
                       torch.arange(40), torch.ones(32))  # fmt: skip
    extra = {"token_of": torch.arange(40, dtype=torch.int32), "spread": torch.ones(32)}
    save_file({**{k: v.contiguous() for k, v in head.state_dict().items()}, **extra}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": "treespec_head", **vars(config)})
    pair = load_pair(str(folder), str(tmp_path), device=placed(SPLITS[split]))
    near = load_head(tmp_path, whole)
    assert torch.equal(pair.draft.output, near.output) and torch.equal(pair.draft.embedding, near.embedding)
    got = treespec.generate(pair.target, pair.draft, prompt(6), policy="linear", do_sample=False, max_new_tokens=12)
    assert torch.equal(got.sequences, reference(whole, prompt(6), 12))
