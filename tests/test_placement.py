"""Plans from shapes alone: parameters as published, bytes as loaded, splits, verdicts, and what would make it fit."""

import json

import pytest
import torch
from conftest import SUPPORTED, build
from test_cli import treespec  # noqa: F401
from transformers import LlamaConfig

import treespec as package
from treespec.cache import TreeCache
from treespec.errors import InputError, UnsupportedModelError
from treespec.placement import Device, parse_devices, plan
from treespec.placement.configs import empty_model, load_config
from treespec.placement.devices import chosen_devices
from treespec.placement.layout import span
from treespec.placement.needs import _needs, model_needs
from treespec.placement.show import plan_html
from treespec.selfcheck import layer_kinds

pytestmark = pytest.mark.thorough

# counted from the checkpoints that Meta published
PUBLISHED = {
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-1b": 1_235_814_400,
}


@pytest.fixture(scope="module")
def article():
    return plan("llama-3.1-70b", "llama-3.2-3b", "4x80GB")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_parameters(name):
    assert model_needs(name, "bfloat16").parameters == PUBLISHED[name]


def loaded_bytes(model):
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_a_loaded_model(name, dtype, tmp_path):
    model = build(name, scale=1.0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    needs = model_needs(str(tmp_path), dtype)
    assert needs.parameters == sum(p.numel() for p in model.parameters())
    assert needs.weight_bytes == pytest.approx(loaded_bytes(loaded), rel=0.02)


@pytest.mark.parametrize("name", SUPPORTED)
def test_cache_bytes_are_those_of_the_engines_cache(name):
    model = build(name)
    config = model.config.get_text_config(decoder=True)
    cache = TreeCache(layer_kinds(config), 128)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 3, dtype=torch.long), position_ids=torch.arange(3)[None], cache=cache)
    assert _needs("x", model.config, empty_model(model.config), "float32").cache(100) == cache.nbytes


def test_quantised_weights_count_scales_and_leave_both_ends_wide():
    wide, eight, four = (model_needs("llama-3.1-8b", d) for d in ("bf16", "int8", "int4"))
    ends = 2 * 2 * 128256 * 4096  # embedding and output head stay in 16 bits
    inner = (wide.weight_bytes - ends) / 2
    assert eight.weight_bytes == pytest.approx(ends + inner, rel=0.01)
    assert four.weight_bytes == pytest.approx(ends + inner * 4.5 / 8, rel=0.01)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = load_config("llama-3.1-8b")
    config.quantization_config = gptq
    assert _needs("q", config, empty_model(config), "bf16").weight_bytes == pytest.approx(
        ends + inner * (4 + 20 / 128) / 8, rel=0.01
    )
    config.quantization_config = {"quant_method": "of_my_own"}
    with pytest.raises(InputError, match="of_my_own"):
        _needs("q", config, empty_model(config), "bf16")


def test_the_articles_setting_fits_in_sequence_with_the_draft_beside_the_head(article):
    assert article.fits and article.device_map["lm_head"] == 3 and article.draft_device == "cuda:3"
    assert sum(d.weights for d in article.devices) == pytest.approx(2 * PUBLISHED["llama-3.1-70b"], rel=1e-6)
    assert all(20e9 < d.free < d.device.memory for d in article.devices)
    weights = [d.weights for d in article.devices]
    assert max(weights) - min(weights) < 5e9  # three layers and the draft
    places = [article.device_map[f"model.layers.{i}"] for i in range(80)]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    assert article.draft.weight_bytes == pytest.approx(2 * PUBLISHED["llama-3.2-3b"], rel=1e-6)
    assert "fits on 4 GPUs" in article.verdict


def test_what_fits_on_one_gpu_stays_on_one_with_its_draft():
    found = plan("llama-3.1-8b", "llama-3.2-1b", "2x24GB")
    assert found.fits and set(found.device_map.values()) == {0} and found.draft_device == "cuda:0"


def test_what_does_not_is_spread_over_two():
    found = plan("llama-3.1-8b", "llama-3.2-1b", "2x16GB")
    assert found.fits and set(found.device_map.values()) == {0, 1}
    assert found.device_map["lm_head"] == 1 and found.draft_device == "cuda:1"


def test_a_longer_context_takes_cache_from_every_device(article):
    longer = plan("llama-3.1-70b", "llama-3.2-3b", "4x80GB", context=32768, batch=4)
    rows = 4 * (32768 + 64)  # 49 rows of a tree, rounded up to the cache's steps
    assert sum(d.cache for d in longer.devices) == rows * 2 * 80 * 8 * 128 * 2
    assert longer.devices[1].cache > 30 * article.devices[1].cache


def test_what_is_short_is_said_with_remedies_that_work():
    found = plan("llama-3.1-8b", "llama-3.2-1b", "16GB")
    assert not found.fits and "does not fit" in found.verdict
    more = Device("cuda:0", 16e9 + found.short_bytes * 1.01)
    assert plan("llama-3.1-8b", "llama-3.2-1b", [more]).fits
    assert not plan("llama-3.1-8b", "llama-3.2-1b", [Device("cuda:0", 16e9 + found.short_bytes * 0.9)]).fits
    assert found.devices[0].free < 0
    assert any(r.startswith("--dtype int8") for r in found.remedies)
    assert plan("llama-3.1-8b", "llama-3.2-1b", "16GB", dtype="int8").fits
    assert any(r.startswith("2 GPUs of 16 GB") for r in found.remedies)


@pytest.mark.thorough
def test_the_absurd_is_answered_too():
    found = plan("llama-3.1-405b", "llama-3.1-8b", "1x1GB")
    assert not found.fits and found.short_bytes > 800e9 and found.remedies == []
    assert "Nothing that was tried" in found.verdict


def test_contexts_that_fit_are_the_largest_that_do():
    found = plan("llama-3.1-8b", "ngram", "18.5GB", context=65536)
    (words,) = [r for r in found.remedies if r.startswith("--context")]
    most = int(words.split()[1])
    assert plan("llama-3.1-8b", "ngram", "18.5GB", context=most).fits
    assert not plan("llama-3.1-8b", "ngram", "18.5GB", context=most + 256).fits


def test_offload_counts_the_cache_where_it_is_computed():
    found = plan("llama-3.1-8b", "ngram", "10GB,cpu:64GB")
    gpu, cpu = found.devices
    assert found.fits and found.offloaded and cpu.parts and gpu.free > 0 and cpu.free > 0
    assert gpu.cache == found.load.cache(found.target) and cpu.cache == 0
    assert "slow" in found.verdict
    small = plan("llama-3.1-8b", "ngram", "10GB,cpu:4GB,disk")
    assert small.fits and set(small.device_map.values()) == {0, "cpu", "disk"}
    assert not plan("llama-3.1-8b", "ngram", "10GB,cpu:4GB").fits


def test_tensor_parallelism_divides_every_layer(article):
    found = plan("llama-3.1-70b", "llama-3.2-3b", "4x80GB", tensor_parallel=True)
    assert found.fits and found.device_map == {} and found.draft_device == "cuda:0"
    for row in found.devices:
        assert row.weights == pytest.approx(article.target.weight_bytes / 4, rel=0.01)
        assert row.cache == article.load.cache(article.target) / 4
    assert found.devices[0].draft > 6e9 and found.devices[1].draft == 0
    with pytest.raises(InputError, match=r"64 attention heads and 8 key-value heads .* among 3 .* 1, 2, 4, 8"):
        plan("llama-3.1-70b", "ngram", "3x80GB", tensor_parallel=True)


def test_tied_weights_lie_together_and_count_once():
    found = plan("llama-3.2-3b", "ngram", "2x5GB")
    assert found.fits and set(found.device_map.values()) == {0, 1}
    assert found.device_map["model.embed_tokens"] == found.device_map["lm_head"]
    assert sum(d.weights for d in found.devices) == pytest.approx(2 * PUBLISHED["llama-3.2-3b"], rel=1e-6)


@pytest.mark.parametrize("text, words", [
    ("0x80GB", "1 to 64"), ("65x80GB", "1 to 64"), ("4x", "no size"), ("v100", "unknown GPU 'v100'"), ("", "names no device"),
    ("4x-1GB", "are no devices"), ("80", "no size"), ("0GB", "above 0"), ("cpu:lots", "no size"), ("2x3x4GB", "no size"), ("2xa100x3", "are no devices"),
])  # fmt: skip
def test_devices_that_mean_nothing_are_refused(text, words):
    with pytest.raises(InputError, match=words):
        parse_devices(text)


def test_devices_are_read():
    four = parse_devices("4xa100")
    assert four == parse_devices("a100x4") and len(four) == 4 and four[3].name == "cuda:3" and four[0].memory == 80e9
    mixed = parse_devices("2x24GB, 1x80gb, cpu:64GiB, disk")
    assert [d.name for d in mixed] == ["cuda:0", "cuda:1", "cuda:2", "cpu", "disk"]
    assert mixed[2].memory == 80e9 and mixed[3].memory == 64 * 2**30 and mixed[4].memory == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_no_such_gpu_is_one_sentence():
    with pytest.raises(InputError, match=r"no device cuda:1 on this machine; there is cpu$"):
        chosen_devices("cuda:1")
    assert [d.name for d in chosen_devices("auto")] == ["cpu"]


@pytest.mark.parametrize("options, words", [
    (dict(context=0), "context"), (dict(batch=0), "batch"), (dict(budget=-1), "budget"), (dict(dtype="int3"), "unknown dtype"),
    (dict(context=2.5), "context"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        plan("llama-3.2-1b", "ngram", "1x80GB", **options)


def test_configs_that_are_no_language_model_are_refused(tmp_path):
    file = tmp_path / "config.json"
    for content, error, words in (
        ({"model_type": "no_such"}, InputError, "cannot read the config"),
        ({"model_type": "vit"}, UnsupportedModelError, "no causal language model"),
        ({}, InputError, "cannot read"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(error, match=words) as raised:
            plan(str(file), "ngram", "1x80GB")
        assert "\n" not in str(raised.value)
    file.write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        plan(str(file), "ngram", "1x80GB")


def test_pictures_escape_names_and_say_the_verdict(tmp_path):
    folder = tmp_path / "<b>bold"
    build("llama").save_pretrained(folder)
    found = plan(str(folder), "ngram", "1x1GB")
    html = plan_html(found)
    assert "<b>bold" not in html and "&lt;b&gt;bold" in html and "It fits" in html
    assert "layers 0–1" in str(found) and found._repr_html_() == html


def test_runs_of_layers_read_as_runs():
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in (0, 1, 2, 5)), "lm_head"]
    assert span(names) == "embed_tokens, layers 0–2, layers 5, lm_head"


def test_plan_on_the_command_line(treespec, tmp_path):  # noqa: F811
    LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    command = (
        "plan",
        "--target",
        str(tmp_path / "config.json"),
        "--draft",
        "ngram",
        "--gpus",
        "2x80GB",
        "--dtype",
        "bf16",
    )
    code, out, err = treespec(*command, "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and len(found["devices"]) == 2 and found["draft"]["weight_bytes"] == 0
    assert found["target"]["weight_bytes"] == pytest.approx(2 * found["target"]["parameters"], rel=0.01)
    code, out, err = treespec(*command)
    assert code == 0 and "It fits on cuda:0" in out and "assumed, not measured" in out.lower()
    code, out, err = treespec(*command[:-4], "--gpus", "4xfoo")
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1 and "unknown GPU 'foo'" in err


def test_plan_is_a_public_name():
    assert package.plan is plan


@pytest.mark.slow
def test_smollm2_is_planned_as_it_loads():
    pair = package.load_pair("smollm2", "lm")
    found = plan("smollm2", "lm", "cpu:8GB", dtype="float32")
    assert found.fits and found.target.parameters == sum(p.numel() for p in pair.target.parameters())
    assert found.target.weight_bytes == pytest.approx(loaded_bytes(pair.target), rel=0.02)
    assert found.draft.weight_bytes == pytest.approx(loaded_bytes(pair.draft), rel=0.02)
