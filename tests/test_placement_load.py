"""Loading that follows a map: the CPU and the disk stand in for GPUs, texts are those of a whole model."""

import gc
import glob
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as T
from conftest import build, prompt, reference
from test_api import characters
from torch.utils._python_dispatch import TorchDispatchMode

import treespec
from treespec import decode
from treespec.errors import InputError, NonFiniteLogitsError, OutOfMemoryError
from treespec.head import FeatureHead, HeadConfig, load_head
from treespec.pairs import load_model, load_pair
from treespec.placement import load, plan

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


def placed(split):
    return {part: split.get(part, "cpu") for part in PARTS}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("policy", ["linear:gamma=3", "uniform:depth=3,width=2", "bestfirst:budget=8"])
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
    own = offload_folders() - before  # more than one where another process loads at the same time
    del pair
    gc.collect()
    assert own and own - offload_folders()


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


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_narrow_dtypes_are_bitsandbytes_or_one_sentence(folder, dtype):
    pytest.importorskip("transformers")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"cannot load .*bitsandbytes"):
            load_pair(str(folder), "none", dtype)
        return
    assert load_pair(str(folder), "none", dtype).generate("Tree?", max_new_tokens=3).tokens


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


# --- one read a step ---------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts reads of single numbers off a tensor: on a GPU each would wait for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=False),
        dict(do_sample=False, rule="coupled"),
        dict(do_sample=True, rule="coupled", seed=3, top_k=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["plain", "linear:gamma=4", "uniform:depth=3,width=3", "bestfirst:budget=8"])
def test_one_read_a_step_gives_the_same_text(llama, stranger, monkeypatch, options, policy):
    run = lambda: treespec.generate(llama, stranger, prompt(7), policy=policy, max_new_tokens=24, **options)  # noqa: E731
    want = run()
    monkeypatch.setattr(decode, "reads_at_once", lambda device: True)
    got = run()
    assert torch.equal(got.sequences, want.sequences)
    assert [e.path for e in got.steps] == [e.path for e in want.steps]


def test_nothing_is_read_token_by_token(llama, twin, monkeypatch):
    monkeypatch.setattr(decode, "reads_at_once", lambda device: True)
    found = decode.Decoding._choices
    counts = []

    def counted(self, kept, logits):
        with Reads() as reads:
            choose = found(self, kept, logits)
            tokens = [choose(node, 0) for node in range(len(kept))]
        counts.append(reads.count)
        assert len(tokens) == len(kept)
        return choose

    monkeypatch.setattr(decode.Decoding, "_choices", counted)
    monkeypatch.setattr(decode.Decoding, "_scores", lambda *a: pytest.fail("a row was read by itself"))
    got = treespec.generate(llama, twin, prompt(7), policy="linear:gamma=4", do_sample=False, max_new_tokens=20)
    assert got.stats.tokens_per_step > 4 and counts and max(counts) == 0


def test_nan_is_named_where_it_is_read_at_once(twin, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(decode, "reads_at_once", lambda device: True)
    hook = lambda m, i, o: o * torch.nan if o.shape[1] > 1 else o  # noqa: E731
    treespec.generate(model, None, prompt(4), max_new_tokens=2)  # the self-check, before it breaks
    model.lm_head.register_forward_hook(hook)
    with pytest.raises(NonFiniteLogitsError, match="hold NaN"):
        treespec.generate(model, twin, prompt(4), policy="linear", do_sample=False, max_new_tokens=9)
