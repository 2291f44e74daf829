"""The pictures of a report, each with its twin in text; drawn by :mod:`treespec.plots`, so plotly is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treespec.cost import CostCurve
from treespec.marks import DEAD
from treespec.page import Figure, Section, Table
from treespec.plots import cost_figure, entropy_figure, frontier_figure, time_figure, token_texts, tree_figure
from treespec.plots.costs import measured_rows, phases
from treespec.plots.rows import named, step_ms
from treespec.policies import DynamicTreePruner, Policy, Throughput, parse_policy
from treespec.provenance import cost_about
from treespec.trace import Replay, explain, replay
from treespec.tree import Reason, TokenTree

if TYPE_CHECKING:
    from treespec.report import Review

Row = Mapping[str, Any]
WIDTH = 1150  # pixels of a figure on a wide page
CLOUD = 400  # most settings that are drawn as dots
NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # of a formula's table


def settings_section(review: Review) -> Section:
    """Where the strategies, the settings that were tried and the recommended one lie."""
    best = {**review.best, "strategy": "YOU"}
    rows = [r for r in review.table["rows"] if r["strategy"] != "best rival"]
    cloud = review.tuning.candidates.head(CLOUD).to_dict("records")
    front = [r for r in review.tuning.front.to_dict("records") if r["policy"] != best["policy"]]
    listed = [*rows, {**best, "strategy": "recommended"}, *front]
    table = Table(
        ("setting", "policy", "tokens/step", "ms per step", "nodes", "speed-up"),
        [
            (r.get("strategy", "on the front"), r["policy"], f"{r['tokens_per_step']:.2f}", f"{step_ms(r):.1f}",
             f"{r['nodes']:.1f}", f"{r['speedup']:.2f}×")
            for r in listed
        ],
    )  # fmt: skip
    note = (
        "The ring is the recommended setting, every dot one that was tried, the lines are equal speed-ups: a tree pays "
        "when it moves up by more than it moves right."
    )
    question = "Is a bigger tree worth its check?"
    drawn = frontier_figure([*rows, *cloud], you=best, title="", width=WIDTH, height=520)
    return Section("settings", question, figures=[Figure("frontier", question, drawn, table, note=note)])


def time_section(review: Review) -> Section:
    """The parts of a step, setting by setting."""
    rows = [r for r in review.table["rows"] if r["strategy"] != "hindsight"]
    rows = [*rows, {**review.best, "strategy": "recommended"}]
    table = Table(
        ("setting", "draft ms", "verify ms", "overhead ms", "step ms", "ms per token"),
        [
            (named(r), *(f"{phases(r)[part]:.1f}" for part in ("draft", "verify", "overhead")), f"{step_ms(r):.1f}",
             f"{step_ms(r) / r['tokens_per_step']:.1f}")
            for r in rows
        ],
    )  # fmt: skip
    question = "Where does a step's time go?"
    drawn = time_figure(rows, title="", width=WIDTH, height=100 + 34 * len(rows))
    note = f"Priced with the cost model {review.cost}; pruning is part of the overhead."
    return Section("time", question, figures=[Figure("time", question, drawn, table, note=note)])


def cost_section(review: Review) -> Section:
    """The cost model that every second on the page is from: what of it was measured."""
    cost, model = review.cost, review.cost.cost
    about = cost_about(model)
    question = "What does the check of n nodes cost, and who says so?"
    facts = {
        "cost model": str(model),
        "from": str(getattr(model, "provenance", "")) or "not said",
        "machine": ", ".join(f"{k} {v}" for k, v in about["machine"].items())
        if isinstance(about.get("machine"), dict)
        else "not said in the cost model's file",
        "plain decoding": f"{1e3 * cost.plain:.2f} ms a token at {cost.context or 0:.0f} cached tokens",
        "around a step": f"{1e3 * cost.overhead:.2f} ms outside both models' forwards",
    }
    most = max(64, *(int(r["most_nodes"]) for r in review.table["rows"] if r["strategy"] != "hindsight"))
    curve = model if cost.batch == 1 else cost
    drawn = cost_figure([curve], most=most, context=cost.context, title="", height=380)
    note = "Filled: timings are in the curve's file. Hollow: a number that the file gives without a timing behind it."
    table = Table(("forward", "rows", "ms", "source"), list(_prices(review)))
    return Section("cost", question, facts=facts, figures=[Figure("curve", question, drawn, table, note=note)])


def _prices(review: Review) -> Iterable[tuple[str, str, str, str]]:
    cost, model = review.cost, review.cost.cost
    curve = model if isinstance(model, CostCurve) else None
    timed = set() if curve is None else measured_rows(curve)
    for n in NODES if curve is None else curve.verify_rows:
        source = "formula" if curve is None else "measured" if n in timed else "given, without a timing"
        yield "target", f"{n:g}", f"{1e3 * cost.verify(int(n)):.2f}", source
    drafted = cost_about(model).get("points", {}).get("draft", [])
    for n in NODES[:5] if curve is None else curve.draft_rows:
        known = any(float(p.get("rows", 0)) == n for p in drafted)
        source = "formula" if curve is None else "measured" if known else "given, without a timing"
        yield "draft", f"{n:g}", f"{1e3 * cost.draft(int(n)):.2f}", source


def shown_policy(review: Review) -> Policy:
    """The policy whose trees are worth looking at: the recommended one, or the article's where that is no tree."""
    # a throughput policy names its cost model, which says neither context nor batch, and may be no name to load
    chosen = parse_policy(review.best["policy"].replace(f"cost={review.cost}", "cost=measured"))
    if isinstance(chosen, Throughput):
        chosen = replace(chosen, cost=review.cost)
    return chosen if chosen.levels > 0 else DynamicTreePruner()


def text_section(review: Review, steps: Replay) -> Section:
    """How sure the draft is along one text, and what was accepted of it."""
    trace = review.trace
    prompt = int(np.bincount(trace.prompt).argmax())
    texts = token_texts(trace, prompt, review.tokenizer)
    rows = np.flatnonzero(trace.prompt == prompt)
    bits = trace.nodes["entropy"][trace.root[rows]]
    taken = _accepted(steps, rows)
    pruner = steps.policy if isinstance(steps.policy, DynamicTreePruner) else DynamicTreePruner()
    drawn = entropy_figure(
        trace, prompt, texts=texts, replay=steps, bands=(pruner.low, pruner.high), title="", width=WIDTH, height=340
    )
    table = Table(
        ("token", "text", "draft's entropy after it, bits", "came as"),
        [
            (str(i), text, "–" if np.isnan(b) else f"{b:.2f}", "accepted guess" if i in taken else "target's own")
            for i, (text, b) in enumerate(zip(texts, [*bits.tolist(), np.nan]))
        ],
    )
    info = trace.prompts[prompt]
    note = (
        f"Prompt {info.id} ({info.category or 'no category'}) under {steps.policy.spec()}; the shaded bands are the "
        f"article's, {pruner.low:g} and {pruner.high:g} bits. The first token is the prompt's forward's own."
    )
    question = "How sure is the draft along a text?"
    return Section("text", question, figures=[Figure("entropy", question, drawn, table, note=note)])


def _accepted(steps: Replay, rows: np.ndarray) -> set[int]:
    """Numbers of a text's tokens that were accepted guesses; token 0 is the root of position 0."""
    out: set[int] = set()
    for row, accepted in zip(steps.rows.tolist(), steps.grown.accepted.tolist()):
        if rows[0] <= row <= rows[-1]:
            first = row - int(rows[0])
            left = int(steps.trace.left[row])
            out |= set(range(first + 1, first + 1 + min(accepted, left)))
    return out


def tree_section(review: Review, steps: Replay) -> Section:
    """A step that went well, an ordinary one and one that was wasted."""
    figures = []
    for i, (step, why) in enumerate(chosen_steps(steps).items()):
        row = int(steps.rows[step])
        policy = steps.policies[step] if steps.policies else steps.policy
        found = explain(steps.trace, row, policy, review.tokenizer)
        tree, info = found.tree, steps.trace.prompts[int(steps.trace.prompt[row])]
        heading = f"{why}: {len(tree.accepted)} of {tree.candidates} guesses accepted"
        where = f"Prompt {info.id}, root at position {int(steps.trace.positions[row])}."
        short = " It asked for nodes beyond the recording; this is the tree without them." if found.truncated else ""
        drawn = tree_figure(tree, bonus=found.bonus, title="", width=WIDTH, height=_height(tree))
        table = Table(("node", "token", "parent", "p", "path P", "entropy, bits", "fate"), list(_nodes(tree)))
        figures.append(Figure(f"tree{i}", heading, drawn, table, heading=heading, note=where + short))
    question = "What did the draft grow, and what died?"
    text = f"Steps of {steps.policy.spec()}, replayed; the star is the target's own token after the accepted path."
    return Section("trees", question, texts=[text], figures=figures)


def chosen_steps(steps: Replay) -> dict[int, str]:
    """Numbers of a few telling steps of a replay, and what each is an example of; none twice."""
    accepted, nodes = steps.grown.accepted.numpy(), steps.grown.nodes.numpy()
    speculated = np.flatnonzero(nodes > 1)
    if not len(speculated):
        return {}
    usual = np.abs(accepted - accepted[speculated].mean()) + 1e-3 * np.abs(nodes - nodes[speculated].mean())
    picks = [
        (max(speculated, key=lambda s: (accepted[s], -nodes[s])), "A step that went well"),
        (min(speculated, key=lambda s: usual[s]), "An ordinary step"),
        (max(speculated, key=lambda s: (accepted[s] == 0, nodes[s])), "A wasted step"),
    ]
    out: dict[int, str] = {}
    for step, why in picks:
        if why != "A wasted step" or accepted[step] == 0:
            out.setdefault(int(step), why)
    return out


def _height(tree: TokenTree) -> int:
    return 130 + 62 * (int(tree.depth.max()) + 1)


def _nodes(tree: TokenTree) -> Iterable[tuple[str, ...]]:
    for i in range(len(tree)):
        bits = float(tree.entropy[i])
        why = Reason(int(tree.reason[i]))
        fate = "accepted" if i in tree.accepted else "verified" if why == Reason.KEPT else DEAD[why].words
        parent = "" if i == 0 else str(int(tree.parent[i]))
        values = (f"{float(tree.logp[i].exp()):.3f}", f"{float(tree.log_path[i].exp()):.4f}")
        yield str(i), tree.label(i), parent, *values, "–" if np.isnan(bits) else f"{bits:.2f}", fate if i else "root"


def picture_sections(review: Review) -> list[Section]:
    """All sections with figures, in the page's order."""
    steps = replay(review.trace, shown_policy(review), review.cost)
    return [
        settings_section(review),
        time_section(review),
        cost_section(review),
        text_section(review, steps),
        tree_section(review, steps),
    ]
