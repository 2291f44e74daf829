"""``benchmarks.rules`` on the toy pair: rows, intervals, refusals, interrupts."""

import json

import numpy as np
import pytest

from benchmarks import rules
from treespec.verify import RULES

PROMPTS = "".join(
    f'{{"id": "{name}", "category": "x", "turns": ["{text}"]}}\n'
    for name, text in (("a", "the cat"), ("b", "a dog"), ("c", "the tree"))
)


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "p.jsonl").write_text(PROMPTS)
    fixed = ["--target", "toy", "--draft", "model", "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "12"]
    return lambda *more: rules.main([*fixed, "--out", str(tmp_path / "r.json"), *more]), tmp_path


def test_rows_intervals_and_refusals(bench, capsys):
    run, folder = bench
    code = run(
        "--policies", "linear:gamma=2,bestfirst:budget=4", "--temperatures", "1.0", "--seeds", "2", "--limit", "2"
    )
    assert code == 0
    result = json.loads((folder / "r.json").read_text())
    assert result["finished"] and result["prompts"] == 2
    pairs = [(r["rule"], r["policy"]) for r in result["rows"]]
    assert pairs == [(r, "linear:gamma=2") for r in RULES] + [(r, "bestfirst:budget=4") for r in ("match", "coupled")]
    assert {r["rule"] for r in result["refused"]} == {"rrs", "hybrid", "block", "traversal"}
    for row in result["rows"]:
        assert row["tokens_per_step"] == pytest.approx(row["tokens"] / row["steps"], abs=1e-4)
        assert row["ci"][0] <= row["tokens_per_step"] <= row["ci"][1]
        assert row["rule"] != "match" or row["over_match"] == 1.0
    out = capsys.readouterr().out
    assert out == (folder / "r.md").read_text() and out.count("- refused: rule") == 4


def test_an_interrupt_keeps_the_prompts_that_are_done(bench, capsys, monkeypatch):
    run, folder = bench
    honest, calls = rules.Row.run, []

    def impatient(self, pair, name, *rest):
        calls.append(name)
        if name == "c":
            raise KeyboardInterrupt
        honest(self, pair, name, *rest)

    monkeypatch.setattr(rules.Row, "run", impatient)
    assert run("--rules", "match,rrs", "--temperatures", "0.8") == 130
    result = json.loads((folder / "r.json").read_text())
    assert result["prompts"] == 2 and not result["finished"] and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, words",
    [
        (("--rules", "magic"), "unknown acceptance rule 'magic'"),
        (("--temperatures", "0"), "above 0"),
        (("--temperatures", "hot"), "must be numbers"),
        (("--policies", "lineer"), "did you mean 'linear'"),
        (("--out", "/no/such/folder/r.json"), "no folder"),
    ],
)
def test_bad_input_is_one_sentence(bench, capsys, more, words):
    assert bench[0](*more) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1


def test_the_interval_covers_the_ratio_and_a_constant_gain_has_none():
    rng = np.random.default_rng(0)
    steps = rng.integers(10, 20, 30).astype(float)
    tokens = steps * rng.uniform(1, 3, 30)
    value, low, high = rules.interval([tokens, steps])
    assert low < value < high and value == pytest.approx(tokens.sum() / steps.sum())
    assert rules.interval([2 * tokens, steps, tokens, steps]) == pytest.approx((2, 2, 2))
