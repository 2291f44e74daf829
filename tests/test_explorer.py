"""The explorer's Python side: what its controls do to its figures is what the library computes. No browser."""

import asyncio
import dataclasses
import itertools
import json
import math

import ipywidgets
import numpy as np
import pytest

from treespec.cost import CostCurve, load_cost
from treespec.errors import TraceError
from treespec.export import ENGINES
from treespec.pairs import load_pair
from treespec.policies import DynamicTreePruner, Linear, Sequoia, parse_policy
from treespec.prompts import Prompt
from treespec.scoring import priced, score
from treespec.search import TRUNCATED
from treespec.trace import Sampling, Trace, explain, record
from treespec.widgets import TreeExplorer
from treespec.widgets import explorer as module
from treespec.widgets.handover import as_code
from treespec.widgets.live_figure import bring_plotly
from treespec.widgets.page import SPEED, TEXT, TIME, TREE
from treespec.widgets.pricing import HARDWARE, CostControls
from treespec.widgets.study import Study

pytestmark = pytest.mark.thorough

CURVE = CostCurve((1, 8, 32), (0.01, 0.011, 0.03), (1,), (0.0005,), overhead=0.001, name="quick")
DEAR = CostCurve((1, 2, 32), (0.01, 0.05, 0.5), (1,), (0.02,), overhead=0.001, name="dear")
PROMPTS = [Prompt("one", "x", ["a dog ran"]), Prompt("two", "y", ["the cat"]), Prompt("three", "x", ["on a mat"])]
SPEC = "dynamic:tau=0.03,low=0.8,high=3.0,budget=8"
PATIENCE = 300  # the machine may be busy measuring something


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "t.parquet"
    record(load_pair("toy", "model"), PROMPTS, path, sampling=Sampling(max_new_tokens=16))
    return Trace.load(path)


@pytest.fixture
def explorer(trace):
    made = TreeExplorer(trace, SPEC, CURVE, compare=False)
    assert made.wait("score", PATIENCE)
    tree = explain(trace, made.position.value, parse_policy(SPEC)).tree
    most = max(len(explain(trace, row, parse_policy(SPEC)).tree.reason.unique()) for row in range(15))
    assert len(tree.reason.unique()) == most, "it opens where there is something to see"
    made._go(0)
    yield made
    made.close()


def settle(explorer):
    assert explorer.wait("score", PATIENCE) and explorer.error is None


def ring(explorer):
    you = explorer.figures[SPEED].figure.data[5]
    return you.x[0], you.y[0]


def drawn_nodes(explorer):
    """Nodes with a mark; the dash on a parent is a second one."""
    shown = [t for t in explorer.figures[TREE].figure.data if t.type == "scatter" and t.mode == "markers" and t.name]
    return sorted(int(i) for t in shown for i in (t.customdata if t.customdata is not None else ()))


def expected(trace, spec, cost=CURVE):
    return score(trace, parse_policy(spec), priced(cost, trace)).row(seed=0)


def test_it_opens_with_what_the_library_computes(trace, explorer):
    row = expected(trace, SPEC)
    assert ring(explorer) == pytest.approx((row["step_ms"], row["tokens_per_step"]))
    tree = explain(trace, 0, parse_policy(SPEC)).tree
    assert drawn_nodes(explorer) == list(range(len(tree)))
    bars = explorer.figures[TIME].figure.data
    assert [bar.x[0] for bar in bars[:4]] == pytest.approx([row["draft_ms"], 0, row["verify_ms"], 1.0])
    assert f"{row['speedup']:.2f}×" in explorer.status.value
    drawn = [math.nan if bits is None else bits for bits in explorer.figures[TEXT].figure.data[0].y]
    assert drawn == pytest.approx(trace.nodes["entropy"][trace.root[:15]].tolist(), nan_ok=True)


def test_tau_bands_and_budget_move_ring_tree_bars_and_status(trace, explorer):
    seen = [ring(explorer)]
    for name, value, spec in (
        ("tau", 0.3, "dynamic:tau=0.3,low=0.8,high=3.0,budget=8"),
        ("low/high", (0.5, 1.5), "dynamic:tau=0.3,low=0.5,high=1.5,budget=8"),
        ("budget", 2, "dynamic:tau=0.3,low=0.5,high=1.5,budget=2"),
    ):
        control = explorer.controls.parameters[name]
        values = [v for _, v in control.options] if hasattr(control, "options") else None
        control.value = value if values is None else min(values, key=lambda v: abs(v - value))
        if values is not None:
            spec = spec.replace("tau=0.3", f"tau={control.value:g}")
            value = control.value
        settle(explorer)
        spec = explorer.controls.spec
        row = expected(trace, spec)
        assert ring(explorer) == pytest.approx((row["step_ms"], row["tokens_per_step"]))
        assert drawn_nodes(explorer) == list(range(len(explain(trace, 0, parse_policy(spec)).tree)))
        assert f"{row['tokens_per_step']:.2f} tokens/step" in explorer.status.value
        trail = explorer.figures[SPEED].figure.data[3]
        assert [*trail.x, *trail.y] == pytest.approx([*(x for x, _ in seen), *(y for _, y in seen)])
        seen.append(ring(explorer))
    shades = explorer.figures[TEXT].figure.layout.shapes
    assert (shades[0].y1, shades[1].y1) == (0.5, 1.5)


def test_the_trail_keeps_ten_places(explorer):
    for budget in range(2, 15):
        explorer.controls.show(f"bestfirst:budget={budget}")
        settle(explorer)
    assert len(explorer.trail) == 10 and len(explorer.figures[SPEED].figure.data[3].x) == 10


def test_positions_by_key_button_slider_and_click(trace, explorer):
    explorer.hands.pressed = ["]", 1]
    assert explorer.position.value == 1
    explorer.ahead.click()
    assert explorer.position.value == 2
    explorer.hands.pressed = ["[", 2]
    explorer.back.click()
    explorer.back.click()
    assert explorer.position.value == 0, "not below the first"
    explorer._go(5)
    tree = explain(trace, 5, parse_policy(SPEC)).tree
    assert drawn_nodes(explorer) == list(range(len(tree)))
    mark = explorer.figures[TEXT].figure.data[3]
    assert (mark.x[0], mark.y[0]) == pytest.approx((5, float(trace.nodes["entropy"][trace.root[5]])))


def test_another_prompt(trace, explorer):
    explorer._go(3)
    explorer.prompt.value = 1
    assert explorer.position.value == 0
    row = int(np.flatnonzero(trace.prompt == 1)[0])
    assert drawn_nodes(explorer) == list(range(len(explain(trace, row, parse_policy(SPEC)).tree)))
    tokens = load_pair("toy", "model").tokenizer
    shown = explorer.figures[TEXT].figure.layout.xaxis.ticktext[0]
    assert shown == tokens.decode([trace.tokens(1)[0]]).replace(" ", "␣")


def test_a_node_is_ringed_and_let_go(explorer):
    explorer._select(1)
    assert len(explorer.figures[TREE].figure.data[-1].x) == 1
    explorer._select(1)
    assert not explorer.figures[TREE].figure.data[-1].x


def test_every_policy_has_its_own_controls_and_can_be_drawn(trace, explorer):
    for name in ("plain", "linear", "uniform", "sequoia", "throughput", "eagle2"):
        explorer.controls.choice.value = name
        settle(explorer)
        row = expected(trace, explorer.controls.spec)
        assert ring(explorer) == pytest.approx((row["step_ms"], row["tokens_per_step"]))


def test_a_setting_that_contradicts_itself_says_so_and_leaves_the_figures(explorer):
    before = ring(explorer)
    explorer.controls.parameters["depth"].value = 6
    explorer.controls.parameters["deep"].value = 3
    assert "deep must be at least depth" in explorer.notice.value and explorer.error is not None
    explorer.controls.parameters["deep"].value = 8
    settle(explorer)
    assert explorer.notice.value == "" and ring(explorer) != before


def test_a_bug_is_shown_with_type_and_message(explorer, monkeypatch):
    def broken(*_):
        raise RuntimeError("nobody <expected> this")

    monkeypatch.setattr(explorer.study, "explain", broken)
    explorer._go(2)
    assert "RuntimeError: nobody &lt;expected&gt; this" in explorer.notice.value


def test_the_verdict_is_honest(trace):
    study = Study(trace, DEAR)
    row = study.row(parse_policy("uniform:depth=3,width=3"))
    assert row["speedup"] < 1 and "slower than plain decoding" in study.verdict(row)
    study = Study(trace, CURVE)
    study.named = [*study.named, {"strategy": "A", **study.row(Linear(3))}]
    poor = study.row(parse_policy("dynamic:tau=1.0"))
    assert poor["speedup"] < study.row(Linear(3))["speedup"]
    assert "a chain, linear:gamma=3, gives" in study.verdict(poor)
    assert "chain" not in study.verdict(study.row(Linear(3)))
    far = CostCurve((1, 2), (0.01, 0.011), name="short")
    assert "larger than any that was timed" in Study(trace, far).verdict(Study(trace, far).row(parse_policy(SPEC)))


def test_the_survey_names_the_article_and_the_best_of_every_policy(trace, monkeypatch):
    monkeypatch.setattr("treespec.widgets.study.FIRST", 6)
    monkeypatch.setattr("treespec.widgets.study.MORE", 8)
    study, told = Study(trace, CURVE), []
    study.survey(lambda done, total, what: told.append((done, total)))
    names = [row["strategy"] for row in study.named]
    assert names[:5] == ["plain", "A linear", "B uniform 4×3", "C threshold", "D entropy + threshold"]
    assert "hindsight" in names and "best bestfirst" in names and len(told) > 20
    best = study.best()
    assert best["speedup"] == max(
        r["speedup"]
        for r in (*study.named, *study.cloud)
        if r.get("strategy") != "hindsight" and r["truncated_share"] <= TRUNCATED
    )
    dynamic = next(row for row in study.named if row["strategy"] == "D entropy + threshold")
    assert dynamic["speedup"] == pytest.approx(expected(trace, "dynamic")["speedup"])


def test_the_survey_waits_while_somebody_moves_a_slider(explorer, monkeypatch):
    asked = []

    def survey(progress):
        for i in range(3):
            progress(i, 3, "")
            asked.append(i)

    monkeypatch.setattr(explorer.study, "survey", survey)
    monkeypatch.setattr(module, "REST", 2 * PATIENCE)
    explorer._comparing = True
    explorer.controls.parameters["budget"].value = 7
    explorer._survey()
    assert not explorer.wait("survey", 0.3) and asked == []
    monkeypatch.setattr(module, "REST", 0.0)
    assert explorer.wait("survey", 2 * PATIENCE) and asked == [0, 1, 2]


def test_recommend_searches_and_takes_the_best(trace, explorer, monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", 8)
    explorer.recommend.click()
    assert explorer.wait("search", PATIENCE) and explorer.error is None
    settle(explorer)
    found = explorer.study.tuning.recommended
    assert explorer.controls.spec == found["policy"] and found["policy"] in explorer.said.value
    assert not explorer.recommend.disabled and explorer.bar.layout.display == "none"
    assert len(explorer.figures[SPEED].figure.data[1].x) == len(explorer.study.cloud) > 0


def test_a_search_can_be_stopped(explorer, monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", 100_000)
    explorer.recommend.click()
    explorer.stop_button.click()
    assert explorer.wait("search", PATIENCE)
    assert explorer.study.tuning is None and explorer.controls.spec == SPEC and not explorer.recommend.disabled


def test_another_cost_model_reprices_everything(trace, explorer):
    explorer.pricing.choice.value = "article"
    settle(explorer)
    row = expected(trace, SPEC, load_cost("article"))
    assert ring(explorer) == pytest.approx((row["step_ms"], row["tokens_per_step"])) and explorer.trail == []
    explorer.pricing.choice.value = HARDWARE
    settle(explorer)
    assert explorer.pricing.spec == "a100x4:70b@bf16" and "not a measurement" in explorer.status.value
    explorer.pricing.batch.value = 4
    settle(explorer)
    row = score(trace, parse_policy(SPEC), priced(load_cost("a100x4:70b"), trace, batch=4)).row()
    assert ring(explorer)[0] == pytest.approx(row["step_ms"])


def test_hardware_that_does_not_fit_says_so(explorer):
    explorer.pricing.choice.value = HARDWARE
    explorer.pricing.count.value = 1
    assert "do not fit 1 × A100" in explorer.notice.value and "use at least 2" in explorer.notice.value


def test_reset_copy_export_and_table(explorer):
    explorer.copy.click()
    line, count = explorer.hands.clip
    scope = {}
    exec(line, scope)
    assert count == 1 and scope["policy"] == parse_policy(SPEC)
    explorer.hands.outcome = ["copied", 1]
    assert "copied" in explorer.said.value and "tau=0.03" in explorer.said.value
    explorer.export.value = True
    assert all(f"<b>{engine}</b>" in explorer.exported.value for engine in ENGINES)
    assert "entropy bands and cumulative confidence export nowhere" in explorer.exported.value
    explorer.tables.value = True
    assert "<b" not in explorer.listed.value.split("</table>")[0] and "YOU" in explorer.listed.value
    assert explorer.listed.value.count("<details>") == 4 and "draft step 1" in explorer.listed.value
    explorer.tables.value = False
    assert explorer.listed.value == ""
    explorer.reset.click()
    settle(explorer)
    assert explorer.controls.policy == DynamicTreePruner()


@pytest.mark.parametrize("policy", [DynamicTreePruner(tau="auto", mid_widths=(1, 2)), Sequoia(budget=4), Linear()])
def test_copied_code_rebuilds_the_policy(policy):
    scope = {}
    exec(as_code(policy), scope)
    assert scope["policy"] == policy


def test_it_can_be_shown_without_a_front_end(explorer):
    assert (
        "TreeExplorer" in repr(explorer) and "application/vnd.jupyter.widget-view+json" in explorer._repr_mimebundle_()
    )
    json.dumps([[figure.data, figure.look] for figure in explorer.figures.values()], allow_nan=False)


def test_closing_frees_every_widget(trace):
    live = ipywidgets.widgets.widget._instances
    bring_plotly()  # stays for the next figures
    before = set(live)
    made = TreeExplorer(trace, SPEC, CURVE)
    assert len(set(live) - before) > 50
    made.close()
    assert set(live) - before == set()


def test_a_missing_trace_is_one_sentence(tmp_path):
    with pytest.raises(TraceError, match="there is no trace"):
        TreeExplorer(tmp_path / "none.parquet")


def test_a_given_cost_model_stays_among_the_choices():
    controls = CostControls(dataclasses.replace(CURVE))
    assert controls.cost == CURVE and controls.spec == "quick"
    controls.close()


def test_a_slider_set_fifty_times_replays_the_last_value_and_old_dashboards_keep_still(trace, monkeypatch):
    made = [TreeExplorer(trace, SPEC, CURVE, compare=False) for _ in range(3)]  # a cell without an id, run three times
    for explorer in made:
        settle(explorer)
    calls = []
    whole = Study.replay
    monkeypatch.setattr(
        Study, "replay", lambda self, policy: (calls.append((self, policy.spec())), whole(self, policy))[1]
    )
    tau = made[-1].controls.parameters["tau"]

    async def drag():
        for (_, value), _ in zip(itertools.cycle(tau.options), range(50)):
            tau.value = value
        await asyncio.sleep(0.3)

    asyncio.run(drag())
    settle(made[-1])
    assert {study for study, _ in calls} == {made[-1].study} and {spec for _, spec in calls} == {made[-1].controls.spec}
    for explorer in made:
        explorer.close()


@pytest.mark.parametrize("button", ["recommend", "export", "tables", "copy", "reset", "ahead"])
def test_an_error_behind_any_button_is_shown_and_the_button_comes_back(explorer, monkeypatch, button):
    def broken(*args, **kwargs):
        raise RuntimeError("nobody <expected> this")

    explorer.controls.parameters["budget"].value = 5
    settle(explorer)
    for name in ("search", "explain"):
        monkeypatch.setattr(explorer.study, name, broken)
    for name in ("export_html", "as_code"):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr("treespec.widgets.page.table_html", broken)
    widget = getattr(explorer, button)
    if hasattr(widget, "click"):
        widget.click()
    else:
        widget.value = True
    explorer.wait("search", PATIENCE)
    assert "RuntimeError: nobody &lt;expected&gt; this" in explorer.notice.value
    assert widget.disabled is False and explorer.bar.layout.display == "none"


def test_its_still_holds_the_figures_points(explorer):
    still = explorer._repr_mimebundle_()["text/html"]
    assert explorer.status.value in still and still.count("<details>") >= 4 and "tokens in" in still
