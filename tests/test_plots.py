"""The figures show what the library computes, in the marks of the package, and nothing of a token becomes markup."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from treespec import Reason, TokenTree
from treespec.cost import CostCurve, typed_curve
from treespec.draw import tree_html
from treespec.events import Stats
from treespec.marks import ACCEPTED, DEAD, KEPT, STRATEGIES, level_entropy, places
from treespec.plots import (
    cost_figure,
    entropy_figure,
    figure_html,
    frontier_figure,
    step_figure,
    table_html,
    time_figure,
    token_texts,
    tree_figure,
)
from treespec.plots.costs import measured_rows, phases
from treespec.plots.laws import law_figure, trail_figure
from treespec.plots.rows import plain_ms
from treespec.plots.style import safe
from treespec.plots.teaching import bars_figure, lines_figure
from treespec.plots.trees import KINDS, tree_parts
from treespec.policies import POLICIES
from treespec.trace import Caps, PromptInfo, Trace, replay
from treespec.trace.schema import COLUMNS

NASTY = "<b>$x$</b>&"


def every_reason():
    reasons = [0, 0, 0, *(int(r) for r in DEAD)]
    tree = TokenTree.from_lists(range(8), [-1, 0, 0, 1, 1, 1, 1, 1], [0.0] + [-0.5] * 7, reason=reasons)
    tree.accepted = [1]
    tree.entropy[:2] = torch.tensor([1.0, 2.0])
    return tree


def with_symbol(figure, symbol):
    return [t for t in figure.data if t.type == "scatter" and t.marker.symbol == symbol]


def trace_by(figure, mark):
    return figure.data[len(figure.data) - 2 - len(KINDS) + KINDS.index(mark)]


def row(policy="bestfirst", ms=100.0, tokens=2.0, plain=80.0, **more):
    parts = {"verify_ms": 0.7 * ms, "draft_ms": 0.2 * ms, "step_ms": ms, "nodes": 9.0}
    return {"policy": policy, "tokens_per_step": tokens, "speedup": tokens * plain / ms, **parts, **more}


def test_every_node_is_drawn_once_with_the_mark_of_its_fate():
    figure = tree_figure(every_reason(), bonus=99)
    drawn = {mark: list(trace_by(figure, mark).customdata) for mark in KINDS}
    assert sorted(i for nodes in drawn.values() for i in nodes) == list(range(8))
    assert drawn[ACCEPTED] == [1] and drawn[KEPT] == [2]
    for node, why in enumerate(DEAD, start=3):
        assert drawn[DEAD[why]] == [node]
        assert f"pruned: {DEAD[why].words}" in trace_by(figure, DEAD[why]).hovertext[0]
    looks = {(trace_by(figure, m).marker.symbol, trace_by(figure, m).marker.color) for m in KINDS}
    assert len(looks) == len(KINDS) - 1, "colour and shape differ, but for the two light dots of what lies too far"


def test_the_cap_is_a_dash_on_the_parent_and_the_bonus_a_star_below_the_last_accepted():
    tree = every_reason()
    figure = tree_figure(tree, bonus=99)
    dash = with_symbol(figure, "line-ew")[0]
    assert list(dash.customdata) == [1] and "2.00 bits" in dash.hovertext[0]
    star = with_symbol(figure, "star")[0]
    x, depth = places(tree, bonus=True)
    assert (star.x[0], star.y[0]) == (x[-1], 2.0) and "99: bonus" in star.hovertext[0]
    assert not with_symbol(tree_figure(tree), "star")[0].x


def test_draft_steps_show_the_weighted_entropy_of_what_they_expanded():
    tree = TokenTree.from_lists(
        [1, 2, 3, 4], [-1, 0, 0, 1], [0, math.log(0.75), math.log(0.25), 0], [4.0, 1.0, 3.0, math.nan]
    )
    assert level_entropy(tree) == pytest.approx([4.0, 0.75 * 1 + 0.25 * 3])
    bars = next(t for t in tree_figure(tree).data if t.type == "bar")
    assert list(bars.x) == pytest.approx([4.0, 1.5])


@pytest.mark.parametrize(("nodes", "fan"), [(4, 2), (48, 3), (120, 3), (340, 4)])
def test_labels_never_overlap_and_give_way_above_eighty(nodes, fan):
    tree = TokenTree.from_lists(range(nodes + 1), [-1, *((i - 1) // fan for i in range(1, nodes + 1))])
    tree.labels = ["considerable"] * (nodes + 1)
    traces, layout = tree_parts(tree, bonus=5)
    texts = next(t for t in traces if t.get("mode") == "text" and "xaxis" not in t)
    assert bool(texts["text"]) == (nodes + 1 <= 80)
    span = layout["xaxis"]["range"]
    pixels = (620 - 16 - 122) / (span[1] - span[0])
    rows = {}
    for x, y, text in zip(texts["x"], texts["y"], texts["text"]):
        rows.setdefault(round(y), []).append((x * pixels, 5.5 * len(text)))
    for found in rows.values():
        found.sort()
        for (a, wide), (b, other) in itertools.pairwise(found):
            assert b - a >= (wide + other) / 2


def test_token_texts_cannot_become_markup():
    tree = TokenTree.from_lists([1, 2], [-1, 0])
    tree.labels = [NASTY, NASTY]
    shown = str(tree_figure(tree, bonus=2).to_dict())
    assert "<b>$" not in shown and safe(NASTY) in shown and "$" not in safe(NASTY)
    assert "<script" not in table_html([row("<script>", strategy="<script>")])


def test_the_frontier_puts_rows_where_they_are_and_iso_lines_where_speed_ups_are_equal():
    rows = [
        row("plain", 80.0, 1.0, strategy="plain"),
        row("dynamic", 90.0, 2.0, strategy="D"),
        row(ms=200.0, tokens=2.1),
    ]
    you = row("linear", 120.0, 1.8)
    figure = frontier_figure(rows, you=you, trail=[(100.0, 1.5), (110.0, 1.6)])
    isos, cloud, front, trail, marked, ring = figure.data
    assert plain_ms(rows) == pytest.approx(80.0)
    lines = [(isos.x[i : i + 2], isos.y[i : i + 2]) for i in range(0, len(isos.x), 3)]
    speed = [(y[0] / x[0] * 80, y[1] / x[1] * 80) for x, y in lines]
    assert all(a == pytest.approx(b) for a, b in speed) and 1.0 in [pytest.approx(a) for a, _ in speed]
    assert list(marked.x) == [80.0, 90.0] and list(marked.text) == ["plain", "D"]
    assert list(marked.marker.symbol) == [STRATEGIES["plain"].symbol, STRATEGIES["dynamic"].symbol]
    assert (list(cloud.x), list(cloud.customdata)) == ([200.0], ["bestfirst"])
    assert (ring.x[0], ring.y[0]) == (120.0, 1.8) and list(trail.x) == [100.0, 110.0]
    assert list(front.x) == [80.0, 90.0, 200.0] and list(front.y) == [1.0, 2.0, 2.1]


def test_the_front_leaves_out_the_bound_of_hindsight():
    rows = [row("plain", 80.0, 1.0, strategy="plain"), row("x", 10.0, 9.0, strategy="hindsight")]
    assert list(frontier_figure(rows).data[2].x) == [80.0]


def test_phases_add_up_to_the_step():
    rows = [row(strategy="YOU"), {**row(), "prune_ms": 4.0}]
    assert phases(rows[0]) == pytest.approx({"draft": 20.0, "prune": 0.0, "verify": 70.0, "overhead": 10.0})
    assert phases(rows[1]) == pytest.approx({"draft": 20.0, "prune": 4.0, "verify": 70.0, "overhead": 6.0})
    figure = time_figure(rows)
    assert sum(bar.x[0] for bar in figure.data[:4]) == pytest.approx(100.0)
    assert len({bar.marker.pattern.shape for bar in figure.data[:4]}) == 4, "told apart without colour too"
    assert "50.0 ms a token: 1.60×" in figure.data[4].text[0]


def test_every_policy_has_a_mark_of_its_own():
    assert set(STRATEGIES) == set(POLICIES)
    assert len({(m.symbol, m.colour) for m in STRATEGIES.values()}) == len(STRATEGIES)


def test_the_table_names_what_rows_know_and_leaves_out_the_rest():
    html = table_html([row(strategy="YOU", speedup_ci=[1.5, 1.7], truncated_share=0.25)])
    assert "1.60× (1.50 to 1.70)" in html and "25.0 %" in html and "YOU †" in html and "font-weight:bold" in html
    assert "held out" not in html
    assert "truncated" not in table_html([row()])


def recorded(entropies, truth):
    """A trace of one text; at every position the draft guesses token 7, which is right where ``truth`` says so."""
    columns = {name: [] for name in COLUMNS.names if name != "prompt"}
    for i, (bits, right) in enumerate(zip(entropies, truth)):
        for node in (0, 1):
            values = dict(position=10 + i, node=node, parent=node - 1, depth=node, token=7, rank=0, logp=-0.1 * node)
            values |= dict(
                entropy=math.nan if node else bits, offered=-1 if node else 1, is_true=not node or right, room=9
            )
            for name, value in values.items():
                columns[name].append(value)
    nodes = {name: np.array(v, COLUMNS.field(name).type.to_pandas_dtype()) for name, v in columns.items()}
    count = len(entropies)
    info = PromptInfo(0, "one", "x", 10, count + 1, 7)
    about = {"caps": {**dataclasses.asdict(Caps(depth=1)), "narrow": [10, 4]}, "sample": "greedy"}
    left = np.arange(count, 0, -1, dtype=np.int32)
    return Trace(about, [info], nodes, np.arange(0, 2 * count, 2), np.zeros(count, np.int32), left)


def test_entropy_along_the_text_with_accepted_runs_underlined():
    trace = recorded([0.5, 3.0, 1.5, 2.0], [True, False, True, False])
    found = replay(trace, "linear:gamma=1")
    assert found.tokens.tolist() == [2, 2]
    figure = entropy_figure(trace, 0, replay=found, bands=(1.0, 2.5), position=2)
    line, accepted, given, ring = figure.data
    assert list(line.y) == [0.5, 3.0, 1.5, 2.0] and list(line.customdata) == [0, 1, 2, 3]
    verdicts = ["sure, one child", "lost, no child", "a few children", "a few children"]
    assert all(v in said for v, said in zip(verdicts, line.hovertext))
    centres = [[(a + b) / 2 for a, b in zip(t.x[::3], t.x[1::3])] for t in (accepted, given)]
    assert centres == [[1.0, 3.0], [0.0, 2.0, 4.0]]
    assert (ring.x[0], ring.y[0]) == (2, 1.5)
    assert [(s.y0, s.y1) for s in figure.layout.shapes][:2] == [(0.0, 1.0), (1.0, 2.5)]
    assert token_texts(trace, 0) == ["7"] * 5


def test_where_the_draft_was_not_asked_nothing_is_drawn_and_json_stays_valid():
    figure = entropy_figure(recorded([0.5, math.nan], [True, True]), 0, bands=(1.0, 2.5), position=1)
    assert figure.data[0].y == (0.5, None) and "was not asked" in figure.data[0].hovertext[1]
    json.dumps(figure.to_dict(), allow_nan=False, default=np.ndarray.tolist)


def test_cost_curves_tell_measured_points_from_others(tmp_path):
    curve = CostCurve((1, 8, 32), (0.01, 0.02, 0.05), name=str(tmp_path / "c.json"))
    curve.save(tmp_path / "c.json", points={"verify": [{"rows": 1}, {"rows": 8}]})
    assert measured_rows(CostCurve.load(tmp_path / "c.json")) == {1.0, 8.0}
    figure = cost_figure([curve, typed_curve("1:10 8:30")], most=32)
    names = [t.name.removeprefix(str(tmp_path)) for t in figure.data]
    assert names[1:3] == ["/c.json: measured", "/c.json: estimate"] and names[-1].endswith("given, not measured here")
    assert list(figure.data[1].x) == [1, 8] and list(figure.data[1].y) == pytest.approx([10, 20])
    relative = cost_figure([curve], most=32, relative=True)
    assert relative.data[0].y[0] == pytest.approx(1.0) and relative.data[0].y[-1] == pytest.approx(5.0)


def test_a_figure_as_text_has_a_line_per_point():
    html = figure_html(tree_figure(every_reason(), bonus=99))
    assert html.count("<tr>") == 1 + 8 + 1 + 1 + 2  # head, nodes, star, dash, entropy bars
    assert "pruned: over budget" in html and Reason.OVER_BUDGET in DEAD


def strict(figure):
    """What the figure sends to a page, which must be JSON without NaN."""
    return json.dumps(figure.to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0])
def test_a_tree_of_any_numbers_is_drawn(dtype, value):
    plain = every_reason()
    logs = {name: getattr(plain, name).clone() for name in ("logp", "log_path", "entropy")}
    for name in logs:
        logs[name][3:6] = value
        logs[name] = logs[name].to(dtype).requires_grad_()
    tree = dataclasses.replace(plain, **logs)
    assert tree.logp.dtype == torch.float32 and not tree.logp.requires_grad
    strict(tree_figure(tree, bonus=3, selected=4))
    page = tree_html(tree, 3)
    assert (
        page.count("<circle") + page.count("<rect") >= 2
        and 'r="nan"' not in page
        and "inf" not in page.partition("<title>")[0]
    )
    repr(tree)


@pytest.mark.parametrize("broken", [{"tokens_per_step": 0.0}, {"step_ms": 0.0}, {"step_ms": math.nan}, {"tokens_per_step": math.inf},
                                    {"verify_ms": math.nan}, {"draft_ms": torch.tensor(3.0, dtype=torch.bfloat16)}], ids=str)  # fmt: skip
def test_rows_without_steps_or_numbers_leave_the_others_drawn(broken):
    good, bad = row(strategy="A", ms=50.0), row(strategy="B", speedup_ci=[math.nan, math.nan]) | broken
    for rows in ([good, bad], [bad]):
        for you in (None, bad, good):
            strict(frontier_figure(rows, you=you))
        strict(time_figure(rows))
    shown = frontier_figure([good, bad]).data[4]
    assert shown.x[0] == 50.0 and len(shown.x) == (2 if set(broken) <= {"verify_ms", "draft_ms"} else 1)
    table_html([good, bad])


def test_steps_of_nothing():
    none = Stats.of([])
    assert none.tokens_per_step == none.nodes == none.tokens_per_second == 0.0 and none.per_step_ms("draft") == 0.0
    json.dumps(none.as_dict(), allow_nan=False)
    strict(step_figure([]))


def test_teaching_figures_take_tensors_and_gaps():
    ys = torch.tensor([1.0, math.nan, 3.0, math.inf], dtype=torch.bfloat16).requires_grad_()
    figure = lines_figure(
        "?", {"a": (torch.arange(4), ys), "b": ([1, 2], [torch.tensor(0.5), -math.inf])}, x="x", y="y"
    )
    strict(figure)
    assert list(figure.data[0].y) == [1.0, None, 3.0, None] and list(figure.data[1].y) == [0.5, None]
    strict(lines_figure("?", {"a": ([0, 1], [math.nan] * 2)}, x="x", y="y", log_y=True))
    bars = bars_figure(
        "?", {"a": torch.tensor(2.0).bfloat16(), "b": math.nan}, unit="ms", intervals={"a": (1.0, math.inf)}
    )
    strict(bars)
    assert list(bars.data[0].x) == [2.0, 0.0] and [a.text for a in bars.layout.annotations] == ["2", "–"]
    strict(law_figure({(0,): 0.5, (1,): 0.5}, {}, {}, ["a", "b"]))
    strict(trail_figure([(10, math.nan, 0.5), (20, 0.1, math.inf)]))
