"""Policies' parameters and the arithmetic below them, by hand: bounds, sentences, searched ranges, prices, shapes."""

import math
from dataclasses import dataclass

import pytest
import torch
from drafts import frontier

from treespec.calibration import Calibration
from treespec.cost import CostCurve
from treespec.errors import PolicyError
from treespec.policies import (
    POLICIES,
    Autoregressive,
    BestFirst,
    DynamicTreePruner,
    Eagle2,
    Frontier,
    Linear,
    Observation,
    OptTree,
    Sequoia,
    SpecInfer,
    Threshold,
    Throughput,
    Uniform,
    parse_policies,
    parse_policy,
)
from treespec.policies.base import (
    MAX_NODES,
    largest,
    number,
    over_budget,
    present_children,
    reasons,
    shown,
    top_children,
    top_nodes,
    whole,
)
from treespec.policies.price import NodePrice
from treespec.policies.shape import Programme, best_size, best_tree, level_tree
from treespec.policies.space import Choice, Real, Whole
from treespec.tree import Reason

# (class, parameter, lowest, highest) of every whole number; the others keep their defaults but for those given
WHOLES = [
    (Uniform, "depth", 1, 64, dict(width=1)), (Uniform, "width", 1, 1024, dict(depth=1)), (Linear, "gamma", 1, 256, {}),
    (Threshold, "width", 1, 1024, {}), (Threshold, "depth", 1, 64, {}), (Threshold, "budget", 1, MAX_NODES, {}),
    (DynamicTreePruner, "depth", 1, 64, dict(deep=64)), (DynamicTreePruner, "deep", 1, 64, dict(depth=1)),
    (DynamicTreePruner, "budget", 1, MAX_NODES, {}), (Eagle2, "total", 2, MAX_NODES, {}), (Eagle2, "depth", 1, 64, {}),
    (Eagle2, "top_k", 1, 1024, {}), (OptTree, "budget", 1, MAX_NODES, {}), (OptTree, "depth", 1, 64, {}),
    (Sequoia, "budget", 1, 1024, dict(depth=1, acceptance=(0.5,))), (Sequoia, "depth", 1, 64, dict(budget=1, acceptance=(0.5,))),
    (BestFirst, "budget", 1, MAX_NODES, {}), (BestFirst, "depth", 1, 64, {}),
    (Throughput, "max_depth", 1, 64, dict(budget=1)), (Throughput, "budget", 1, 1024, {}), (Throughput, "width", 1, 1024, dict(budget=1)),
]  # fmt: skip
NUMBERS = [
    (Linear, "confidence", 0, 1, False), (Linear, "cumulative", 0, 1, False), (Linear, "svip", 0, 10, False),
    (Threshold, "tau", 0, 1, True), (DynamicTreePruner, "tau", 0, 1, True), (OptTree, "delta", 0, 1, False),
    (BestFirst, "floor", 0, 1, False), (BestFirst, "grow", 0, 1, False), (Throughput, "rate", 0, 1e9, False),
    (Throughput, "spread", 0, 64, False),
]  # fmt: skip


@pytest.mark.parametrize("cls, name, low, high, others", WHOLES, ids=lambda v: getattr(v, "name", None) or str(v))
def test_whole_numbers_have_both_their_bounds(cls, name, low, high, others):
    for value in (low, high):
        assert getattr(cls(**{**others, name: value}), name) == value
    for value in (low - 1, high + 1, low + 0.5, True, None):
        with pytest.raises(PolicyError) as error:
            cls(**{**others, name: value})
        assert str(error.value) == f"{name} must be a whole number from {low} to {high}; got {value!r}"


@pytest.mark.parametrize("cls, name, low, high, open_low", NUMBERS, ids=lambda v: getattr(v, "name", None) or str(v))
def test_numbers_have_both_their_bounds(cls, name, low, high, open_low):
    for value in (low + 1e-6 if open_low else low, high, (low + high) / 2):
        assert getattr(cls(**{name: value}), name) == value
    wrong = [low - 1e-6, high * 1.01, math.nan, math.inf, None, True]
    for value in [*wrong, low] if open_low else wrong:
        with pytest.raises(PolicyError) as error:
            cls(**{name: value})
        assert str(error.value) == f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}]; got {value!r}"


def test_the_checks_themselves():
    whole("n", 1, 1), whole("n", 8192, 1), number("x", 0, 0, 1), number("x", 1, 0, 1, open_low=True)
    for value in (0, 8193, "1", 1.0):
        with pytest.raises(PolicyError, match=r"^n must be a whole number from 1 to 8192; got "):
            whole("n", value, 1)
    with pytest.raises(PolicyError, match=r"^x must be in \(0, 1\]; got 0$"):
        number("x", 0, 0, 1, open_low=True)
    with pytest.raises(PolicyError, match=r"^x must be in \[0, 1\]; got '0'$"):
        number("x", "0", 0, 1)


@pytest.mark.parametrize("make, sentence", [
    (lambda: DynamicTreePruner(tau="x"), "tau must be a number in (0, 1] or 'auto'; got 'x'"),
    (lambda: DynamicTreePruner(low=-1), "low must be in [0, 64]; got -1"),
    (lambda: DynamicTreePruner(high=65), "high must be in [0, 64]; got 65"),
    (lambda: DynamicTreePruner(low=3), "low must not exceed high; got low=3, high=2.5 bits"),
    (lambda: DynamicTreePruner(mid_widths=3), "mid_widths must be two whole numbers such as 2/3; got 3"),
    (lambda: DynamicTreePruner(mid_widths=(1, 2, 3)), "mid_widths must be two whole numbers such as 2/3; got (1, 2, 3)"),
    (lambda: DynamicTreePruner(mid_widths=(0, 2)), "mid_widths must be a whole number from 1 to 1024; got 0"),
    (lambda: DynamicTreePruner(mid_widths=(1, 1025)), "mid_widths must be a whole number from 1 to 1024; got 1025"),
    (lambda: DynamicTreePruner(deep=3), "deep must be at least depth; got deep=3, depth=4"),
    (lambda: DynamicTreePruner(scope="x"), "scope must be 'node' or 'level'; got 'x'"),
    (lambda: SpecInfer(()), "expansion must be 1 to 64 whole numbers such as 1/1/3/1; got ()"),
    (lambda: SpecInfer((1,) * 65), f"expansion must be 1 to 64 whole numbers such as 1/1/3/1; got {(1,) * 65}"),
    (lambda: SpecInfer(3), "expansion must be 1 to 64 whole numbers such as 1/1/3/1; got 3"),
    (lambda: SpecInfer((0,)), "expansion must be a whole number from 1 to 1024; got 0"),
    (lambda: SpecInfer((1025,)), "expansion must be a whole number from 1 to 1024; got 1025"),
    (lambda: SpecInfer((90, 91)), "specinfer:expansion=90/91 grows 8,280 nodes; at most 8,192 are allowed"),
    (lambda: Uniform(2, 91), "uniform:depth=2,width=91 grows 8,372 nodes; at most 8,192 are allowed: lower depth or width"),
    (lambda: Throughput(rate="x"), "rate must be a number of tokens per second, 0 or more, or 'auto'; got 'x'"),
    (lambda: Sequoia(acceptance=()), "acceptance must be probabilities by rank that sum to at most 1; got ()"),
    (lambda: Sequoia(acceptance=(0.5, -0.1)), "acceptance must be probabilities by rank that sum to at most 1; got (0.5, -0.1)"),
    (lambda: Sequoia(acceptance=(1.1,)), "acceptance must be probabilities by rank that sum to at most 1; got (1.1,)"),
    (lambda: Sequoia(acceptance=(0.6, 0.401)), "acceptance must be probabilities by rank that sum to at most 1; got (0.6, 0.401)"),
    (lambda: Sequoia(acceptance="nan"), "acceptance must be probabilities by rank that sum to at most 1; got (nan,)"),
])  # fmt: skip
def test_a_refusal_is_this_very_sentence(make, sentence):
    with pytest.raises(PolicyError) as error:
        make()
    assert str(error.value) == sentence


def test_what_is_just_allowed():
    assert DynamicTreePruner(low=2.5).low == DynamicTreePruner().high and DynamicTreePruner(deep=4).deep == 4
    assert DynamicTreePruner(low=64, high=64).high == 64 and DynamicTreePruner(low=0, high=0).low == 0
    assert DynamicTreePruner(mid_widths=(1, 1024)).width == 1024 and DynamicTreePruner(mid_widths=(3, 2)).width == 3
    assert (
        SpecInfer((1,) * 64).levels == 64
        and SpecInfer((1024, 1)).width == 1024
        and SpecInfer([2, 1]).expansion == (2, 1)
    )
    assert Uniform(64, 1).levels == 64 and SpecInfer((64, 127)).levels == 2 and Uniform(2, 90).width == 90
    assert SpecInfer((4096 // 4, 7)).levels == 2  # 8,192 nodes, and not one more
    assert Sequoia(2, 2, (1.0,)).acceptance == (1.0,) and Sequoia(2, 2, (0.0,)).acceptance == (0.0,)
    assert Sequoia(2, 2, (0.5, 0.5000005)).levels == 1, "as much as rounding may add"


def test_levels_and_widths():
    assert (Autoregressive().levels, Autoregressive().width, Autoregressive().shape) == (0, 0, None)
    assert (Linear(7).levels, Linear(7).width) == (7, 1) and (Uniform(3, 2).levels, Uniform(3, 2).width) == (3, 2)
    assert (Threshold(width=5, depth=3).levels, Threshold(width=5, depth=3).width) == (3, 5)
    assert (BestFirst(3).levels, BestFirst(3).width, BestFirst(99).levels, BestFirst(99).width) == (3, 3, 10, 64)
    assert (OptTree(3).levels, OptTree(3).width, OptTree(99).levels, OptTree(99).width) == (3, 3, 10, 64)
    assert (Eagle2(9, 4, 3).levels, Eagle2(9, 4, 3).width) == (4, 3)


def test_ranges_that_a_search_may_look_in():
    assert [Whole(2, 4).at(u) for u in (0, 0.33, 0.34, 0.66, 0.67, 0.999)] == [2, 2, 3, 3, 4, 4]
    assert [Whole(2, 31, log=True).at(u) for u in (0, 0.25, 0.5, 0.75, 0.98, 0.999)] == [2, 4, 8, 16, 30, 31]
    assert Whole(1, 7, log=True).at(1 - 1e-16) == 7
    assert [Real(1.0, 3.0).at(u) for u in (0, 0.5, 0.12345)] == [1.0, 2.0, 1.25]
    assert [Real(0.01, 1.0, log=True).at(u) for u in (0, 0.5, 0.99)] == [0.01, 0.1, 0.955]
    assert [Choice("abc").at(u) for u in (0, 0.32, 0.34, 0.67, 0.999)] == ["a", "a", "b", "c", "c"]


def test_what_a_policy_says_of_its_parameters():
    assert Threshold(0.1).parameters() == {"tau": 0.1, "width": 4, "depth": 6, "budget": 68}
    assert DynamicTreePruner("auto").parameters()["tau"] == "auto" and "_price" not in DynamicTreePruner().parameters()
    curve = CostCurve((1.0,), (1.0,), name="mine")
    said = Throughput(curve).parameters()
    assert said["cost"] == "mine" and said["calibration"] == "none" and "_verify" not in said
    assert SpecInfer((2, 1)).parameters() == {"expansion": (2, 1)}
    assert Threshold(0.1, budget=7).spec() == "threshold:tau=0.1,budget=7" and Threshold().spec() == "threshold"
    assert shown((1, 2)) == "1/2" and shown(0.5) == "0.5" and shown("x") == "x"
    assert Threshold().after_step(Observation(1, 1, 1, 1)) == Threshold() and Threshold().shape is None


@pytest.mark.parametrize("text, sentence", [
    ("nonsense", f"unknown policy 'nonsense'; known: {', '.join(POLICIES)}"),
    (" dynamc:x=1", f"unknown policy 'dynamc'; known: {', '.join(POLICIES)}; did you mean 'dynamic'?"),
    ("plain:x=1", "policy 'plain' has no parameter 'x'; it takes none"),
    ("threshold:tua=1", "policy 'threshold' has no parameter 'tua'; it takes tau, width, depth, budget; did you mean 'tau'?"),
    ("threshold:tau", "policy 'threshold' has no parameter 'tau'; it takes tau, width, depth, budget; did you mean 'tau'?"),
    ("threshold:_price=1", "policy 'threshold' has no parameter '_price'; it takes tau, width, depth, budget"),
    ("threshold:tau=x", "threshold:tau must be a number; got 'x'"),
    ("threshold:width=1.5", "threshold:width must be a whole number; got '1.5'"),
    ("dynamic:mid_widths=2/x", "dynamic:mid_widths must be whole numbers such as 2/3; got '2/x'"),
])  # fmt: skip
def test_a_policy_that_cannot_be_read_is_this_very_sentence(text, sentence):
    with pytest.raises(PolicyError) as error:
        parse_policy(text)
    assert str(error.value) == sentence


def test_policies_are_read_from_one_line():
    assert parse_policy("  threshold: tau=0.1 , ,budget=7 ") == Threshold(0.1, budget=7)
    assert parse_policy("dynamic:tau=auto,scope=level,mid_widths=1/4") == DynamicTreePruner(
        "auto", mid_widths=(1, 4), scope="level"
    )
    assert parse_policy("threshold") == Threshold()
    assert type(parse_policy("threshold:tau=1").tau) is float and type(parse_policy("dynamic:low=1").low) is float
    assert parse_policies("throughput:cost=a100x4:70b,budget=9,linear") == [
        Throughput("a100x4:70b", budget=9),
        Linear(),
    ]
    assert parse_policies("linear,gamma=3,confidence=0.5,plain") == [Linear(3, 0.5), Autoregressive()]
    assert parse_policies(" all ") == [cls() for cls in POLICIES.values()]
    for text in ("", " , ,"):
        with pytest.raises(PolicyError) as error:
            parse_policies(text)
        known = ", ".join(POLICIES)
        assert str(error.value) == f"no policy given; expected a list such as plain,linear:gamma=5 of {known}"
    with pytest.raises(PolicyError, match=r"^unknown policy 'gamma=3'"):
        parse_policies("gamma=3,linear")


def several():
    """Two trees of two frontier nodes and three children, the last node being padding."""
    logp = torch.tensor([[[0.5, 0.3, 0.0], [0.6, 0.2, 0.1]], [[0.9, 0.05, 0.01], [0.5, 0.4, 0.1]]]).log()
    alive = torch.tensor([[True, True], [True, False]])
    path = torch.tensor([[0.5, 0.25], [0.8, 0.9]]).log()
    return Frontier(1, path, torch.ones(2, 2), logp, alive, path, torch.full((2, 3), -torch.inf), torch.zeros(2, 2, 1).long(), torch.ones(2, 2))  # fmt: skip


def test_a_path_is_its_parents_and_its_own():
    path = several().child_log_path().exp()
    torch.testing.assert_close(
        path, torch.tensor([[[0.25, 0.15, 0], [0.15, 0.05, 0.025]], [[0.72, 0.04, 0.008], [0, 0, 0]]])
    )


def test_children_that_are_there():
    seen = several()
    assert present_children(seen, 3).int().tolist() == [[[1, 1, 0], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]]
    assert present_children(seen, 1).int().tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]]]
    widths = torch.tensor([[2, 0], [1, 3]])[..., None]
    assert present_children(seen, widths).int().tolist() == [[[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0]]]


def test_of_several_reasons_the_last_counts():
    yes = torch.tensor([True, True, True, False])
    got = reasons(
        yes, over_budget=torch.tensor([False, True, True, False]), below_tau=torch.tensor([False, False, True, False])
    )
    assert got.tolist() == [Reason.KEPT, Reason.OVER_BUDGET, Reason.BELOW_TAU, Reason.NOT_PROPOSED]
    assert got.dtype == torch.uint8


def test_the_largest_by_hand():
    score, among = torch.tensor([[1.0, 3, 3, 2], [0, 5, 1, 4]]), torch.tensor([[True] * 4, [True, False, True, True]])
    assert largest(score, among, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert largest(score, among, 1).int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert largest(score, among, 9).int().tolist() == [[1] * 4, [1, 0, 1, 1]]
    kept = torch.tensor([[True] * 4, [True, True, False, True]])
    assert top_nodes(score, kept, 1).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]], "the root, whatever its score"
    assert top_nodes(score, kept, torch.tensor([[0], [2]])).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 1]]
    assert top_nodes(score, kept, 3) is kept
    level = torch.tensor([[[1.0, 3], [3, 2]]])
    assert top_children(level, torch.tensor([[[True, True], [False, True]]]), 2).int().tolist() == [[[0, 1], [0, 1]]]


def test_what_cannot_be_verified_any_more():
    seen = frontier(1, torch.zeros(1, 1), torch.tensor([[[-1.0, -2.0, -3.0, -2.0]]]), pool=[[-0.5, -2.5]])
    path, kept = seen.child_log_path(), torch.tensor([[[True, True, True, False]]])
    assert over_budget(seen, path, kept, 3).int().tolist() == [[[0, 0, 1, 0]]]
    assert over_budget(seen, path, kept, 2).int().tolist() == [[[0, 1, 1, 0]]]
    assert over_budget(seen, path, kept, 5).int().tolist() == [[[0, 0, 0, 0]]]
    assert over_budget(seen, path, kept, 6).int().tolist() == [[[0, 0, 0, 0]]]


def test_the_price_of_a_node_is_the_slope_of_the_line_times_the_rate():
    """Against numpy's weighted least squares over the same steps."""
    steps = [(2, 10, 0.30, 0.20), (1, 4, 0.20, 0.12), (3, 20, 0.50, 0.34), (2, 7, 0.25, 0.15)]
    price, tau = NodePrice(), 0.08
    assert price.rate == 0.0
    for i, (tokens, nodes, seconds, verify) in enumerate(steps):
        price = price.learn(Observation(tokens, nodes, seconds, verify))
        seen = steps[: i + 1]
        weight = [0.95 ** (i - j) for j in range(i + 1)]
        rate = sum(w * s[0] for w, s in zip(weight, seen)) / sum(w * s[2] for w, s in zip(weight, seen))
        assert price.rate == pytest.approx(rate) and price.weight == pytest.approx(sum(weight))
        if i:
            mean_n = sum(w * s[1] for w, s in zip(weight, seen)) / sum(weight)
            mean_t = sum(w * s[3] for w, s in zip(weight, seen)) / sum(weight)
            above = sum(w * (s[1] - mean_n) * (s[3] - mean_t) for w, s in zip(weight, seen))
            slope = above / sum(w * (s[1] - mean_n) ** 2 for w, s in zip(weight, seen))
            tau = 0.7 * tau + 0.3 * min(max(slope * rate, 0.005), 0.5)
        assert price.tau == pytest.approx(tau, rel=1e-6)


def test_the_price_of_a_node_has_bounds():
    def after(seconds):
        price = NodePrice()
        for nodes in (1, 2, 1, 2) * 20:
            price = price.learn(Observation(1, nodes, 1.0, seconds * nodes))
        return price.tau

    assert after(9.0) == pytest.approx(0.5, abs=1e-6) and after(0.0) == pytest.approx(0.005, abs=1e-6)
    assert after(0.2) == pytest.approx(0.2, abs=1e-3)
    idle = NodePrice().learn(Observation(1, 1, 0.0, 0.0)).learn(Observation(1, 9, 0.0, 0.0))
    assert idle.rate == 0.0 and idle.tau == 0.08, "without seconds there is no rate"


def test_level_trees_and_shapes_by_hand():
    tree = level_tree((2, 1))
    assert (tree.parent, tree.rank) == ((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0)) and math.isnan(tree.expected)
    assert (tree.depth, tree.drawn) == ((0, 1, 1, 2, 2), (1, 2))
    assert tree.slots.tolist() == [[1, 2], [3, 5], [4, 5], [5, 5], [5, 5], [5, 5]]
    assert level_tree(()).parent == (-1,) and level_tree(()).drawn == ()
    assert Uniform(2, 2).shape == level_tree((2, 2)) or Uniform(2, 2).shape.parent == level_tree((2, 2)).parent
    assert SpecInfer((1, 3)).shape.parent == (-1, 0, 1, 1, 1)


def test_the_best_trees_by_hand():
    p = (0.6, 0.3)
    assert best_tree(p, 1, 1).parent == (-1, 0) and best_tree(p, 1, 1).expected == pytest.approx(1.6)
    two = best_tree(p, 2, 2)  # a second level adds 0.36, a second child 0.3
    assert (two.parent, two.rank) == ((-1, 0, 1), (0, 0, 0)) and two.expected == pytest.approx(1.96)
    three = best_tree(p, 3, 2)
    assert (three.parent, three.rank) == ((-1, 0, 0, 1), (0, 0, 1, 0)) and three.expected == pytest.approx(2.26)
    assert best_tree(p, 3, 1).parent == (-1, 0, 0)
    value = Programme(p, 3, 2).value
    assert Programme(p, 3, 2).tree(3, 2) == three, "and not what a cache remembers"
    assert [v.tolist() for v in value] == [
        pytest.approx([0, 1, 1, 1, 1]), pytest.approx([0, 1, 1.6, 1.9, 1.9]), pytest.approx([0, 1, 1.6, 1.96, 2.26]),
    ]  # fmt: skip


def test_the_fastest_size_by_hand():
    cost = CostCurve((1.0, 4.0), (1.0, 1.3), (1.0,), (0.1,), 0.1)
    # seconds per token: plain 1.1, one child 1.3/1.6, two children 1.4/1.9, a chain of two 1.5/1.96, with a sibling
    # 1.6/2.26, a chain of three 1.7/2.176
    assert best_size((0.6, 0.3), cost, 3, 3) == (3, 2)
    assert best_size((0.6, 0.3), cost, 2, 3) == (2, 1) and best_size((0.6, 0.3), cost, 1, 3) == (1, 1)
    assert best_size((0.1,), cost, 3, 3) == (0, 0)
    even = CostCurve((1.0, 2.0), (1.0, 2.0), (1.0,), (0.0,))
    assert best_size((1.0,), even, 4, 4) == (0, 0), "of equals plain decoding"


@dataclass(frozen=True)
class Flat:
    """A node costs 0.1, a draft forward 0.05 and 0.01 for every node but the first."""

    overhead: float = 0.2

    def verify(self, n):
        return 1.0 + 0.1 * (n - 1)

    def draft(self, w):
        return 0.05 + 0.01 * (w - 1)


def test_throughput_takes_the_prefix_that_is_worth_most():
    policy = Throughput(Flat(), budget=5)
    assert policy._verify.tolist() == pytest.approx([1.2, 1.3, 1.4, 1.5, 1.6, 1.7])
    assert policy._draft.tolist() == pytest.approx([0, 0.05, 0.06, 0.07, 0.08, 0.09])
    score = torch.tensor([[0.0, 0.5, 0.9, 0.05, 0.4]]).log()
    score[0, 0] = 0.0
    kept = torch.ones(1, 5, dtype=torch.bool)
    # 1/1.25, 1.9/1.35, 2.4/1.45, 2.8/1.55, 2.85/1.65
    assert policy.trim(score, kept, torch.tensor([[1]])).int().tolist() == [[1, 1, 1, 0, 1]]
    kept[0, 2] = False
    assert policy.trim(score, kept, torch.tensor([[1]])).int().tolist() == [[1, 1, 0, 0, 1]]
    rated = Throughput(Flat(), budget=5, rate=4.5)  # a node costs 0.45 tokens: 0.9 and 0.5 pay, 0.4 does not
    assert rated.trim(score, torch.ones(1, 5, dtype=torch.bool), torch.tensor([[1]])).int().tolist() == [
        [1, 1, 1, 0, 0]
    ]
    worth, size = policy._best(torch.tensor([[0.5, 0.9]]).log(), torch.tensor([0.05]))
    assert size.tolist() == [2] and worth.tolist() == [pytest.approx(2.4 / 1.45)]
    assert policy._drafting(torch.tensor([[1, 3, 0], [1, 9, 9]])).tolist() == pytest.approx([0.12, 0.23])


def test_throughput_knows_when_no_draft_can_pay():
    @dataclass(frozen=True)
    class Dear(Flat):
        def draft(self, w):
            return 1.15 * w

    # one token for 1.2 seconds; always right: n + 1 for 1.2 + 0.1 n + 1.15 n
    assert Throughput(Dear(), budget=9).levels == 0 and Throughput(Flat(), budget=9).levels == 8
    assert Throughput(Flat(), max_depth=3).levels == 3
    assert Throughput(Flat(), rate=100.0).levels == 0 and Throughput(Flat(), rate=0.5).levels == 8


def test_throughput_looks_at_whole_chains_before_it_drafts():
    class Cost:
        overhead = 0.0

        def __init__(self, *seconds):
            self.seconds = seconds

        def verify(self, n):
            return self.seconds[min(n, len(self.seconds)) - 1]

        def draft(self, w):
            return 0.0

    assert Throughput(Cost(1.0, 1.5, 2.0, 2.5)).levels == 8, "2 tokens for 1.5, where 1 costs 1"
    assert Throughput(Cost(1.0, 1.5), max_depth=1).levels == 1, "one candidate is a chain too"
    half = Calibration((1.0,), (0.5,))
    assert Throughput(Cost(1.0, 2.1), half).levels == 0, "a chain that is right half of the time gives 2 tokens at most"
    assert Throughput(Cost(1.0, 1.8), half).levels == 8
    assert Throughput(Cost(1.0, 1.5), rate=0.5)._worth(torch.tensor(3.0), torch.tensor(2.0)) == 2.0


def test_shapes_whatever_they_were_given_as():
    assert Sequoia(5, 3, [0.5, 0.25]).acceptance == (0.5, 0.25) and hash(Sequoia(5, 3, [0.5, 0.25]))
    assert Uniform(depth=12, width=2).levels == 12  # 8,190 nodes
    with pytest.raises(PolicyError, match=r"grows 16,382 nodes; at most 8,192"):
        Uniform(depth=13, width=2)


def test_the_soft_width_of_an_entropy():
    policy = Throughput(Flat(), spread=0.5, width=6)
    seen = several()
    seen.entropy = torch.tensor([[0.0, 2.0], [3.0, torch.inf]])
    assert policy._limit(seen)[..., 0].tolist() == [[1, 2], [4, 6]]
    assert Throughput(Flat(), width=6)._limit(seen) == 6


def test_the_entropy_of_a_level_is_weighted_by_its_paths():
    seen = several()
    seen.entropy = torch.tensor([[1.0, 4.0], [3.0, torch.nan]])
    level = DynamicTreePruner(scope="level")._entropy(seen)
    torch.testing.assert_close(level, torch.tensor([[2.0, 2.0], [3.0, 3.0]]))
    assert DynamicTreePruner()._entropy(seen) is seen.entropy


def fate(policy, depth, bits, *probabilities):
    """Reasons and expansions of one node's children."""
    decision = policy.decide(frontier(depth, torch.tensor([[bits]]), torch.tensor([[probabilities]]).log()))
    return [Reason(r).name for r in decision.reason[0, 0].tolist()], decision.expand[0, 0].tolist()


def test_the_bounds_of_the_bands_and_of_tau():
    policy = DynamicTreePruner(tau=0.25, low=1.0, high=3.0, mid_widths=(2, 3), depth=2, deep=4)
    none = "NOT_PROPOSED"
    assert fate(policy, 0, 0.999, 0.5, 0.3, 0.2) == (["KEPT", none, none], [True, False, False])
    assert fate(policy, 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(policy, 0, 1.999, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(policy, 0, 2.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", "BELOW_TAU"], [True, True, False])
    assert fate(policy, 0, 2.0, 0.5, 0.25, 0.25) == (["KEPT"] * 3, [True] * 3)
    assert fate(policy, 0, 3.0, 0.5, 0.3, 0.2) == (["ENTROPY_CAP"] * 3, [False] * 3)
    assert fate(policy, 0, math.nan, 0.5, 0.3, 0.2)[0] == ["ENTROPY_CAP"] * 3
    assert fate(policy, 1, 1.5, 0.5, 0.3)[0] == ["KEPT"] * 2 and fate(policy, 2, 1.5, 0.5, 0.3)[0] == ["TOO_DEEP"] * 2
    assert fate(policy, 3, 0.5, 0.9)[0] == ["KEPT"] and fate(policy, 4, 0.5, 0.9)[0] == ["TOO_DEEP"]


def test_the_other_policies_one_node_at_a_time():
    none = "NOT_PROPOSED"
    assert fate(Threshold(0.3, 2, 4, 9), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(Threshold(0.31, 3, 4, 9), 0, 1.0, 0.5, 0.3, 0.2) == (
        ["KEPT", "BELOW_TAU", "BELOW_TAU"],
        [True, False, False],
    )
    assert fate(Threshold(0.1, 3, 4, 2), 0, 1.0, 0.5, 0.3, 0.2) == (
        ["KEPT", "KEPT", "OVER_BUDGET"],
        [True, True, False],
    )
    assert fate(BestFirst(9, 0.3, 4), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", "BELOW_TAU"], [True, True, False])
    assert fate(BestFirst(9, 0.1, 4, 0.4), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT"] * 3, [True, False, False])
    assert fate(BestFirst(9, 0.0, 4), 0, 1.0, 0.5, 1e-30) == (["KEPT"] * 2, [True] * 2)
    assert fate(BestFirst(2, 0.1, 4), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(Eagle2(9, 4, 2), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(Eagle2(3, 4, 3), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", "OVER_BUDGET"], [True, True, False])
    assert fate(OptTree(2, 0.5), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(OptTree(2, 0.81), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [False] * 3)
    assert fate(Autoregressive(), 0, 1.0, 0.5, 0.3) == ([none] * 2, [False] * 2)
    assert fate(Uniform(2, 2), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(SpecInfer((1, 2)), 1, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, True, False])
    assert fate(Sequoia(3, 2, (0.6, 0.3)), 0, 1.0, 0.5, 0.3, 0.2) == (["KEPT", "KEPT", none], [True, False, False])
    assert fate(Sequoia(3, 2, (0.6, 0.3)), 1, 1.0, 0.5, 0.3) == (["KEPT", none], [False] * 2)
    assert fate(Linear(3), 0, 1.0, 0.5, 0.3) == (["KEPT", none], [True, False])


def test_what_each_policy_verifies_of_what_it_grew():
    score, kept = torch.tensor([[0.0, -1, -3, -2]]), torch.ones(1, 4, dtype=torch.bool)
    drawn = torch.ones(1, 2, dtype=torch.long)
    two = [[1, 1, 0, 1]]
    for policy in (Threshold(budget=2), DynamicTreePruner(budget=2), BestFirst(2), OptTree(2), Eagle2(3)):
        assert policy.trim(score, kept, drawn).int().tolist() == two, policy
    for policy in (Uniform(), Linear(), SpecInfer(), Sequoia(), Autoregressive()):
        assert policy.trim(score, kept, drawn) is kept


def test_a_price_stays_until_two_sizes_were_seen_and_moves_with_the_second():
    price = NodePrice(tau=0.3).learn(Observation(1, 1, 1.0, 0.1))
    assert price.tau == 0.3
    price = price.learn(Observation(1, 2, 1.0, 0.2))  # 0.1 seconds a node, one token a second
    assert price.tau == pytest.approx(0.7 * 0.3 + 0.3 * 0.1)
