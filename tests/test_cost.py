"""Cost curves: interpolation, monotone whatever was measured, extrapolation said aloud, files with clear errors."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespec.cost import CostCurve, CostModel
from treespec.errors import InputError


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
    assert "SmolLM2" in curve.provenance and curve.verify(12) > curve.verify(1) > 0 and curve.overhead > 0


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
