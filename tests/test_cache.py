"""The preallocated cache: gathers in place, grows, counts its bytes, outlives inference mode."""

import pytest
import torch
from conftest import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from treespec.cache import GROWTH, TreeCache


def rows(count, start=0.0, heads=2, dim=4):
    """Rows that carry their own number."""
    return (start + torch.arange(count, dtype=torch.float32)).view(1, 1, count, 1).expand(1, heads, count, dim)


def numbers(layer):
    return layer.keys[0, 0, :, 0].tolist()


@given(st.integers(0, 20), st.integers(1, 30), st.data())
def test_keep_is_an_exact_gather(base, size, data):
    slots = sorted(data.draw(st.sets(st.integers(0, size - 1))))
    cache = TreeCache(["full", "sliding"], capacity=8)
    for i in range(2):
        cache.update(rows(base), rows(base), i)
        cache.update(rows(size, 100), rows(size, 200), i)
    cache.keep(base, slots)
    for layer in cache.layers:
        assert numbers(layer) == [*range(base), *(100 + s for s in slots)]
        assert layer.values[0, 0, base:, 0].tolist() == [200 + s for s in slots]
    assert cache.length == base + len(slots) == cache.get_seq_length()


@pytest.mark.parametrize("unlike", ["none", "heads", "dtype", "values", "grown", "cast"])
def test_layers_that_are_not_alike_keep_their_own_rows(unlike):
    """Layers share one buffer while they are alike; whatever breaks that, each keeps its own path."""
    cache = TreeCache(["full"] * 3, capacity=64)
    for i in range(3):
        keys = rows(5, heads=3 if i == 1 and unlike == "heads" else 2)
        values = rows(5, 50, dim=8) if i == 1 and unlike == "values" else rows(5, 50)
        cache.update(keys.half() if i == 1 and unlike == "dtype" else keys, values, i)
    shared = cache._shelf._buffer is not None
    assert shared == (unlike in ("none", "grown", "cast"))
    if unlike == "grown":
        cache.update(rows(70, 5), rows(70, 55), 1)
        cache.layers[1].length = 5
    if unlike == "cast":
        cache.layers[2].claim(0, rows(0).double(), rows(0).double())
    cache.keep(1, [1, 3])
    for layer in cache.layers:
        assert numbers(layer) == [0, 2, 4]
        assert layer.values[0, 0, :, 0].tolist() == [50, 52, 54]


def test_layers_that_hold_nothing_are_left_alone():
    """Models that share keys between layers never write to some of them."""
    for written in ([1], [0, 2], []):
        cache = TreeCache(["full"] * 3)
        for i in written:
            cache.update(rows(5), rows(5), i)
        cache.keep(1, [1, 3])
        assert [numbers(cache.layers[i]) for i in written] == [[0, 2, 4]] * len(written)


def test_growing_keeps_what_was_there():
    cache = TreeCache(["full"] * 2, capacity=4)
    for start in range(0, 300, 50):
        for i in range(2):
            cache.update(rows(50, start), rows(50, start), i)
    assert numbers(cache.layers[0]) == numbers(cache.layers[1]) == list(range(300))


def test_rows_in_place_are_not_moved():
    cache = TreeCache(["full"])
    cache.update(rows(10), rows(10), 0)
    before = cache.layers[0].keys.data_ptr()
    cache.keep(4, [0, 1, 2])  # a chain accepted from its start
    assert numbers(cache.layers[0]) == list(range(7)) and cache.layers[0].keys.data_ptr() == before


def test_bytes_are_counted():
    cache = TreeCache(["full"], capacity=1)
    assert cache.nbytes == 0  # nothing is allocated before the layer shows its shape
    cache.update(rows(1), rows(1), 0)
    assert cache.nbytes == 2 * 2 * GROWTH * 4 * 4  # keys and values, heads, rows, dim, bytes


def test_no_concatenation_per_step():
    cache = TreeCache(["full"], capacity=200)
    cache.update(rows(100), rows(100), 0)
    where = cache.layers[0].keys.data_ptr()
    for _ in range(20):
        keys, _ = cache.update(rows(1), rows(1), 0)
        assert keys.data_ptr() == where


def test_crop_follows_transformers_signs():
    cache = TreeCache(["full"])
    cache.update(rows(10), rows(10), 0)
    cache.crop(0)
    assert cache.length == 10
    cache.crop(-3)
    assert cache.length == 7
    with pytest.raises(ValueError, match="minus the number"):
        cache.layers[0].crop(2)
    cache.crop(-50)
    assert cache.length == 0


def test_buffers_born_in_inference_mode_can_be_written_later():
    cache = TreeCache(["full"])
    with torch.inference_mode():
        cache.update(rows(5), rows(5), 0)
    with torch.no_grad():
        cache.update(rows(3, 50), rows(3, 50), 0)
        cache.keep(5, [0, 2])
    assert numbers(cache.layers[0]) == [0, 1, 2, 3, 4, 50, 52]


def test_transformers_can_generate_with_it():
    model, ids = build("llama"), prompt(7)
    want = model.generate(
        ids, do_sample=False, max_new_tokens=10, pad_token_id=0, cache=DynamicCache(config=model.config)
    )
    got = model.generate(ids, do_sample=False, max_new_tokens=10, pad_token_id=0, cache=TreeCache(["full"] * 2))
    assert torch.equal(want, got)
