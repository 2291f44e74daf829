"""The checker passes the package's own policies and catches each kind of fault that a first draft of a policy may have."""

from dataclasses import dataclass

import pytest
import torch
from drafts import of_the_toy

from treespec.policies import BestFirst, DynamicTreePruner, Linear, Policy, Threshold, Uniform
from treespec.policies.base import Decision, present_children, reasons
from treespec.policycheck import check_policy
from treespec.prompts import Prompt

pytestmark = pytest.mark.thorough

WORDS = ["a dog ran", "the cat sat", "under a tree", "on the mat"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    prompts = [Prompt(f"p{i}", "xy"[i % 2], [text]) for i, text in enumerate(WORDS)]
    return of_the_toy(path, prompts)


def failed(report):
    return [found.what for found in report.findings if not found.passed]


@pytest.mark.parametrize(
    "policy",
    [
        Threshold(tau=0.05, depth=4, budget=12),
        BestFirst(budget=8, floor=0.01, depth=4),
        DynamicTreePruner(),
        Linear(3),
        Uniform(2, 2),
    ],
    ids=lambda policy: policy.name,
)
def test_own_policies_are_sound(policy, trace):
    report = check_policy(policy, trace)
    assert failed(report) == []
    assert report.sound and report.speedup > 0


def test_the_best_rival_is_named_and_compared_with(trace):
    rivals = [Linear(2), Uniform(3, 3)]
    report = check_policy(Linear(2), trace, "1:10 100:1000", rivals)
    assert report.best == max([("plain", 1.0), ("linear:gamma=2", report.speedup)], key=lambda entry: entry[1])
    assert f"{report.speedup:.3f} times plain decoding" in str(report) and "linear:gamma=2" in report._repr_html_()
    free = check_policy(Linear(2), trace, "1:10 100:10", [Linear(1), Linear(2)])
    assert free.best == ("linear:gamma=2", free.speedup) and free.speedup > 1


@dataclass(frozen=True)
class Mine(Policy):
    """Takes the first two children, three levels deep."""

    name = "mine"
    budget: int = 5
    levels, width = 3, 2

    def decide(self, frontier):
        kept = present_children(frontier, self.width)
        return Decision(reasons(kept), kept)


class Orphans(Mine):
    def trim(self, score, kept, drawn):
        out = torch.zeros_like(kept)
        out[:, 0] = True
        out[:, -2:] = kept[:, -2:]  # the deepest, whatever their parents
        return out


class Unfair(Mine):
    def decide(self, frontier):
        kept = present_children(frontier, 2) & (torch.arange(frontier.child_logp.shape[-1]) == 1)
        return Decision(reasons(present_children(frontier, 2), below_tau=~kept & present_children(frontier, 2)), kept)


class Stateful(Mine):
    def decide(self, frontier):
        seen = getattr(self, "_seen", 0)
        object.__setattr__(self, "_seen", seen + 1)
        kept = present_children(frontier, 1 + seen % 2)
        return Decision(reasons(kept), kept)


class Greedy(Mine):
    levels, width, budget = 8, 12, 8000

    def decide(self, frontier):
        kept = present_children(frontier, 12) & (frontier.child_log_path() > -12)
        return Decision(reasons(kept), kept & (frontier.child_log_path() > -4))


class Broken(Mine):
    def decide(self, frontier):
        raise RuntimeError("not <done> yet")


BUDGET, PARENT, SIBLING = (
    "the budget holds",
    "every node's parent is verified with it",
    "the likelier of two siblings is kept first",
)
BATCH, RECORDING = "a batch of trees is the same as one by one", "its trees lie inside the recording"


@pytest.mark.parametrize(
    ("policy", "fault"),
    [(Mine(), BUDGET), (Orphans(), PARENT), (Unfair(), SIBLING), (Stateful(), BATCH), (Greedy(), RECORDING)],
    ids=lambda value: type(value).__name__ if isinstance(value, Policy) else "",
)
def test_each_fault_is_found(policy, fault, trace):
    report = check_policy(policy, trace)
    assert fault in failed(report)
    assert not report.sound


def test_a_budget_that_fits_is_no_fault(trace):
    tight, wide = failed(check_policy(Mine(), trace)), failed(check_policy(Mine(budget=14), trace))
    assert [what for what in tight if what not in wide] == [BUDGET]


def test_what_a_policy_raises_is_shown_not_raised(trace):
    report = check_policy(Broken(), trace)
    assert report.speedup is None and "not compared" in str(report)
    assert {found.seen for found in report.findings if not found.passed} >= {"RuntimeError: not <done> yet"}
    assert "not &lt;done&gt; yet" in report._repr_html_()
