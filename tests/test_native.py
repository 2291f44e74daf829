"""The C kernel: products, layers, trees and texts are the model's own; without a compiler nothing is lost but speed."""

import pytest
import torch
from conftest import build
from torch.nn import functional as F

from treespec import generate, native
from treespec.cache import TreeCache, TreeLayer
from treespec.errors import OutOfMemoryError
from treespec.fast import slow_down, speed_up
from treespec.lean import LeanForward, NativeForward, why_not_native
from treespec.model import TreeModel
from treespec.native import NativeProduct, _interleaved

pytestmark = pytest.mark.skipif(native.kernel() is None, reason="no C compiler here")
LEAN = ["llama", "llama-one-kv-head", "llama3-rope", "qwen2", "qwen3"]


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    native.kernel.cache_clear()
    yield
    native.kernel.cache_clear()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 40])
@pytest.mark.parametrize("size", [(48, 40), (35, 21)])  # whole panels, and neither a panel nor a multiple of 8
def test_product_equals_linear(half, bias, rows, size):
    torch.manual_seed(rows)
    weight, b = torch.randn(size), torch.randn(size[0]) if bias else None
    if half:
        weight = weight.bfloat16().float()
    x, residual = torch.randn(1, rows, size[1]), torch.randn(1, rows, size[0])
    product = NativeProduct(weight, b)
    assert bool(product.struct.half) == half
    torch.testing.assert_close(product(x), F.linear(x, weight, b), rtol=0, atol=2e-5)
    torch.testing.assert_close(product.plus(x, residual), residual + F.linear(x, weight, b), rtol=0, atol=2e-5)


def test_gates_open_their_own_ups():
    gate, up = torch.arange(24.0)[:, None], 100 + torch.arange(24.0)[:, None]
    panels = _interleaved(gate, up).view(-1, 16)
    assert panels[1].tolist() == [*range(8, 16), *range(108, 116)]


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_equal_the_models(name, threads):
    model = build(name)
    assert why_not_native(model) is None
    fast = NativeForward(model)
    ids, at = torch.randint(2, 97, (1, 90)), torch.arange(90)[None]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            want = model(ids, output_hidden_states=True)
            cache = TreeCache(["full"] * 2)
            first = fast.hidden(ids[:, :70], at[:, :70], None, cache)  # many rows: blocks of lanes
            rest = fast.hidden(ids[:, 70:], at[:, 70:], None, cache)  # rows behind others; the cache has to grow
    finally:
        torch.set_num_threads(before)
    hidden = torch.cat([first, rest], 1)
    torch.testing.assert_close(hidden, want.hidden_states[-1], rtol=0, atol=2e-4)
    torch.testing.assert_close(fast.logits(hidden), want.logits, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("rows", [1, 3, 11, 17, 29, 64])  # every number of vectors of lanes
def test_any_mask_is_honoured(name, rows):
    model = build(name)
    fast, lean = NativeForward(model), LeanForward(model, pack=False)
    torch.manual_seed(rows)
    shown = torch.rand(rows, rows) < 0.4
    shown |= torch.eye(rows, dtype=torch.bool)
    shown = torch.cat([torch.ones(rows, 9, dtype=torch.bool), shown], 1)
    mask = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)[None, None]
    ids, at = torch.randint(2, 97, (1, 9 + rows)), torch.cat([torch.arange(9), torch.randint(9, 15, (rows,))])[None]
    out = []
    with torch.no_grad():
        for forward in (fast, lean):
            cache = TreeCache(["full"] * 2)
            forward.hidden(ids[:, :9], at[:, :9], None, cache)
            out.append(forward.hidden(ids[:, 9:], at[:, 9:], mask, cache))
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=2e-4)


def test_bfloat16_weights_are_kept_in_half_the_bytes_and_lose_nothing():
    model = build("llama", dtype=torch.bfloat16)
    fast = NativeForward(model)
    ids, at = torch.randint(2, 97, (1, 30)), torch.arange(30)[None]
    with torch.no_grad():
        got = fast.logits(fast.hidden(ids, at, None, None))
        want = build("llama", dtype=torch.bfloat16).float()(ids).logits  # the same numbers, computed in float32
    assert fast.head.struct.half
    torch.testing.assert_close(got, want, rtol=0, atol=5e-4)


def test_half_precision_text_differs_at_ties_only():
    model = build("llama", dtype=torch.bfloat16)
    ids = torch.tensor([[5, 9, 11, 20, 33, 40, 2]])
    assert speed_up(model, "cpu") == "lean forward, C kernel"
    plain = generate(model, None, ids, policy="plain", max_new_tokens=24, pad_token_id=0)
    tree = generate(model, "ngram", ids, policy="uniform:depth=2,width=2", max_new_tokens=24, pad_token_id=0)
    assert torch.equal(plain.sequences, tree.sequences), "inside it is float32, so trees change nothing"


def test_a_cache_serves_both_forwards():
    """A second turn may run slow where the first ran fast, in another dtype at that."""
    layer = TreeLayer(8)
    a = torch.randn(1, 2, 3, 4)
    layer.claim(3, a, a)[0][:, :, :3] = a
    keys, _ = layer.update(a[:, :, :1].bfloat16(), a[:, :, :1].bfloat16())
    assert keys.dtype == torch.bfloat16 and torch.equal(keys[:, :, :3], a.bfloat16())
    assert layer.claim(1, a, a)[0].dtype == torch.float32


def test_no_memory_is_said(monkeypatch):
    model = build("llama")
    speed_up(model, "cpu")
    monkeypatch.setattr(native.kernel(), "treespec_forward", lambda forward: 1)
    with pytest.raises(OutOfMemoryError, match="ran out of memory"):
        TreeModel(model).run(torch.tensor([[5]]), torch.tensor([[0]]), None, None, "all")


def test_without_a_compiler_products_are_packed(no_compiler):
    model = build("llama")
    assert why_not_native(model) == "there is no C compiler that can build the kernel"
    assert speed_up(model, "cpu") == "lean forward, packed products"
    slow_down(model)


def test_a_compiler_that_fails_leaves_nothing(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("TREESPEC_HOME", str(tmp_path / "home"))
    native.kernel.cache_clear()
    try:
        assert native.kernel() is None
        assert list((tmp_path / "home" / "kernels").iterdir()) == []
    finally:
        native.kernel.cache_clear()


def test_a_kernel_that_differs_is_not_used(monkeypatch):
    honest = native.NativeLayers.run
    monkeypatch.setattr(native.NativeLayers, "run", lambda *a: honest(*a) * torch.linspace(1, 1.3, 32))
    model = build("llama")
    assert speed_up(model, "cpu") == "lean forward, packed products"
    slow_down(model)
