"""Calibration: what steps show, fitted temperatures against known ones, reliability, files."""

import math

import numpy as np
import pytest
import torch

from treespec.calibration import Calibration, Outcomes, fit, outcomes, tempered
from treespec.errors import InputError
from treespec.events import StepEvent, StepTimes
from treespec.pairs import load_pair
from treespec.policies import Sequoia, Threshold, Throughput
from treespec.reliability import reliability
from treespec.tree import Reason, TokenTree


def step(tree, path, tokens, index=1):
    bonus = tokens[len(path)] if len(tokens) > len(path) else None
    return StepEvent(index, 0, tree, path, tokens, bonus, len(tree), [], StepTimes())


def tree():
    """Root 9; children 5 and 6; 5 has 7 and, pruned, 8; 6 has 7; 7 (node 3) was not expanded."""
    pruned = int(Reason.OVER_BUDGET)
    return TokenTree.from_lists(
        [9, 5, 6, 7, 8, 7],
        [-1, 0, 0, 1, 1, 2],
        logp=[0, -0.5, -1.0, -0.7, -2.0, -0.1],
        entropy=[1.5, 0.8, 0.2, math.nan, math.nan, math.nan],
        reason=[0, 0, 0, 0, pruned, 0],
    )


def test_children_of_visited_nodes_are_known_pruned_or_not():
    seen = outcomes([step(tree(), [1], [5, 8])])  # 5 accepted, then the bonus is 8, which had been pruned
    assert seen.depth.tolist() == [1, 1, 2, 2] and seen.rank.tolist() == [0, 1, 0, 1]
    assert seen.accepted.tolist() == [True, False, False, True], "the pruned child was right"
    assert seen.entropy.tolist() == pytest.approx([1.5, 1.5, 0.8, 0.8]) and seen.parent.tolist() == [0, 0, 1, 1]
    assert seen.logp.tolist() == pytest.approx([-0.5, -1.0, -0.7, -2.0]) and seen.hit_rate == 1.0


def test_the_end_of_a_text_shows_nothing():
    assert len(outcomes([step(tree(), [1], [5])])) == 2, "what the target would have said after 5 is unknown"
    assert len(outcomes([step(TokenTree.root_only(3), [], [4], 0)])) == 0 and len(outcomes([])) == 0
    rejected = outcomes([step(tree(), [], [1])])
    assert rejected.accepted.tolist() == [False, False] and rejected.hit_rate == 0.0


def test_acceptance_by_rank_feeds_sequoia():
    events = [step(tree(), [1], [5, 8]), step(tree(), [2], [6, 7]), step(tree(), [], [1])]
    seen = outcomes(events)
    assert seen.acceptance(3) == pytest.approx((2 / 5, 2 / 5, 0.0))  # 5 visited nodes with children
    assert Sequoia(4, 2, seen.acceptance(3)).levels == 2


def drawn(temperature, nodes=4000, seed=0, vocabulary=12):
    """Outcomes of a draft q where the target is q at another temperature."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(nodes, vocabulary)) * rng.uniform(0.5, 5, size=(nodes, 1)))
    q, p = logits.log_softmax(-1), (logits / temperature).softmax(-1).numpy()
    choice = torch.tensor((p.cumsum(1) > rng.uniform(size=(nodes, 1))).argmax(1))
    bits = torch.special.entr(q.exp()).sum(-1) / math.log(2)
    logp, token = q.topk(6, dim=-1)
    depth = torch.ones_like(token)
    rank = torch.arange(6).expand_as(token)
    columns = depth, rank, logp.float(), bits[:, None].expand_as(logp).float(), token == choice[:, None]
    return Outcomes(*(c.flatten() for c in columns), torch.arange(nodes).repeat_interleave(6))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4, 2.0])
def test_a_known_temperature_is_found_and_calibrates(temperature):
    seen = drawn(temperature)
    found = fit(seen)
    assert found.temperatures[0] == pytest.approx(temperature, rel=0.2), "the normaliser is of first order"
    before, after = reliability(seen)["all"].error, reliability(seen, calibration=found)["all"].error
    assert after <= before + 1e-3 and (temperature == 1.0 or after < before / 2)


def test_depths_have_their_own_temperature_while_they_have_the_data():
    first, second, third = drawn(1.0, 400), drawn(2.0, 400, 1), drawn(2.0, 10, 2)
    second.depth += 1
    third.depth += 2
    second.parent += 1000
    third.parent += 2000
    both = Outcomes(*(torch.cat([getattr(o, n) for o in (first, second, third)]) for n in vars(first)))
    found = fit(both)
    assert len(found.temperatures) == len(found.hit_rates) == 2, "the third depth is too thin"
    assert found.temperatures[0] < 1.3 < found.temperatures[1]
    logp, bits = torch.tensor([-1.0]), torch.tensor([1.0])
    assert (
        torch.equal(found.apply(7, logp, bits), found.apply(2, logp, bits)) and found.hit_rate(9) == found.hit_rates[1]
    )


def test_tempering_edges():
    logp = torch.tensor([[-0.1, -3.0, -torch.inf]])
    assert tempered(logp, torch.tensor([[1.0]]), 1.0) is logp
    for temperature in (0.5, 2.0):
        got = tempered(logp, torch.tensor([[math.inf]]), temperature)
        assert got[0, 2] == -torch.inf and not bool(torch.isnan(got).any())
        assert bool((tempered(logp, torch.tensor([[0.3]]), temperature) <= 0).all())


def test_reliability_adds_up():
    seen = drawn(1.0, 500)
    for by in ("depth", "rank", "entropy"):
        groups = reliability(seen, by)
        assert (
            sum(int(g.count.sum()) for k, g in groups.items() if k != "all") == len(seen) == groups["all"].count.sum()
        )
    assert set(reliability(seen, "rank")) == {"all", *"012345"} and "1-2.5" in reliability(seen, "entropy")
    half = Outcomes(
        *(torch.tensor(c) for c in ([1, 1], [0, 0], [math.log(0.75)] * 2, [1.0, 1.0], [True, False], [0, 1]))
    )
    one = reliability(half)["all"]
    assert (
        one.error == pytest.approx(0.25) and one.count[7] == 2 and one.observed[7] == 0.5 and np.isnan(one.observed[0])
    )
    with pytest.raises(InputError, match="depth, rank or entropy"):
        reliability(seen, "token")


def test_from_live_steps_to_a_policy(tmp_path):
    """The whole way: decode, fit, save, load, decode with it, the same text."""
    pair = load_pair("toy", "model")
    result = pair.generate("the cat sat", policy=Threshold(0.01, 4, 4, 30), max_new_tokens=150)
    found = fit(outcomes(result.steps), least=50, provenance="toy")
    found.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert again.temperatures == found.temperatures and again.hit_rates == found.hit_rates and again.provenance == "toy"
    policy = Throughput(calibration=str(tmp_path / "c.json"))
    assert policy.parameters()["calibration"] == str(tmp_path / "c.json")
    assert pair.generate("the cat sat", policy=policy, max_new_tokens=60).tokens == result.tokens[:60]


@pytest.mark.parametrize("text, wrong", [
    ("{}", "not a calibration"), ('{"temperatures": ["x"]}', "not a calibration"), ('{"temperatures": [0]}', "positive"),
    ('{"temperatures": []}', "positive"), ('{"temperatures": [1], "hit_rates": [2]}', "between 0 and 1"),
])  # fmt: skip
def test_bad_files_get_one_sentence(tmp_path, text, wrong):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match=wrong):
        Calibration.load(tmp_path / "c.json")


def test_too_little_data():
    with pytest.raises(InputError, match="at least 200"):
        fit(drawn(1.0, 10))
