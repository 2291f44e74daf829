"""The explained tree is the replay's tree, node for node, and every candidate of it has its reason."""

import pytest
import torch

from treespec.cost import CostCurve
from treespec.pairs import load_pair
from treespec.policies import POLICIES, DynamicTreePruner, parse_policy
from treespec.prompts import Prompt
from treespec.trace import Caps, Sampling, Trace, explain, record, replay
from treespec.trace.regrow import regrow
from treespec.tree import Reason

pytestmark = pytest.mark.thorough

CURVE = CostCurve((1, 8, 32), (1.0, 1.2, 2.0), (1,), (0.05,), overhead=0.1, name="curve")
PROMPTS = [Prompt("one", "x", ["a dog ran"]), Prompt("two", "y", ["the cat"]), Prompt("three", "x", ["on a mat"])]
MORE = [
    "dynamic:tau=0.01,high=4,low=1.5,budget=6",
    "dynamic:tau=0.02,low=0.8,high=2.2,budget=8,depth=2,deep=3,scope=level",
    "bestfirst:budget=5,grow=0.1",
    "linear:gamma=3,confidence=0.3",
]


@pytest.fixture(scope="module", params=["wide", "narrow"])
def trace(request, tmp_path_factory):
    """Recorded along the toy's texts: with room for everything, and with so little that policies leave it."""
    caps = Caps() if request.param == "wide" else Caps(floor=0.05, depth=4, width=3, nodes=6, narrow=(2,))
    path = tmp_path_factory.mktemp("explain") / "t.parquet"
    record(load_pair("toy", "model"), PROMPTS, path, sampling=Sampling(max_new_tokens=14), caps=caps)
    return Trace.load(path)


def recorded_nodes(trace, row, tree):
    """Numbers in the trace of the verified candidates."""
    own = trace.tree(row)
    below, numbers = own.children(), {0: 0}
    for i in range(1, len(tree)):
        numbers[i] = below[numbers[int(tree.parent[i])]][int(tree.token[i])]
    return sorted(int(trace.root[row]) + numbers[i] for i in range(1, len(tree)) if tree.reason[i] == Reason.KEPT)


@pytest.mark.parametrize("spec", [*POLICIES, *MORE])
def test_the_explained_tree_is_the_replayed_one(trace, spec):
    policy = parse_policy(spec)
    grown = regrow(trace.index, torch.arange(len(trace)), policy)
    for row in range(len(trace)):
        found = explain(trace, row, policy)
        kept = grown.kept[row]
        assert recorded_nodes(trace, row, found.tree) == sorted(kept[kept >= 0].tolist())
        assert len(found.tree.accepted) == int(grown.accepted[row])
        assert found.truncated == bool(grown.truncated[row])
        assert len(found.tree.kept()[0]) + found.missing == int(grown.nodes[row]), "ancestor-closed"
        assert found.missing == 0 or policy.shape is not None


def test_path_and_bonus_spell_the_text(trace):
    policy = parse_policy("uniform:depth=3,width=3")
    for row in range(len(trace)):
        found = explain(trace, row, policy)
        text = trace.tokens(int(trace.prompt[row]))
        at = len(text) - 1 - int(trace.left[row])
        says = [int(found.tree.token[i]) for i in found.tree.accepted]
        says += [] if found.bonus is None else [found.bonus]
        assert says == text[at + 1 : at + 1 + len(says)] and (
            found.bonus is not None or at + len(says) == len(text) - 1
        )


def test_every_reason_of_the_article_is_told(trace):
    policy = DynamicTreePruner(tau=0.03, low=0.8, high=2.2, budget=4, depth=2, deep=3)
    seen = {int(r) for row in range(len(trace)) for r in explain(trace, row, policy).tree.reason}
    below = {Reason.BELOW_TAU} if trace.caps.floor < policy.tau else set()  # what was recorded at all
    assert seen >= {Reason.KEPT, Reason.ENTROPY_CAP} | below and Reason.NOT_PROPOSED not in seen


def test_an_adaptive_policy_is_remembered_step_by_step(trace):
    found = replay(trace, "dynamic:tau=auto,high=4", CURVE)
    assert len(found.policies) == len(found.rows) and replay(trace, "dynamic", CURVE).policies == []
    assert len({p.threshold for p in found.policies}) > 1
    for step, (row, policy) in enumerate(zip(found.rows.tolist(), found.policies)):
        assert len(explain(trace, row, policy).tree.kept()[0]) == int(found.grown.nodes[step])
