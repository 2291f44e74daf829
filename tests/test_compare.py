"""The comparison: interleaving, sums, ratios, intervals, and that a false text is seen."""

import json

import numpy as np
import pytest

from treespec import compare as module
from treespec.compare import compare
from treespec.errors import InputError
from treespec.intervals import ratio_interval
from treespec.pairs import load_pair
from treespec.policies import parse_policies
from treespec.prompts import Prompt

PROMPTS = [Prompt("a", "x", ["the cat sat"]), Prompt("b", "x", ["a dog ran on"]), Prompt("c", "y", ["the tree"])]
KEYS = {
    "rule",
    "policy",
    "parameters",
    "nodes",
    "verify_ms",
    "draft_ms",
    "overhead_ms",
    "tokens_per_step",
    "tokens_per_s",
    "speedup",
    "speedup_ci",
    "lossless",
}


def test_rows_and_what_they_add_up_to():
    result = compare(
        load_pair("toy", "model"), PROMPTS, parse_policies("linear:gamma=3,uniform:depth=2,width=2"), max_new_tokens=20
    )
    plain, linear, uniform = result["rows"]
    assert [r["policy"] for r in result["rows"]] == ["plain", "linear:gamma=3", "uniform:depth=2,width=2"]
    assert all(set(r) == KEYS and r["lossless"] is True for r in result["rows"])
    assert plain["nodes"] == plain["tokens_per_step"] == plain["speedup"] == 1.0 and plain["draft_ms"] == 0
    assert 3 < linear["nodes"] <= 4 and 5 < uniform["nodes"] <= 7
    assert all(lo <= r["speedup"] <= hi for r in result["rows"] for lo, hi in [r["speedup_ci"]])
    assert 1 <= linear["tokens_per_step"] <= 4


def test_all_policies_run_and_give_the_same_text():
    rows = compare(load_pair("toy", "model"), PROMPTS[:2], parse_policies("all"), max_new_tokens=16)["rows"]
    assert len(rows) == 11 and rows[0]["policy"] == "plain" and all(r["lossless"] for r in rows)
    assert all(r["nodes"] > 1.5 for r in rows if r["policy"] not in ("plain", "throughput")), "trees were drafted"
    json.dumps(rows)  # a curve or a calibration among the parameters must not get in the way


def test_sampling_stays_comparable():
    result = compare(
        load_pair("toy", "model"),
        PROMPTS,
        parse_policies("plain,uniform:depth=2,width=2"),
        max_new_tokens=20,
        temperature=1.0,
    )
    assert all(r["lossless"] for r in result["rows"])


def test_order_rotates_and_every_policy_sees_every_prompt_in_every_round():
    order = [(t, p.id) for t, p in module._schedule(["A", "B", "C"], PROMPTS, 2)]
    assert len(order) == len(set(order[:9])) * 2 == 18 and sorted(order[:9]) == sorted(order[9:])
    assert [t for t, _ in order[::3]] == ["A", "B", "C"] * 2, "each policy goes first equally often"


def test_a_text_that_differs_from_plain_is_reported(monkeypatch):
    honest = module.generate

    def dishonest(target, draft, inputs, policy, **options):
        result = honest(target, draft, inputs, policy=policy, **options)
        if policy.name == "linear":
            result.sequences = result.sequences.clone()
            result.sequences[0, -1] = (result.sequences[0, -1] + 1) % 12
        return result

    monkeypatch.setattr(module, "generate", dishonest)
    rows = compare(load_pair("toy", "model"), PROMPTS, parse_policies("linear"), max_new_tokens=8)["rows"]
    assert [r["lossless"] for r in rows] == [True, False]


def test_the_interval_covers_the_ratio_and_shrinks_with_agreement():
    rng = np.random.default_rng(0)
    base = rng.uniform(1, 2, 40)
    tight, loose = base / 2, base / rng.uniform(1, 4, 40)
    assert ratio_interval(base, tight, 0) == pytest.approx((2, 2))
    low, high = ratio_interval(base, loose, 0)
    assert low < base.sum() / loose.sum() < high and ratio_interval(base, loose, 0) == (low, high)
    assert ratio_interval(base[:1], loose[:1], 0)[0] == ratio_interval(base[:1], loose[:1], 0)[1]


def test_progress_is_told_before_every_generation():
    seen = []
    compare(
        load_pair("toy"),
        PROMPTS[:2],
        parse_policies("plain,linear"),
        max_new_tokens=4,
        rounds=2,
        progress=lambda *a: seen.append(a),
    )
    assert (
        [s[0] for s in seen] == list(range(9))
        and all(s[1] == 8 for s in seen)
        and "linear on a" in [s[2] for s in seen]
    )


def test_no_rounds_no_comparison():
    with pytest.raises(InputError, match="rounds"):
        compare(load_pair("toy"), PROMPTS, parse_policies("plain"), rounds=0)


def test_rules_with_policies_and_the_pairs_that_are_refused(capsys):
    result = compare(
        load_pair("toy", "model"),
        PROMPTS,
        parse_policies("linear:gamma=2,bestfirst:budget=4,uniform:depth=1,width=2"),
        rules=["match", "rrs", "block"],
        max_new_tokens=12,
        temperature=0.8,
    )
    ran = [(r["rule"], r["policy"]) for r in result["rows"]]
    assert ran[0] == ("coupled", "plain") and result["rows"][0]["lossless"] is True
    assert ran[1:] == [
        ("match", "linear:gamma=2"),
        ("match", "bestfirst:budget=4"),
        ("match", "uniform:depth=1,width=2"),
        ("rrs", "linear:gamma=2"),
        ("rrs", "uniform:depth=1,width=2"),
        ("block", "linear:gamma=2"),
    ]
    assert all(r["lossless"] is None and r["tokens_per_step"] > 1 for r in result["rows"][1:])
    refused = {(r["rule"], r["policy"]): r["reason"] for r in result["refused"]}
    assert set(refused) == {(r, "bestfirst:budget=4") for r in ("rrs", "block")} | {
        ("block", "uniform:depth=1,width=2")
    }
    assert "looks at the children" in refused["rrs", "bestfirst:budget=4"]
    module.print_table(result)
    out = capsys.readouterr().out
    assert out.count("refused: rule") == 3 and "traversal" in out and "coupled repeats" in out


def test_greedy_rules_are_one_and_comparable():
    rules = ["match", "traversal"]
    rows = compare(load_pair("toy", "model"), PROMPTS, parse_policies("linear"), rules=rules, max_new_tokens=8)["rows"]
    assert [r["lossless"] for r in rows] == [True] * 3 and rows[1]["tokens_per_step"] == rows[2]["tokens_per_step"]


@pytest.mark.parametrize("rules", [["magic"], []])
def test_unknown_rules(rules):
    with pytest.raises(InputError, match="unknown acceptance rule"):
        compare(load_pair("toy"), PROMPTS, parse_policies("plain"), rules=rules)
