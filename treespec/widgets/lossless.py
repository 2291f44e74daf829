"""The laboratory of losslessness: draw with and without speculation, and watch the G-test; then watch a biased rule."""

from __future__ import annotations

import functools
import math
from html import escape
from time import monotonic

import ipywidgets as w

from treespec.plots.laws import ALARM, law_parts, trail_parts
from treespec.widgets.base import Job, Panel, heading
from treespec.widgets.live_figure import LiveFigure
from treespec.widgets.sampling import BIASED, CHOICES, WORDS, Tally, Toy, draw, g_test, policy_of, same_law

REDRAW = 0.4  # seconds between two drawings
BATCHES = (100, 500, 2000, 10000)
DOUBTFUL = 1e-3  # seen now and then by who looks often
TEXT = "font:13px system-ui,sans-serif;line-height:1.5"
ABOUT = {
    "match": "draw from the target, follow the tree while it holds the draw",
    "coupled": "draft and target share their noise by position",
    "rrs": "test drawn children one by one with p/q",
    "hybrid": "the first child kept, the last one drawn and tested",
    "block": "test a drawn chain as a whole",
    "traversal": "test whole drawn paths, from the leaves up",
    BIASED: "deliberately wrong: p/q tests of children that were not drawn",
}


class LosslessLab(Panel):
    """Does speculation change what the model says? Draw and see.

    A toy target over three tokens writes four of them again and again, plainly and with a token tree, by the live
    engine; the law of the texts is known by enumeration. For a lossless rule all three meet and the p values wander
    between 0 and 1; for the biased one they fall and stay down.

    Args:
        rule: shown first, one of :data:`treespec.widgets.sampling.CHOICES`.

    Attributes:
        tally: texts drawn so far and the p values along the way.
        law: probability of every text.
    """

    def __init__(self, rule: str = "match") -> None:
        super().__init__()
        self.toy, self.tally = Toy(), Tally()
        self.law = self.toy.law()
        self.names = ["".join(WORDS[token] for token in text) for text in self.law]
        self._build(rule)
        self.on(self.rule, self.reset)
        self.on_click(self.draw_button, self.sample)
        self.on_click(self.stop_button, self._stop)
        self.on_click(self.reset_button, self.reset)
        self._show()

    def _build(self, rule: str) -> None:
        self.rule = w.Dropdown(
            options=[(f"{name}: {ABOUT[name]}", name) for name in CHOICES], value=rule, description="rule",
            layout={"width": "520px", "max_width": "100%"},
        )  # fmt: skip
        self.batch = w.Dropdown(
            options=[(f"{n:,} texts", n) for n in BATCHES],
            value=BATCHES[1],
            description="draw",
            layout={"width": "220px"},
        )
        self.draw_button = w.Button(description="Draw", icon="play", button_style="primary")
        self.stop_button = w.Button(description="Stop", icon="stop", disabled=True)
        self.reset_button = w.Button(description="Start over", icon="refresh")
        self.progress = w.IntProgress(value=0, min=0, max=1, layout={"width": "220px"})
        self.verdict = w.HTML(layout={"min_height": "4.5em"})
        self.table = w.HTML()
        self.bars = LiveFigure(law_parts(self.law, {}, {}, self.names))
        self.trail = LiveFigure(trail_parts([]))
        wrap = {"flex_flow": "row wrap", "align_items": "center"}
        self.lay_out(
            heading("Does speculation change what the model says?"),
            w.HBox([self.rule, self.batch], layout=wrap),
            w.HBox([self.draw_button, self.stop_button, self.reset_button, self.progress], layout=wrap),
            self.notice,
            self.verdict,
            w.Box([self.bars, self.trail], layout={"flex_flow": "row wrap"}),
            self.table,
        )

    # --- what a person does -------------------------------------------------------------------------------------------

    def sample(self) -> Job:
        """Draw a batch more, in a thread."""
        self._busy(True)
        self.progress.max, self.progress.value = self.batch.value, 0
        work = functools.partial(self._work, self.rule.value, self.tally, self.batch.value)
        return self.start("draw", work, done=functools.partial(self._busy, False))

    def reset(self) -> None:
        """Forget what was drawn; a draw under way ends and counts no more."""
        self.stop("draw")
        self.tally = Tally()
        self.progress.value = 0
        self._show()

    def _stop(self) -> None:
        self.stop("draw")

    def _busy(self, busy: bool) -> None:
        self.draw_button.disabled, self.stop_button.disabled = busy, not busy

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self, rule: str, tally: Tally, count: int, job: Job) -> None:
        first, drawn = tally.samples, monotonic()
        for number in draw(self.toy, rule, tally, count, lambda: job.stopping):
            if monotonic() - drawn > REDRAW:
                self.draw(functools.partial(self._take, tally, number - first))
                drawn = monotonic()
        self.draw(functools.partial(self._take, tally, tally.samples - first))

    def _take(self, tally: Tally, done: int) -> None:
        if tally is not self.tally:  # started over meanwhile
            return
        if tally.samples and (not tally.trail or tally.trail[-1][0] < tally.samples):
            against = same_law(tally.plain, tally.own), g_test(tally.own, self.law)
            tally.trail.append((tally.samples, *against))
        self.progress.value = done
        self._show()

    def _show(self) -> None:
        self.bars.show(law_parts(self.law, self.tally.plain, self.tally.own, self.names))
        self.trail.show(trail_parts(self.tally.trail))
        self.verdict.value = f'<div style="{TEXT}">{escape(self.said())}</div>'
        self.table.value = self._table()

    def said(self) -> str:
        """The verdict so far, in words."""
        rule, tally = self.rule.value, self.tally
        if not tally.trail:
            return (
                f"Rule {rule} with policy {policy_of(rule).spec()}: nothing drawn yet. Each draw is a text of the toy "
                "target by the live engine; the bars count its last three tokens."
            )
        samples, against_plain, against_law = tally.trail[-1]
        chance = 0.5 * sum(math.sqrt(2 * p * (1 - p) / (math.pi * samples)) for p in self.law.values())
        tests = (
            f"p = {against_law:.2g} against the law, p = {against_plain:.2g} against sampling without speculation; "
            f"total variation from the law {tally.distance(self.law):.3f}, by chance alone about {chance:.3f}"
        )
        head = f"Rule {rule}, {samples:,} texts per side: "
        if against_law < ALARM:
            return f"{head}these texts do not follow the target's law: the rule is biased. {tests}."
        if against_law < DOUBTFUL:
            return f"{head}unlikely, but who looks often sees such values now and then: draw more. {tests}."
        return f"{head}no difference to be seen. {tests}."

    def _table(self) -> str:
        """The histogram as a table, folded away."""
        total = max(self.tally.samples, 1)
        rows = "".join(
            f"<tr><td>{name}</td><td>{p:.4f}</td><td>{self.tally.plain[text] / total:.4f}</td>"
            f"<td>{self.tally.own[text] / total:.4f}</td></tr>"
            for name, (text, p) in zip(self.names, self.law.items())
        )
        heads = "".join(f"<th>{h}</th>" for h in ("text", "law", "without speculation", "with speculation"))
        return (
            f'<details style="{TEXT}"><summary>as a table</summary><table class="dataframe"><thead><tr>{heads}</tr>'
            f"</thead><tbody>{rows}</tbody></table></details>"
        )
