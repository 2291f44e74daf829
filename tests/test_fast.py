"""Packed products and the lean forward: same logits, same text, undone without a trace."""

import functools

import pytest
import torch
from conftest import SUPPORTED, build

from treespec import generate
from treespec.cache import TreeCache
from treespec.errors import InputError
from treespec.fast import slow_down, speed_up
from treespec.lean import LeanForward, lean_forward, use_lean, why_not_lean
from treespec.model import TreeModel
from treespec.packed import Packed, PackedLinear, Plain, can_pack, pack_linears, unpack_linears

LEAN = ["llama", "llama-one-kv-head", "llama3-rope", "qwen2", "qwen3"]


HALF = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="no bf16 kernel here"),
)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
def test_packed_product_equals_linear(dtype, bias, rows):
    torch.manual_seed(0)
    weight, b = torch.randn(24, 40, dtype=dtype), torch.randn(24, dtype=dtype) if bias else None
    x, residual = torch.randn(2, rows, 40, dtype=dtype), torch.randn(2, rows, 24, dtype=dtype)
    assert can_pack(weight)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    packed, plain = Packed(weight, b), Plain(weight, b)
    torch.testing.assert_close(packed(x), plain(x), rtol=0, atol=tolerance)
    torch.testing.assert_close(packed.plus(x, residual), plain.plus(x, residual), rtol=0, atol=tolerance)


def test_what_cannot_be_packed():
    assert not can_pack(torch.zeros(3, 4, dtype=torch.float16))
    assert not can_pack(torch.zeros(3, 4, device="meta"))
    assert not can_pack(torch.zeros(3))


def test_packing_is_undone():
    model = build("gpt_neox")
    before = {name: type(m) for name, m in model.named_modules()}
    weights = {n: p.data_ptr() for n, p in model.named_parameters()}
    ids = torch.tensor([[5, 9, 11, 20, 33]])
    with torch.no_grad():
        want = model(ids).logits
        assert pack_linears(model) > 4
        torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-4)
        assert unpack_linears(model) > 4
        assert torch.equal(model(ids).logits, want)
    assert before == {name: type(m) for name, m in model.named_modules()}
    assert weights == {n: p.data_ptr() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("pack", [False, True])
def test_lean_logits_equal_the_models(name, pack):
    model = build(name)
    assert why_not_lean(model) is None
    lean = LeanForward(model, pack=pack)
    ids = torch.tensor([[5, 9, 11, 20, 33, 2, 7]])
    at = torch.arange(7)[None]
    with torch.no_grad():
        want = model(ids, output_hidden_states=True)
        hidden = lean.hidden(ids, at, None, None)
        torch.testing.assert_close(hidden, want.hidden_states[-1], rtol=0, atol=1e-4)
        torch.testing.assert_close(lean.logits(hidden), want.logits, rtol=0, atol=2e-4)
        cache = TreeCache(["full"] * 2)
        first = lean.hidden(ids[:, :3], at[:, :3], None, cache)
        rest = lean.hidden(ids[:, 3:], at[:, 3:], None, cache)
        torch.testing.assert_close(torch.cat([first, rest], 1), hidden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
@pytest.mark.parametrize("how", ["cpu", "cpu without the kernel", "lean"])
def test_fast_text_is_the_models_own(name, how, monkeypatch):
    if how == "cpu without the kernel":
        monkeypatch.setattr("treespec.lean.kernel", lambda: None)
        how = "cpu"
    model = build(name)
    ids = torch.tensor([[5, 9, 11, 20, 33, 40, 2]])
    want = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    said = speed_up(model, how)
    assert ("lean forward" in said and "no lean" not in said) == (name in LEAN or name == "llama-dynamic-16")
    for policy in ("plain", "uniform:depth=2,width=2", "dynamic:tau=0.01,high=9"):
        got = generate(
            model, None if policy == "plain" else "ngram", ids, policy=policy, max_new_tokens=24, pad_token_id=0
        )
        assert torch.equal(got.sequences, want), (policy, said)
    slow_down(model)
    assert lean_forward(model) is None and not any(isinstance(m, PackedLinear) for m in model.modules())
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0), want)


def test_a_lean_forward_that_differs_is_not_used(monkeypatch):
    model = build("llama")
    honest = LeanForward._attention
    monkeypatch.setattr(LeanForward, "_attention", lambda *a: honest(*a) * 1.1)
    said = speed_up(model, "lean")
    assert said == "transformers' own forward (no lean forward: its logits differ)"
    assert lean_forward(model) is None
    monkeypatch.setattr("treespec.lean.kernel", lambda: None)
    assert speed_up(model, "cpu").startswith("packed linear layers")
    slow_down(model)


@pytest.mark.parametrize("change", ["cast", "weights"])
def test_a_lean_forward_is_dropped_when_the_model_changes(change):
    model = build("llama")
    use_lean(model, LeanForward(model))
    assert TreeModel.of(model).lean is not None
    model.to(torch.bfloat16) if change == "cast" else model.load_state_dict(build("llama", seed=2).state_dict())
    assert TreeModel.of(model).lean is None


def test_packed_layers_see_new_weights_and_other_dtypes():
    model = build("gpt_neox")
    ids = torch.tensor([[5, 9, 11]])
    pack_linears(model)
    with torch.no_grad():
        for changed in (lambda: model.load_state_dict(build("gpt_neox", seed=2).state_dict()), model.double):
            changed()
            other = build("gpt_neox", seed=2).to(next(model.parameters()).dtype)
            torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral-window-8", "gemma2-window-8", "gpt2", "mixtral"])
def test_other_shapes_have_no_lean_forward(name):
    assert why_not_lean(build(name)) is not None


def test_unknown_way_and_wrong_device():
    model = build("llama")
    with pytest.raises(InputError, match="unknown way"):
        speed_up(model, "warp")
    with pytest.raises(InputError, match="fast='cpu' is for models on the CPU"):
        speed_up(model.to("meta"), "cpu")


def test_half_precision_that_cannot_be_packed_is_lean_all_the_same(monkeypatch):
    monkeypatch.setattr("treespec.lean.kernel", lambda: None)
    said = speed_up(build("llama", dtype=torch.float16), "cpu")
    assert said == "lean forward"


@pytest.mark.thorough
def test_compiled_text_is_the_models_own_and_tree_sizes_do_not_recompile():
    """Graphs as torch.compile captures them, run by its eager backend: no C++ compiler, no minute of waiting."""
    from torch._dynamo.utils import counters

    model = build("llama", num_hidden_layers=1)
    ids = torch.tensor([[5, 9, 11, 20, 33, 40, 2]])
    want = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    model.compile = functools.partial(model.compile, backend="eager")
    counters.clear()
    assert speed_up(model, "compile") == "torch.compile"
    for policy in ("plain", "bestfirst:budget=12", "uniform:depth=2,width=2"):
        draft = None if policy == "plain" else "ngram"
        got = generate(model, draft, ids, policy=policy, max_new_tokens=40, pad_token_id=0)
        assert torch.equal(got.sequences, want)
    assert counters["stats"]["unique_graphs"] <= 4, "the prompt, one token, several tokens"
    slow_down(model)
    assert model._compiled_call_impl is None
    torch._dynamo.reset()


def test_packed_layer_keeps_training_mode_and_bias():
    layer = PackedLinear.around(torch.nn.Linear(4, 3).eval())
    assert not layer.training and not layer.plain().training
    assert layer.plain().bias is layer.bias
