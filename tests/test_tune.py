"""The tuner: spaces, a planted optimum, what is always tried, the held-out half, the front, and the command."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from drafts import of_the_toy
from test_cli import run

from treespec.cost import CostCurve
from treespec.errors import InputError, PolicyError
from treespec.pairs import load_pair
from treespec.policies import POLICIES, BestFirst, Linear, parse_policy
from treespec.policies.space import Choice, Real, Whole
from treespec.prompts import Prompt
from treespec.scoring import priced, score, some_prompts
from treespec.search import halves, setting
from treespec.trace import Caps, Trace, record
from treespec.tune import pareto, tune

pytestmark = pytest.mark.thorough

WORDS = [
    "the cat sat",
    "a dog ran on",
    "the tree",
    "mat under a",
    "dog sat on the mat",
    "a cat",
    "ran under the",
    "on a tree",
]
FLAT = CostCurve((1.0, 7.0, 8.0, 64.0), (0.01, 0.0101, 0.04, 0.4), (1.0, 64.0), (1e-4, 2e-4), name="planted")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    prompts = [Prompt(f"p{i}", "xy"[i % 2], [text]) for i, text in enumerate(WORDS)]
    return of_the_toy(path, prompts)


@pytest.mark.parametrize("name", POLICIES)
def test_spaces_are_parameters_and_their_values_are_allowed(name):
    kind = POLICIES[name]
    fields = {f.name for f in kind.__dataclass_fields__.values() if f.init}
    assert set(kind.space) <= fields and (kind.space or name == "plain")
    rng, made = np.random.default_rng(0), []
    for point in [*rng.random((60, len(kind.space))), np.zeros(len(kind.space)), np.full(len(kind.space), 1 - 1e-9)]:
        policy = setting(kind, point, FLAT)
        if policy is not None:
            made.append(policy)
            if name != "throughput":  # its curve has no name that can be loaded
                assert parse_policy(policy.spec()) == policy
    assert len(made) > 20, "most of the space is allowed"


def test_ranges_cover_their_ends():
    assert [Whole(2, 5).at(u) for u in (0, 0.3, 0.6, 0.99)] == [2, 3, 4, 5]
    assert Whole(1, 64, log=True).at(0) == 1 and Whole(1, 64, log=True).at(1 - 1e-12) == 64
    assert Real(0.01, 1.0, log=True).at(0.5) == 0.1 and Real(1.0, 2.0).at(0.123456) == 1.12
    assert [Choice(("a", "b")).at(u) for u in (0.49, 0.5)] == ["a", "b"]


def test_the_planted_optimum_is_found(trace):
    """Seven rows cost what one costs, eight four times that: the best tree has six candidates."""
    found = tune(trace, FLAT, "bestfirst", settings=80)
    at = priced(FLAT, trace)
    exhaustive = max(
        score(trace, BestFirst(budget=b, depth=d, floor=0.001), at).speedup() for b in range(2, 12) for d in range(1, 9)
    )
    assert parse_policy(found.recommended["policy"]).budget == 6
    assert found.recommended["speedup"] > 0.97 * exhaustive


def test_plain_and_chains_are_always_tried(trace):
    found = tune(trace, FLAT, "uniform", settings=4)
    assert {"plain", "linear:gamma=1", "linear:gamma=8", "uniform"} <= set(found.candidates["policy"])
    assert {"plain", "linear", "uniform"} == set(found.by_policy)


def test_the_answer_may_be_plain_decoding_or_a_chain(trace):
    dear = CostCurve((1.0, 9.0), (0.01, 0.2), (1.0,), (0.02,))
    found = tune(trace, dear, "all", settings=30)
    assert found.recommended["policy"] == "plain" and found.recommended["held_out"]["speedup"] == pytest.approx(1.0)
    steep = CostCurve((1.0, 3.0, 64.0), (0.01, 0.011, 0.6), (1.0, 64.0), (1e-5, 0.05))
    assert Linear.name in tune(trace, steep, "uniform", settings=10).recommended["policy"]


def test_the_search_never_sees_the_held_out_half(trace):
    found = tune(trace, FLAT, "bestfirst,dynamic", settings=40, seed=3)
    seen, held = halves(trace, np.random.default_rng(3))
    assert not set(seen) & set(held) and sorted([*seen, *held]) == list(range(8))
    assert [sorted(trace.prompts[i].category for i in half) for half in (seen, held)] == [["x", "x", "y", "y"]] * 2
    best = score(trace, parse_policy(found.recommended["policy"]), priced(FLAT, trace))
    assert found.recommended["held_out"]["speedup"] == pytest.approx(best.speedup(held))
    exact = found.candidates[found.candidates["truncated_share"] <= 0.01]
    assert found.recommended["search"] == pytest.approx(best.speedup(seen)) == exact["search"].max()
    low, high = found.recommended["held_out"]["speedup_ci"]
    assert low <= found.recommended["held_out"]["speedup"] <= high


def test_the_same_seed_gives_the_same_search(trace):
    one, two, three = (tune(trace, FLAT, "dynamic,eagle2", settings=24, seed=s) for s in (1, 1, 2))
    pd.testing.assert_frame_equal(one.candidates, two.candidates)
    assert set(one.candidates["policy"]) != set(three.candidates["policy"])


def test_the_local_search_improves_on_the_spread(trace):
    found = tune(trace, FLAT, "dynamic", settings=80)
    order = found.candidates  # sorted; the search's own order is lost, so compare with a search half as long
    assert order["search"].iloc[0] >= tune(trace, FLAT, "dynamic", settings=8).candidates["search"].iloc[0]
    assert 60 < len(order) <= 80 + 10


def test_nobody_beats_the_front():
    table = pd.DataFrame({"verify_ms": [1.0, 2.0, 2.0, 3.0, 4.0], "tokens_per_step": [1.0, 1.5, 1.4, 1.5, 1.6]})
    assert pareto(table)["verify_ms"].tolist() == [1.0, 2.0, 4.0]


def test_a_setting_beyond_the_recording_is_not_recommended(trace, tmp_path):
    path = tmp_path / "short.parquet"
    prompts = [Prompt(f"p{i}", "x", [text]) for i, text in enumerate(WORDS[:4])]
    record(load_pair("toy", "model"), prompts, path, caps=Caps(floor=0.05, depth=2, width=3, nodes=8))
    short = Trace.load(path)
    found = tune(short, replace(FLAT, verify_seconds=(0.01, 0.01, 0.01, 0.01)), "uniform,bestfirst", settings=20)
    assert (found.candidates["truncated_share"] > 0.01).any() and found.recommended["truncated_share"] <= 0.01


def test_one_prompt_has_nothing_to_hold_out(tmp_path):
    record(load_pair("toy", "model"), [Prompt("p", "x", ["the cat"])], tmp_path / "t.parquet")
    found = tune(tmp_path / "t.parquet", FLAT, "linear", settings=2)
    assert found.recommended["held_out"]["speedup"] == pytest.approx(found.recommended["speedup"])


def test_nonsense_is_refused(trace):
    with pytest.raises(InputError, match="settings"):
        tune(trace, FLAT, settings=0)
    with pytest.raises(PolicyError, match="unknown policy 'best'"):
        tune(trace, FLAT, "best")
    with pytest.raises(InputError):
        tune("missing.parquet", FLAT)


def test_the_command_confirms_and_exports(capsys, monkeypatch, trace, tmp_path):
    out, prompts = tmp_path / "tuned.json", tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": [text]}) + "\n" for i, text in enumerate(WORDS)))
    cost = "1:10 7:10.1 8:40 64:400; draft 1:0.1 64:0.2"
    command = ("tune", trace.path, "--cost", cost, "--policy", "bestfirst", "--settings", "12", "--out", str(out))
    code, text, _ = run(capsys, monkeypatch, *command, "--confirm", "--prompts", str(prompts), "--target", "toy", "--draft", "model", "--limit", "2",
                        "--json")  # fmt: skip
    result = json.loads(text)
    assert code == 0 and result["recommended"]["policy"] == json.loads(out.read_text())["recommended"]["policy"]
    assert result["confirmed"]["measured"]["policy"] == result["recommended"]["policy"]
    told, seen = result["confirmed"]["predicted"], result["confirmed"]["measured"]
    assert told["tokens_per_step"] == pytest.approx(seen["tokens_per_step"], abs=1e-3)
    assert told["nodes"] == pytest.approx(seen["nodes"], abs=1e-2)
    assert result["confirmed"]["ratio"] == seen["decoding_speedup"] / told["decoding_speedup"]
    held = {f"p{k}" for k in halves(Trace.load(trace.path), np.random.default_rng(0))[1]}
    assert len(result["confirmed"]["prompts"]) == 2 and held.issuperset(result["confirmed"]["prompts"])
    assert result["settings_per_minute"] > 0 and result["front"] and result["cost"]["name"] == cost
    before = out.read_bytes()
    code, _, err = run(capsys, monkeypatch, *command)
    assert code == 2 and "--force" in err and out.read_bytes() == before
    code, text, _ = run(capsys, monkeypatch, *command, "--force")
    assert code == 0 and "recommended: " in text and "held-out" in text
    code, text, _ = run(capsys, monkeypatch, "export", str(out), "--to", "vllm")
    assert code == 0 and "num_speculative_tokens" in text
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "else", "turns": ["a dog"]}\n')
    code, _, err = run(capsys, monkeypatch, *command[:-1], str(tmp_path / "c.json"), "--confirm", "--prompts", str(other), "--target", "toy",
                       "--draft", "model")  # fmt: skip
    assert code == 2 and "held-out prompts" in err and not (tmp_path / "c.json").exists()
    code, _, err = run(capsys, monkeypatch, "tune", str(tmp_path / "none.parquet"))
    assert code == 2 and "none.parquet" in err


def test_a_part_of_a_trace_scores_as_it_does_in_the_whole(trace):
    at, numbers = priced(FLAT, trace), np.array([5, 2])
    for spec in ("bestfirst:budget=6", "linear", "dynamic"):
        whole, part = score(trace, parse_policy(spec), at), score(some_prompts(trace, numbers), parse_policy(spec), at)
        pd.testing.assert_frame_equal(part.prompts, whole.prompts.loc[[2, 5]])


def test_on_a_large_trace_only_the_promising_are_replayed_whole(trace, monkeypatch):
    monkeypatch.setattr("treespec.search.FEW", 100)
    found = tune(trace, FLAT, "bestfirst,uniform", settings=120)
    assert found.about["settings"] > 90 and len(found.candidates) < 45
    assert found.recommended["speedup"] > 0.9 * tune(trace, FLAT, "bestfirst", settings=60).recommended["speedup"]
