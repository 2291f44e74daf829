"""A policy's controls say exactly the policy, whatever its parameters."""

import itertools

import pytest
from ipywidgets.widgets.widget import _instances

from treespec.errors import PolicyError, TreespecError
from treespec.policies import POLICIES, parse_policy
from treespec.widgets.base import free
from treespec.widgets.controls import PolicyControls

ODD = [  # outside the ranges that a search looks in
    "dynamic:tau=0.0123,low=0.37,high=12.0,mid_widths=1/7,depth=9,deep=11,budget=300,scope=level",
    "dynamic:tau=auto",
    "bestfirst:budget=200,floor=0.0001,grow=0.9",
    "specinfer:expansion=3/1/2",
    "sequoia:acceptance=0.5/0.2",
    "throughput:cost=a100x4:70b,rate=auto,spread=3.0",
    "linear:svip=0.3,confidence=0.17",
]


@pytest.mark.parametrize("spec", [*POLICIES, *ODD])
def test_controls_say_the_policy_they_show(spec):
    controls = PolicyControls(spec)
    assert controls.spec == parse_policy(spec).spec()
    assert controls.policy == parse_policy(spec)
    names = {n for key in controls.parameters for n in key.split("/")}
    assert names == parse_policy(spec).parameters().keys()


def test_every_control_changes_the_policy():
    controls, said = PolicyControls("dynamic"), []
    controls.observe(lambda change: said.append(change.new), "spec")
    controls.parameters["low/high"].value = (0.5, 3.1)
    controls.parameters["tau"].value = controls.parameters["tau"].options[-1][1]
    controls.parameters["budget"].value = 7
    controls.parameters["mid_widths"].value = (1, 2)
    controls.parameters["scope"].value = "level"
    assert said[0] == "dynamic:low=0.5,high=3.1"
    assert said[-1] == "dynamic:tau=0.6,low=0.5,high=3.1,mid_widths=1/2,budget=7,scope=level"
    assert controls.policy == parse_policy(said[-1]) and len(said) == 5


def test_another_policy_brings_its_own_controls():
    controls, said = PolicyControls("dynamic:budget=7"), []
    before = set(_instances)
    controls.observe(lambda change: said.append(change.new), "spec")
    controls.choice.value = "linear"
    assert list(controls.parameters) == ["gamma", "confidence", "cumulative", "svip"] and said == ["linear"]
    controls.show("uniform:depth=2,width=4")
    assert said == ["linear", "uniform:depth=2,width=4"]  # once for both
    controls.show("dynamic:budget=7")
    assert len(_instances) == len(before)  # the other controls are gone, styles and layouts too
    free(controls)


def test_what_does_not_fit_is_said_when_asked():
    controls = PolicyControls("dynamic")
    controls.parameters["deep"].value = 3
    assert controls.spec == "dynamic:deep=3"
    with pytest.raises(PolicyError, match="deep must be at least depth"):
        controls.policy  # noqa: B018
    controls.show("sequoia")
    controls.parameters["acceptance"].value = "0.5/x"
    with pytest.raises(TreespecError, match="cannot read 0\\.5/x"):
        controls.policy  # noqa: B018
    with pytest.raises(PolicyError, match="unknown policy 'dynamit'; known"):
        controls.show("dynamit")


def test_a_tau_slider_is_logarithmic_and_its_numbers_can_be_typed():
    stops = [value for _, value in PolicyControls("threshold").parameters["tau"].options]
    assert 0.08 in stops and stops == sorted(stops) and all(float(f"{s:.3g}") == s for s in stops)
    ratios = [b / a for a, b in itertools.pairwise(stops)]
    assert max(ratios) < 1.12 and stops[0] == 0.005


def test_what_is_no_slider_waits_behind_more_unless_it_was_changed():
    def hidden(controls):
        return [name for name, widget in controls.parameters.items() if widget.layout.display == "none"]

    controls = PolicyControls("dynamic")
    assert hidden(controls) == ["mid_widths", "scope"] and controls.more.layout.display == ""
    controls.more.value = True
    assert hidden(controls) == [] and controls.more.description.startswith("less")
    controls.show("dynamic:budget=9")
    assert hidden(controls) == ["mid_widths", "scope"]
    controls.show("dynamic:scope=level")  # what is not at its default is never out of sight
    assert hidden(controls) == []
    controls.show("uniform")
    assert controls.more.layout.display == "none" and hidden(controls) == []
    controls.show("sequoia")
    assert "acceptance" in controls.parameters and controls.more.layout.display == ""
