"""Rooflines: the regimes they must show, the article's 24.5 and 58.4 ms, and one sentence for what they do not know."""

from dataclasses import replace

import pytest

from treespec.cost import CostModel, load_cost
from treespec.errors import InputError
from treespec.placement import Device
from treespec.placement.layout import Load
from treespec.placement.plan import divided
from treespec.roofline import load_roofline

GPUS = ("a100", "h100", "h200", "b200", "l4", "rtx4090")


@pytest.mark.parametrize("gpu", GPUS)
def test_one_token_waits_for_memory_and_many_for_arithmetic(gpu):
    line = replace(load_roofline(f"{gpu}:8b"), launch=0.0)
    share, peak = line.bandwidth_share * line.gpu.bandwidth, line.compute_share * line.gpu.flops
    weights, work = 2 * 8.03e9, 2 * 8.03e9
    assert line.verify(1, 0) == pytest.approx(weights / share)
    assert line.verify(4096, 0) == pytest.approx(4096 * work / peak)
    knee = peak / share  # rows at which arithmetic catches up with bytes of two each
    assert 40 < knee < 500 and line.verify(int(0.9 * knee), 0) == line.verify(1, 0) < line.verify(int(1.1 * knee), 0)


@pytest.mark.parametrize("name", ["a100x4:70b", "h100:8b+1b", "rtx4090:8b@int4", "l4:1b"])
def test_more_nodes_context_or_trees_never_cost_less(name):
    line = load_cost(name)
    assert isinstance(line, CostModel) and str(line) == name and not line.extrapolates(1)
    times = [line.verify(n, c, b) for b in (1, 4) for c in (0, 2048) for n in (1, 16, 64, 512)]
    for group in (times[:4], times[4:8], times[8:12], times[12:]):
        assert group == sorted(group)
    assert all(a <= b for a, b in zip(times[:4], times[4:8])) and all(a <= b for a, b in zip(times[:8], times[8:]))
    assert line.draft(0) == 0 < line.draft(1) <= line.draft(32)


def test_the_articles_single_token_is_explained_and_its_overload_only_without_overlap():
    line = load_roofline("a100x4:70b")
    one = line.verify(1, 2048)
    assert one == pytest.approx(24.5e-3, rel=0.05)
    assert one - replace(line, all_reduce=0.0).verify(1, 2048) == pytest.approx(2.4e-3), "two all-reduces a layer"
    assert line.verify(120, 2048) < 2 * one, "a roofline never gives the article's 2.4 times"
    unfused = replace(line, overlap=False, compute_share=0.4)
    assert unfused.verify(120, 2048) == pytest.approx(58.4e-3, rel=0.05)


def test_the_context_costs_its_keys_and_values():
    line = load_roofline("h100:8b")
    per_token = 2 * 32 * 8 * 128 * 2
    more = line.verify(1, 100_000, 2) - line.verify(1, 0, 2)
    assert more == pytest.approx(2 * 100_000 * per_token / (0.8 * 3.35e12))


def test_a_narrower_dtype_reads_fewer_bytes():
    line, narrow = (replace(load_roofline(n), launch=0.0) for n in ("h100:8b", "h100:8b@fp8"))
    assert narrow.verify(1, 0) == pytest.approx(line.verify(1, 0) / 2)


@pytest.mark.parametrize("name, wrong", [
    ("a100:70b", "use at least 2"), ("a200:8b", "unknown GPU"), ("a100:9b", "unknown model"),
    ("a100:8b+2b", "unknown draft"), ("a100:8b@fp3", "unknown dtype"), ("a100x0:8b", "1 to 64"), ("a100:", "expected GPU"),
])  # fmt: skip
def test_unknown_hardware_gets_one_sentence(name, wrong):
    with pytest.raises(InputError, match=wrong) as error:
        load_cost(name)
    assert "\n" not in str(error.value)


def test_what_fits_is_what_a_plan_says():
    """Weights alone would fit: the cache, the draft's and the reserve count too."""
    line = load_roofline("l4:8b")
    gpu, load = Device("cuda:0", line.gpu.memory), Load(2048, 1, 48)
    (row,) = divided(line.target.needs(2, 2), line.drafter.needs(2, 2), [gpu], load)
    assert row.cache == 2 * 32 * 8 * 128 * 2 * 2112 and row.weights == 2 * 8.03e9  # 2,097 rows in steps of 64
    assert row.draft == 2 * 1.24e9 + 2 * 16 * 8 * 64 * 2 * 2112
    most = int((row.free + row.cache + row.draft - 2 * 1.24e9) / (131_072 + 32_768) / 64) * 64 - 1
    assert not line.extrapolates(1, most) and line.extrapolates(1, most + 64) and line.extrapolates(1, most // 2, 3)
    assert replace(line, context=float(most)).context == most
    with pytest.raises(
        InputError, match=rf"{most + 64:,} cached tokens do not fit 1 × .*; use at least 2, or"
    ) as error:
        replace(line, context=float(most + 64))
    assert "\n" not in str(error.value)
    assert load_roofline("a100x4:70b").extrapolates(49, 2048, 8) is False


def test_every_number_has_its_source():
    for gpu in GPUS:
        line = load_roofline(f"{gpu}:1b")
        assert len(line.gpu.source) > 20 and len(line.target.source) > 10 and line.gpu.source in line.provenance
