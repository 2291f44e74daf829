"""A replay is the live engine, step for step and node for node, for every policy and every kind of draft."""

import dataclasses

import pandas as pd
import pytest
import torch
from conftest import VOCAB, build
from test_head import texts

from treespec import generate
from treespec.cost import CostCurve
from treespec.distill.train_head import new_head
from treespec.drafters import HeadDrafter, MixDrafter, NgramDrafter
from treespec.errors import TraceError
from treespec.pairs import Pair, load_pair
from treespec.policies import POLICIES, BestFirst, Observation, Sequoia, Threshold, Throughput, parse_policy
from treespec.prompts import Prompt, data_dir, mixed_prompts, read_prompts
from treespec.trace import Caps, Sampling, Trace, record, replay
from treespec.trace.fixed import fits
from treespec.tree import Reason

pytestmark = pytest.mark.thorough

NEW = 12
CURVE = CostCurve((1, 8, 32, 128), (1.0, 1.1, 1.6, 4.0), (1, 64), (0.05, 0.3), overhead=0.1, name="curve")
PROMPTS = [Prompt("one", "x", ["5 9 11 20 33"]), Prompt("two", "y", ["40 2 7 7 8 40 2"]), Prompt("three", "x", ["3"])]
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=NEW),
    "coupled": Sampling("coupled", 0.7, 0.9, seed=5, max_new_tokens=NEW),
    "coupled at 1": Sampling("coupled", seed=3, max_new_tokens=NEW),
    "short greedy": Sampling(max_new_tokens=6),
    "short coupled": Sampling("coupled", seed=3, max_new_tokens=6),
}
# settings beside the defaults that reach into every branch; tiny random models are unsure, so thresholds are low
MORE = [
    "linear:gamma=10",
    "linear:gamma=8,confidence=0.2,svip=0.9",
    "threshold:tau=0.02,width=6,depth=5",
    "dynamic:tau=0.01,high=6,low=2.5",
    "dynamic:tau=0.005,high=9,low=4,scope=level,budget=20,mid_widths=1/3",
    "eagle2:total=20,depth=4,top_k=4",
    "opttree:budget=12,delta=0.2",
    "bestfirst:budget=12,grow=0.1",
    "bestfirst:budget=30,floor=0.02,depth=3",
]

WIDE = Caps(floor=1e-4, width=64, nodes=64)


class Words:
    """A tokenizer whose text is numbers."""

    chat_template = None

    def __call__(self, text):
        return [int(word) for word in text.split()]


def pairs():
    target = build("llama")
    head = new_head(target, "tiny", texts(target), VOCAB, seed=0)
    with torch.no_grad():
        for p in (head.out.weight, head.down.weight):
            p.normal_(std=0.2)
    noisy = build("llama")  # a draft that is often right: the target with a little noise
    torch.manual_seed(2)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(0.05 * p.std() * torch.randn_like(p)) if p.dim() > 1 else None
    drafts = {"model": noisy, "ngram": NgramDrafter(order=3), "head": HeadDrafter(head.eval()), "mix": MixDrafter(head)}
    return {name: Pair(target, draft, Words(), "tiny") for name, draft in drafts.items()}


@pytest.fixture(scope="module")
def tiny():
    return pairs()


@pytest.fixture(scope="module")
def traces(tiny, tmp_path_factory):
    """Recorded once: (draft, sampling) -> trace. With this vocabulary nothing is left out but for what caps cut."""
    folder = tmp_path_factory.mktemp("traces")
    made = {}

    def of(draft, sampling, caps=WIDE):
        key = (draft, sampling, caps)
        if key not in made:
            path = folder / f"{len(made)}.parquet"
            record(tiny[draft], PROMPTS, path, sampling=SAMPLINGS[sampling], caps=caps)
            made[key] = Trace.load(path)
        return made[key]

    return of


def live(pair, policy, sampling, prompts=None):
    """``(prompt, position, tokens, nodes, kept tokens by path, widths)`` of every step that the engine really makes."""
    out = []
    for number, prompt in enumerate(prompts or PROMPTS):
        options = SAMPLINGS[sampling].options()
        result = generate(
            pair.target, pair.draft, pair.prompt_ids(prompt.turns[:1]), policy=policy, pad_token_id=0, **options
        )
        for event in result.steps[1:]:
            out.append(
                (
                    number,
                    event.position,
                    tuple(event.tokens),
                    len(event.path),
                    paths(event.tree),
                    len(event.draft_forwards),
                )
            )
    return out


def paths(tree):
    """Kept nodes as token paths, in the order of the tree."""
    kept, _ = tree.kept()
    return [tuple(kept.token[kept.path(i)[1:]].tolist()) for i in range(1, len(kept))]


def replayed(result):
    trace, out = result.trace, []
    for step, row in enumerate(result.rows.tolist()):
        number, count = int(trace.prompt[row]), int(result.tokens[step])
        text = trace.tokens(number)
        at = int(trace.positions[row]) - trace.prompts[number].prompt_tokens
        tokens = tuple(text[at + 1 : at + 1 + count])
        accepted = int(result.grown.accepted[step])
        levels = int(result.grown.levels[step])
        out.append((number, int(trace.positions[row]), tokens, accepted, paths(result.tree(step)), levels))
    return out


STATIC = [
    "uniform",
    "uniform:depth=2,width=4",
    "specinfer:expansion=2/2/1/3",
    "sequoia:budget=24,depth=4,acceptance=0.5/0.2/0.1/0.05",
]
STATIC += [
    "eagle2:total=60,depth=4,top_k=4",
    "opttree:budget=4,delta=0.1,depth=4",
    "throughput:cost=article,width=4,max_depth=4",
]


def policies():
    specs = [name for name in POLICIES if name != "throughput"] + MORE
    made = [pytest.param(parse_policy(spec), id=spec) for spec in specs]
    throughput = [Throughput(CURVE), Throughput(CURVE, budget=24, spread=0.5, max_depth=5)]
    return made + [pytest.param(p, id=f"throughput-{i}") for i, p in enumerate(throughput)]


def same_but_for_names(result, got, want):
    """All figures of a static tree, and its nodes as far as they were recorded."""
    assert result.totals["truncated_share"] == 0
    assert [(*g[:4], g[5]) for g in got] == [(*w[:4], w[5]) for w in want]
    assert all(set(g[4]) <= set(w[4]) for g, w in zip(got, want))
    assert result.grown.nodes.tolist() == [1 + len(w[4]) for w in want]


KINDS = [(draft, sampling) for draft in ("model", "ngram", "head", "mix") for sampling in ("greedy", "coupled")]


@pytest.mark.parametrize("draft, sampling", [*KINDS, ("model", "coupled at 1")])
@pytest.mark.parametrize("policy", policies())
def test_replay_is_the_live_engine(tiny, traces, policy, draft, sampling):
    trace = traces(draft, sampling)
    result = replay(trace, policy)
    want, got = live(tiny[draft], policy, sampling), replayed(result)
    if policy.shape is not None and fits(trace.index, policy.shape):
        return same_but_for_names(result, got, want)
    steps = {step[:2]: step for step in want}
    exact = [i for i in range(len(got)) if not result.grown.truncated[i]]
    assert all(got[i] == steps.get(got[i][:2], got[i]) for i in exact)
    if len(exact) == len(got):
        assert got == want


@pytest.mark.parametrize("draft", ["model", "head", "mix"])
@pytest.mark.parametrize("sampling", ["greedy", "coupled at 1"])
@pytest.mark.parametrize("spec", STATIC[:4])
def test_a_static_tree_is_exact_however_little_was_recorded(tiny, traces, draft, sampling, spec):
    """Its figures are the live engine's, and so are its nodes as far as they were recorded."""
    policy = parse_policy(spec)
    result = replay(traces(draft, sampling, Caps(floor=0.05, depth=5, width=8, nodes=6)), policy)
    want, got = live(tiny[draft], policy, sampling), replayed(result)
    same_but_for_names(result, got, want)
    assert any(len(g[4]) < len(w[4]) for g, w in zip(got, want)), "something was not recorded"


def test_under_top_p_a_node_may_have_fewer_children(traces):
    for sampling, known in (("coupled", False), ("coupled at 1", True), ("greedy", True)):
        assert (traces("mix", sampling).index.everywhere > 0) is known
    assert traces("ngram", "greedy").index.everywhere == 0


def test_a_static_tree_deeper_than_the_recording_is_counted(traces):
    trace = traces("mix", "greedy", Caps(floor=0.05, depth=2, width=8, nodes=6))
    result = replay(trace, "specinfer:expansion=2/2/2/1")
    cut = result.grown.truncated
    assert cut.any() and (result.grown.accepted[cut] == 2).all()
    assert not cut[result.grown.accepted < 2].any()
    wider = replay(trace, "uniform:depth=2,width=9")  # wider than the draft was asked
    assert wider.totals["truncated_share"] > 0.5


@pytest.mark.parametrize("draft", ["model", "ngram", "mix"])
@pytest.mark.parametrize("sampling", ["short greedy", "short coupled"])
def test_where_everything_is_recorded_everything_is_exact(tiny, traces, draft, sampling):
    """All of the first four children down to depth 4: nothing is truncated, not even the widest static tree."""
    trace = traces(draft, sampling, Caps(floor=0.0, depth=4, width=4, nodes=400, narrow=()))
    for spec in STATIC:
        policy = parse_policy(spec)
        result = replay(trace, policy)
        assert replayed(result) == live(tiny[draft], policy, sampling), spec
        assert result.totals["truncated_share"] == 0, spec


@pytest.mark.parametrize("draft, sampling", KINDS)
def test_most_of_it_is_exact(traces, draft, sampling):
    """What the trace is for is not truncated, else the test above would show little."""
    for spec in (
        "plain",
        "linear:gamma=10",
        "threshold",
        "dynamic:tau=0.01,high=6",
        "bestfirst",
        "bestfirst:budget=12",
    ):
        assert replay(traces(draft, sampling), spec).totals["truncated_share"] == 0, (draft, sampling, spec)


def test_accepting_happens(traces):
    assert replay(traces("model", "greedy"), "bestfirst").totals["tokens_per_step"] > 1.5


def test_below_the_floor_is_counted_and_the_rest_is_right(tiny, traces):
    coarse = traces("model", "greedy", Caps(floor=0.05, depth=4, width=8, nodes=16))
    policy = BestFirst(budget=12, floor=0.0, depth=6)
    result = replay(coarse, policy)
    share = result.totals["truncated_share"]
    assert 0 < share < 1
    steps = {step[:2]: step for step in live(tiny["model"], policy, "greedy")}
    exact = [s for s, bad in zip(replayed(result), result.grown.truncated.tolist()) if not bad]
    met = [s for s in exact if s[:2] in steps]
    assert met and all(s == steps[s[:2]] for s in met)
    assert replay(coarse, BestFirst(budget=12, floor=0.05, depth=4)).totals["truncated_share"] == 0


def test_every_position_agrees_and_not_only_the_visited(tiny, traces):
    """Whatever the walk, ``regrow`` says the same of a position alone as among all of them."""
    from treespec.trace.regrow import regrow

    trace = traces("mix", "coupled")
    for policy in (Threshold(0.02), Throughput(CURVE), Sequoia(budget=20)):
        together = regrow(trace.index, torch.arange(len(trace)), policy)
        for row in range(0, len(trace), 7):
            alone = regrow(trace.index, torch.tensor([row]), policy)
            assert not together.at(torch.tensor([row])).differs(alone).any()
            assert bool(alone.truncated) == bool(together.truncated[row])


@pytest.mark.parametrize("other", ["plain", "linear:gamma=3", "threshold:tau=0.3", "dynamic:tau=0.02,high=9"])
def test_a_replay_nearby_changes_the_time_only(traces, other):
    trace = traces("model", "greedy")
    for spec in ("threshold:tau=0.05", "bestfirst:budget=6", "uniform:depth=3,width=2"):
        alone, beside = replay(trace, spec), replay(trace, spec, near=replay(trace, other))
        pd.testing.assert_frame_equal(beside.steps, alone.steps)
        assert [beside.tree(i).parent.tolist() for i in range(5)] == [alone.tree(i).parent.tolist() for i in range(5)]
        assert all(beside.tree(i).reason.tolist() == alone.tree(i).reason.tolist() for i in range(len(alone.rows)))


def test_adaptive_policies_go_step_by_step(traces):
    trace = traces("model", "greedy")
    with pytest.raises(TraceError, match="give a cost model"):
        replay(trace, "dynamic:tau=auto")
    result = replay(trace, "dynamic:tau=auto,high=9", CURVE)
    policy, prompt = parse_policy("dynamic:tau=auto,high=9"), -1
    for row in result.steps.itertuples():
        if row.prompt != prompt:
            prompt, state = row.prompt, policy
        at = [i for i in range(len(trace)) if trace.prompt[i] == prompt and trace.positions[i] == row.position]
        fixed = replay(trace, dataclasses.replace(policy, tau=state.threshold))
        again = {(s.prompt, s.position): s for s in fixed.steps.itertuples()}.get((row.prompt, row.position))
        assert len(at) == 1 and (again is None or (again.nodes, again.accepted) == (row.nodes, row.accepted))
        seconds = row.verify + row.draft + CURVE.overhead
        state = state.after_step(Observation(row.tokens, row.nodes, seconds, row.verify))
    assert result.totals["speedup"] > 0


def test_seconds_and_speedup_are_the_curves(traces):
    result = replay(traces("model", "greedy"), "bestfirst:budget=8", CURVE)
    seconds = 0.0
    for row in result.steps.itertuples():
        seconds += CURVE.verify(row.nodes) + sum(CURVE.draft(int(w)) for w in row.widths.split("/") if w) + 0.1
    totals = result.totals
    assert totals["seconds"] == pytest.approx(seconds)
    assert totals["speedup"] == pytest.approx(int(result.tokens.sum()) * (CURVE.verify(1) + 0.1) / seconds)
    assert replay(traces("model", "greedy"), "plain", CURVE).totals["speedup"] == pytest.approx(1.0)
    sums = result.by_prompt
    assert sums["steps"].sum() == totals["steps"] and sums["tokens"].sum() == result.tokens.sum()
    assert list(sums.index) == [0, 1, 2] and sums["tokens"].tolist() == [NEW - 1] * 3


def test_the_frame_and_the_trees(traces):
    trace = traces("model", "greedy")
    result = replay(trace, "threshold:tau=0.02")
    frame = result.steps
    assert list(frame.columns) == ["prompt", "position", "tokens", "accepted", "nodes", "levels", "widths", "truncated"]
    assert len(frame) == result.totals["steps"]
    for step in range(len(frame)):
        tree = result.tree(step)
        assert tree.candidates + 1 == frame.nodes[step] and len(tree.accepted) == frame.accepted[step]
        assert all(tree.reason[i] == Reason.KEPT for i in tree.accepted)
    assert "steps" in repr(result) and "positions" in repr(trace)


def test_texts_are_the_targets(tiny, traces):
    for sampling in SAMPLINGS:
        trace = traces("model", sampling)
        for number, prompt in enumerate(PROMPTS):
            ids = tiny["model"].prompt_ids(prompt.turns)
            options = SAMPLINGS[sampling].options()
            plain = generate(tiny["model"].target, None, ids, policy="plain", pad_token_id=0, **options)
            assert trace.tokens(number) == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy"])  # coupled held too, and is tested on tiny models
def test_the_embedded_pair_replays_as_it_runs(tmp_path, sampling):
    """SmolLM2 and the shipped draft: the very steps, token for token and node for node."""
    pair = load_pair("smollm2", "mix", fast="cpu")
    prompts = read_prompts(mixed_prompts())[::40]
    record(pair, prompts, tmp_path / "t.parquet", sampling=SAMPLINGS[sampling])
    trace = Trace.load(tmp_path / "t.parquet")
    for spec in ("linear", "threshold", "dynamic", "dynamic:tau=0.02,high=5,low=2", "bestfirst:budget=11,grow=0.1"):
        result = replay(trace, spec)
        assert result.totals["truncated_share"] == 0
        assert replayed(result) == live(pair, parse_policy(spec), sampling, prompts), spec


@pytest.mark.thorough
def test_the_shipped_traces():
    """Of the shipped pair, over all prompts, small enough to ship; what a review looks at first is exact on them."""
    prompts = {p.id: p.category for p in read_prompts(mixed_prompts())}
    for name, sample, least in (("greedy", "greedy", 3000), ("sampled", "coupled", 1000)):
        path = data_dir() / "traces" / f"{name}.parquet"
        trace = Trace.load(path)
        assert path.stat().st_size < 5_000_000 and len(trace) >= least
        assert (trace.about["sample"], trace.about["target"], trace.about["draft"]) == (sample, "smollm2", "mix")
        assert {p.id: p.category for p in trace.prompts} == prompts
        wide = (
            ("bestfirst",) if sample == "greedy" else ()
        )  # drawn children come in the noise's order: see the README there
        for spec in ("plain", "linear", "uniform", "specinfer", "sequoia", "threshold", "dynamic", *wide):
            assert replay(trace, spec).totals["truncated_share"] == 0, (name, spec)
        assert replay(trace, "threshold").totals["tokens_per_step"] > 1.3
