"""The article's table: its strategies, a rival, and a bound that nobody passes."""

import itertools
import json

import numpy as np
import pytest
from test_cli import run

from treespec.cost import CostCurve, load_cost
from treespec.pairs import load_pair
from treespec.prompts import Prompt
from treespec.table import _cheapest, article_table
from treespec.trace import Caps, Sampling, Trace, record

pytestmark = pytest.mark.thorough

WORDS = ["the cat sat", "a dog ran on", "the tree", "mat under a", "dog sat on the mat", "a cat"]


@pytest.fixture(scope="module", autouse=True)
def few_rivals():
    """Half of the table's grid: every size of it is replayed in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treespec.table.SIZES", (4, 16))
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    prompts = [Prompt(f"p{i}", "x", [text]) for i, text in enumerate(WORDS)]
    record(
        load_pair("toy", "model"),
        prompts,
        path,
        caps=Caps(floor=1e-9, depth=8, width=12, nodes=400),
        sampling=Sampling(max_new_tokens=32),
    )
    return Trace.load(path)


@pytest.fixture(scope="module")
def rows(trace):
    return {r["strategy"]: r for r in article_table(trace, load_cost("article"))["rows"]}


def test_the_articles_rows_and_columns(rows):
    assert list(rows) == [
        "plain",
        "A linear",
        "B uniform 4×3",
        "C threshold",
        "D entropy + threshold",
        "best rival",
        "hindsight",
    ]
    plain, linear, uniform = (rows[k] for k in ("plain", "A linear", "B uniform 4×3"))
    assert plain["nodes"] == plain["tokens_per_step"] == plain["speedup"] == 1 and plain["verify_ms"] == pytest.approx(
        24.5
    )
    assert 5 < linear["nodes"] <= 6 and 26 < linear["verify_ms"] < 26.5 and linear["draft_ms"] < 2.8
    assert 80 < uniform["nodes"] <= 121 and not linear["extrapolated"]
    for row in rows.values():
        assert row["speedup_ci"][0] <= row["speedup"] <= row["speedup_ci"][1] and row["held_out"] > 0
        assert row["speedup"] == pytest.approx(24.5 * row["tokens_per_step"] / row["step_ms"])
    assert rows["best rival"]["policy"].split(":")[0] not in ("uniform", "threshold", "dynamic")


def test_nobody_passes_hindsight(trace, rows):
    assert all(row["speedup"] <= rows["hindsight"]["speedup"] + 1e-9 for row in rows.values())
    steep = CostCurve((1.0, 2.0, 9.0), (0.01, 0.04, 0.3), (1.0,), (0.001,), 0.002)
    others = {r["strategy"]: r for r in article_table(trace, steep)["rows"]}
    assert others["hindsight"]["speedup"] == pytest.approx(1.0) and others["hindsight"]["tokens_per_step"] == 1.0
    assert others["B uniform 4×3"]["extrapolated"] and not others["A linear"]["extrapolated"]


def test_the_cheapest_walk_is_the_cheapest():
    rng = np.random.default_rng(0)
    for _ in range(50):
        size = int(rng.integers(1, 8))
        reach, left = rng.integers(0, 4, size), np.arange(size, 0, -1)
        step = np.cumsum(rng.random(5))
        best = np.inf
        for lengths in itertools.product(range(4), repeat=size):
            at, seconds = 0, 0.0
            while at < size:
                k = lengths[at]
                if k > min(reach[at], left[at] - 1):
                    seconds = np.inf
                    break
                seconds, at = seconds + step[k], at + k + 1
            best = min(best, seconds)
        seconds, walk = _cheapest(reach, left, step)
        assert seconds == pytest.approx(best) == pytest.approx(step[walk].sum()) and (walk + 1).sum() == size


def test_context_and_batch_reach_the_cost(trace):
    one, many = (
        {r["strategy"]: r for r in article_table(trace, load_cost("h100:8b"), context=c, batch=b)["rows"]}
        for c, b in ((0, 1), (0, 64))
    )
    deep = article_table(trace, load_cost("h100:8b"), context=100_000)["rows"][0]
    assert deep["verify_ms"] > 1.5 * one["plain"]["verify_ms"]
    assert many["B uniform 4×3"]["speedup"] < 0.5 * one["B uniform 4×3"]["speedup"], (
        "a full batch has no room for trees"
    )


def test_the_command(capsys, monkeypatch, trace, tmp_path):
    code, out, _ = run(capsys, monkeypatch, "table", trace.path, "--cost", "a100x4:70b")
    assert code == 0 and "D entropy + threshold" in out and "hindsight" in out and "roofline, not measured" in out
    code, out, _ = run(capsys, monkeypatch, "table", trace.path, "--cost", "article", "--json")
    result = json.loads(out)
    assert code == 0 and len(result["rows"]) == 7 and result["positions"] == len(trace)
    for arguments, wrong in (
        ((str(tmp_path / "no.parquet"),), "no.parquet"),
        ((trace.path, "--cost", "z9:8b"), "unknown GPU"),
    ):
        code, out, err = run(capsys, monkeypatch, "table", *arguments)
        assert code == 2 and out == "" and wrong in err and len(err.strip().splitlines()) == 1
