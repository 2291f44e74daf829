"""Cost curves: interpolation, monotone whatever was measured, extrapolation said aloud, files with clear errors."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import run

from treespec.cost import At, CostCurve, CostModel, load_cost, plain_seconds
from treespec.errors import InputError
from treespec.measure import measure
from treespec.pairs import load_pair
from treespec.policies import parse_policies, parse_policy


def test_points_are_met_and_joined():
    curve = CostCurve((1.0, 5.0, 9.0), (1.0, 2.0, 2.5), (1.0, 4.0), (0.1, 0.4), 0.05)
    assert [curve.verify(n) for n in (1, 3, 5, 7, 9)] == [1.0, 1.5, 2.0, 2.25, 2.5]
    assert curve.draft(0) == 0.0 and curve.draft(1) == 0.1 and curve.draft(2) == pytest.approx(0.2)
    assert isinstance(curve, CostModel)


def test_beyond_the_points_it_goes_on_and_says_so():
    curve = CostCurve((2.0, 10.0), (1.0, 3.0), (1.0,), (0.1,))
    assert curve.verify(14) == pytest.approx(4.0) and curve.verify(1) == 1.0
    assert [curve.extrapolates(n) for n in (1, 2, 10, 11)] == [True, False, False, True]
    assert curve.draft(50) == 0.1


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8))
def test_more_nodes_never_cost_less(seconds):
    curve = CostCurve(tuple(range(1, 2 * len(seconds), 2)), tuple(seconds))
    got = [curve.verify(n) for n in range(1, 30)]
    assert all(a <= b + 1e-12 for a, b in pairwise(got))
    assert sum(curve.verify_seconds) == pytest.approx(sum(seconds)), "a regression, not an envelope"


def test_there_and_back(tmp_path):
    curve = CostCurve((1.0, 8.0), (0.1, 0.2), (1.0,), (0.01,), 0.003, provenance="a test")
    curve.save(tmp_path / "c.json")
    again = CostCurve.load(tmp_path / "c.json")
    assert again.provenance == "a test" and str(again) == str(tmp_path / "c.json")
    assert (again.verify_seconds, again.draft_seconds, again.overhead) == ((0.1, 0.2), (0.01,), 0.003)


def test_the_shipped_curve():
    curve = CostCurve.load("measured")
    assert "smollm2" in curve.provenance and curve.verify(12) > curve.verify(1) > 0 and curve.overhead > 0


@pytest.mark.parametrize("content, wrong", [
    ("{", "not JSON"), ("[1]", "one JSON object"), ("{}", "not a cost curve"),
    ({"verify": {"rows": [1]}, "draft": 3, "overhead": 0}, "not a cost curve"),
    ({"verify": {"rows": [1, 1], "seconds": [1, 2]}, "draft": {"rows": [1], "seconds": [0]}, "overhead": 0}, "must rise"),
    ({"verify": {"rows": [1], "seconds": [1, 2]}, "draft": {"rows": [1], "seconds": [0]}, "overhead": 0}, "as many"),
    ({"verify": {"rows": [1], "seconds": [0]}, "draft": {"rows": [1], "seconds": [0]}, "overhead": 0}, "positive"),
    ({"verify": {"rows": [1], "seconds": [1]}, "draft": {"rows": [1], "seconds": [0]}, "overhead": -1}, "overhead"),
    ({"verify": {"rows": [1], "seconds": ["x"]}, "draft": {"rows": [1], "seconds": [0]}, "overhead": 0}, "not a cost curve"),
])  # fmt: skip
def test_bad_files_get_one_sentence(tmp_path, content, wrong):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=wrong) as error:
        CostCurve.load(path)
    assert "\n" not in str(error.value)


def test_a_missing_curve_names_those_there_are():
    with pytest.raises(InputError, match="measured"):
        CostCurve.load("mesured")


def test_a_longer_context_costs_more_the_more_rows_read_it():
    curve = CostCurve((1.0, 9.0), (1.0, 2.0), context=128.0, context_seconds=(0.001, 0.003), longest=512.0)
    assert curve.verify(1, 228) == pytest.approx(1.1) and curve.verify(9, 228) == pytest.approx(2.3)
    assert curve.verify(9) == curve.verify(9, 128) == curve.verify(9, 10) == 2.0, "shorter contexts are not told apart"
    assert [curve.extrapolates(5, c) for c in (10, 128, 512, 600)] == [True, False, False, True]
    assert curve.extrapolates(2, batch=2) and curve.verify(3, batch=3) == curve.verify(9)
    falling = CostCurve((1.0, 9.0), (1.0, 2.0), context=1.0, context_seconds=(0.003, 0.001))
    assert falling.verify(9, 100) >= falling.verify(1, 100)


def test_a_pinned_model_answers_by_nodes_alone():
    curve = CostCurve((1.0, 9.0), (1.0, 2.0), (1.0, 3.0), (0.1, 0.3), 0.05, context=100.0,
                      context_seconds=(0.001, 0.003), longest=400.0, plain=1.02)  # fmt: skip
    at = At(curve, 200.0, 2)
    assert isinstance(at, CostModel) and at.verify(1) == curve.verify(1, 200, 2) and at.draft(1) == curve.draft(2)
    assert at.overhead == 0.05 and str(at) == "curve" and at.extrapolates(1) and not At(curve, 200.0).extrapolates(1)
    assert At(curve, 200.0).plain == pytest.approx(1.1 + 0.02)
    assert plain_seconds(at) == pytest.approx(at.plain), "pinning twice changes nothing"


def test_plain_decoding_has_its_own_overhead_where_it_was_measured():
    assert plain_seconds(CostCurve((1.0,), (1.0,), overhead=0.2)) == pytest.approx(1.2)
    assert plain_seconds(CostCurve((1.0,), (1.0,), overhead=0.2, plain=1.05)) == pytest.approx(1.05)


def test_the_articles_curve_is_its_table():
    curve = load_cost("article")
    assert [round(1e3 * curve.verify(n), 1) for n in (1, 5, 36, 68, 120)] == [24.5, 26.2, 28.1, 38.6, 58.4]
    assert plain_seconds(curve) == 0.0245 and "Not measured here" in curve.provenance
    draft = {"A": 5 * curve.draft(1), "B": sum(curve.draft(w) for w in (1, 3, 9, 27))}
    for name, n, tokens, speedup in (("A", 5, 2.15, 1.82), ("B", 120, 4.82, 1.58)):
        assert 0.0245 * tokens / (curve.verify(n) + draft[name]) == pytest.approx(speedup, abs=0.005)


def test_a_typed_table():
    curve = load_cost("1:24.5 36:28.1, 68:38.6; draft 1:3.1 8:3.3; overhead 0.5")
    assert curve.verify(36) == pytest.approx(0.0281) and curve.draft(8) == pytest.approx(0.0033)
    assert curve.overhead == pytest.approx(0.0005) and load_cost("1:10").draft(3) == 0
    again = parse_policies("throughput:budget=8,cost=1:10 9:12,plain,linear:gamma=2")
    assert [p.spec() for p in again] == ["throughput:cost=1:10 9:12,budget=8", "plain", "linear:gamma=2"]


def test_names_with_colons_reach_a_policy():
    policy = parse_policies("plain,throughput:budget=8,cost=a100x4:70b")[1]
    assert parse_policy(policy.spec()) == policy and "cost=a100x4:70b" in policy.spec()


@pytest.mark.parametrize("text, wrong", [
    ("1:24.5 x", "rows:milliseconds"), ("1:24.5; draft 1", "rows:milliseconds"), ("5:1 2:3", "must rise"),
    ("1:1; overhead -2", "overhead"), ("1:-4", "positive"), ("nothing", "article"), ("gpus", "no cost curve"),
])  # fmt: skip
def test_a_table_that_is_none_gets_one_sentence(text, wrong):
    with pytest.raises(InputError, match=wrong) as error:
        load_cost(text)
    assert "\n" not in str(error.value)


def test_measured_fields_survive_a_file(tmp_path):
    curve = CostCurve((1.0, 8.0), (0.1, 0.2), (1.0,), (0.01,), 0.003, context=128.0, context_seconds=(0.0, 1e-5),
                      longest=512.0, plain=0.11, provenance="a test")  # fmt: skip
    curve.save(tmp_path / "c.json", machine={"threads": 2})
    again = load_cost(tmp_path / "c.json")
    assert replace(again, name="curve") == curve and json.loads((tmp_path / "c.json").read_text())["machine"]


@pytest.fixture(scope="module")
def measured():
    return measure(load_pair("toy", "model"), sizes=(2, 4, 9), contexts=(16, 48), widths=(1, 3), rounds=3)


def test_measuring_gives_a_curve_with_intervals(measured):
    curve, more = measured
    assert curve.verify_rows == (1.0, 2.0, 4.0, 9.0) and (curve.context, curve.longest) == (16.0, 48.0)
    assert set(curve.draft_rows) == {1.0, 3.0} and 0 < curve.verify(1) <= curve.plain and curve.overhead > 0
    points = more["points"]
    assert len(points["verify"]) == 8 and all(p["samples"] == 3 for p in points["verify"])
    for point in (*points["verify"], *points["draft"], points["plain"], points["overhead"]):
        assert point["interval"][0] <= point["seconds"] <= point["interval"][1]
    assert "toy" in curve.provenance and more["machine"]["threads"] >= 1
    assert [curve.extrapolates(n, c) for n, c in ((9, 48), (10, 48), (9, 49))] == [False, True, True]


def test_measuring_without_a_draft_and_with_lookups():
    curve, _ = measure(load_pair("toy", "none"), sizes=(2,), contexts=(8,), rounds=1)
    assert curve.draft(4) == 0 and curve.context_seconds == ()
    curve, _ = measure(load_pair("toy", "ngram"), sizes=(2,), contexts=(8,), rounds=1)
    assert curve.draft(1) > 0


@pytest.mark.parametrize("options, wrong", [
    ({"rounds": 0}, "at least"), ({"sizes": (0,)}, "at least"), ({"contexts": ()}, "at least"), ({"widths": (0,)}, "at least"),
])  # fmt: skip
def test_nonsense_is_not_measured(options, wrong):
    with pytest.raises(InputError, match=wrong):
        measure(load_pair("toy"), **{"rounds": 1, **options})


def test_the_command_writes_a_curve_and_overwrites_nothing(capsys, monkeypatch, tmp_path):
    out = tmp_path / "c.json"
    command = ("measure", "--out", str(out), "--target", "toy", "--draft", "model", "--sizes", "1,4", "--contexts", "8,24",
               "--widths", "1,2", "--rounds", "2")  # fmt: skip
    code, text, _ = run(capsys, monkeypatch, *command)
    assert code == 0 and "overhead" in text and "measured by treespec measure" in load_cost(out).provenance
    before = out.read_bytes()
    code, text, err = run(capsys, monkeypatch, *command)
    assert code == 2 and text == "" and "--force" in err and out.read_bytes() == before
    code, text, _ = run(capsys, monkeypatch, *command, "--force", "--json")
    assert code == 0 and json.loads(text)["verify"]["rows"] == [1, 4]
    code, _, err = run(capsys, monkeypatch, *command[:3], "--sizes", "a", "--force")
    assert code == 2 and "whole numbers" in err
