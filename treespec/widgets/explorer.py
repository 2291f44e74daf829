"""TreeExplorer: move a policy's parameters and watch tree, speed and times follow, on a recorded trace."""

from __future__ import annotations

from html import escape
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from treespec.cost import CostModel
from treespec.known import known_tokenizer
from treespec.policies import DynamicTreePruner, Policy, parse_policy
from treespec.prompts import data_dir
from treespec.trace import Trace
from treespec.widgets.base import Job
from treespec.widgets.controls import PolicyControls
from treespec.widgets.handover import as_code, export_html
from treespec.widgets.page import SPEED, TEXT, TREE, ExplorerPage
from treespec.widgets.pricing import CostControls
from treespec.widgets.study import Row, Study

DRAG = 0.02  # seconds after a slider's last move; a redraw takes longer, so the moves meanwhile count as one
SETTINGS = 400  # of the recommendation
REST = 0.6  # seconds without a change from which the settings to compare with are replayed again


class _Stopped(Exception):
    """A job was asked to stop."""


class TreeExplorer(ExplorerPage):
    """A policy's sliders over a recorded trace: the tree at any position, the speed, where the time goes.

    Everything comes from exact replay under the chosen cost model. Keys: arrows on every slider, ``[`` and ``]`` step
    through the positions.

    Args:
        trace: a trace or its file; default the one that comes with the package.
        policy: to begin with, a policy or its command-line form.
        cost: a cost model or its name.
        tokenizer: for the tokens' texts; default the target's, if it is on this machine.
        compare: compute the other strategies and the cloud of tuned settings in the background.

    Raises:
        TreespecError: for an unreadable trace, an unknown policy or cost model.
    """

    def __init__(
        self,
        trace: Trace | str | Path | None = None,
        policy: Policy | str = "dynamic",
        cost: CostModel | str = "measured",
        tokenizer: Any = None,
        compare: bool = True,
    ) -> None:
        trace = data_dir() / "traces" / "greedy.parquet" if trace is None else trace
        trace = trace if isinstance(trace, Trace) else Trace.load(trace)
        pricing = CostControls(cost)
        if tokenizer is None:
            tokenizer = known_tokenizer(str(trace.about.get("target", "")))
        super().__init__(Study(trace, pricing.cost, tokenizer), PolicyControls(policy), pricing)
        self._comparing, self._moved = compare, 0.0
        self._bind()
        self.attempt(self._respec)
        self._survey()

    def _bind(self) -> None:
        self.on(self.controls, self._respec, names="spec", delay=DRAG)
        self.on(self.position, self._reposition, delay=DRAG)
        self.on(self.prompt, self._reprompt)
        self.on(self.pricing, self._reprice, names="spec", delay=DRAG)
        self.on(self.pricing.batch, self._reprice, delay=DRAG)
        self.on(self.hands, self._key, names="pressed")
        self.on(self.hands, self._copied, names="outcome")
        self.on(self.tables, self._list)
        self.on(self.export, self._export)
        for figure in self.figures.values():
            self.on(figure, self._refit, names="wide", delay=DRAG)
        for button, work in (
            (self.back, lambda: self._step(-1)),
            (self.ahead, lambda: self._step(1)),
            (self.recommend, self._recommend),
            (self.stop_button, lambda: self.stop("search")),
            (self.reset, lambda: self.controls.show(DynamicTreePruner())),
            (self.copy, self._copy),
        ):
            self.on_click(button, work)
        for number, points in enumerate(self.figures[TREE].data):
            if points.get("customdata") is not None:
                self.figures[TREE].on_point(number, lambda node: self.attempt(lambda: self._select(int(node))))
        self.figures[TEXT].on_point(0, lambda at: self.attempt(lambda: self._go(int(at))))
        for number in (1, 4):  # the cloud, the named marks
            self.figures[SPEED].on_point(number, lambda spec: self.attempt(lambda: self._take(str(spec))))

    # --- what callbacks do --------------------------------------------------------------------------------------------

    def _respec(self) -> None:
        """Another setting: the tree at once, the rest when its replay is there."""
        policy = self.controls.policy
        self._moved = monotonic()
        self._shown, self.selected = policy, None
        if self.export.value:
            self._export()
        if self.study.knows(policy):
            self.stop("score")
            self._draw_all()
            return
        self._draw_tree()
        self.start("score", lambda job: self._score(job, policy))

    def _score(self, job: Job, policy: Policy) -> None:
        self.study.replay(policy)
        if not job.stopping and policy is self._shown:
            adapted = bool(self.study.replay(policy).policies)  # then the tree is another one
            self.draw(lambda: self._draw_all(tree=adapted))

    def _reposition(self) -> None:
        self.selected = None
        self._draw_tree()
        self._draw_text()

    def _reprompt(self) -> None:
        last = len(self.study.rows_of[self.prompt.value]) - 1
        self.position.value = 0
        self.position.max = self.play.max = last
        self._reposition()

    def _reprice(self) -> None:
        self.stop("survey")
        self.stop("search")
        self.study.price(self.pricing.cost, self.pricing.batch.value)
        self.trail, self.row = [], None
        self._respec()
        self._survey()

    def _key(self) -> None:
        self._step(-1 if self.hands.pressed[0] == "[" else 1)

    def _step(self, by: int) -> None:
        self._go(self.position.value + by)

    def _go(self, to: int) -> None:
        self.position.value = int(np.clip(to, 0, self.position.max))

    def _select(self, node: int) -> None:
        self.selected = None if node == self.selected else node
        self._draw_tree()

    def _take(self, spec: str) -> None:
        self.controls.show(parse_policy(spec))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        """The other strategies and the cloud, one replay after the other beside the sliders."""
        if self._comparing:
            self.start("survey", self._surveying, done=self._surveyed)

    def _surveying(self, job: Job) -> None:
        seen: list[int] = []

        def progress(done: int, total: int, what: str) -> None:
            while not job.stopping and monotonic() - self._moved < REST:  # whoever moves a slider comes first
                sleep(0.05)
            if job.stopping:
                raise _Stopped
            known = len(self.study.named) + len(self.study.cloud)
            self.draw(lambda: self._wait(f"comparing with other settings: {done} of {total}"))
            if seen != [known]:
                seen[:] = [known]
                self.draw(self._draw_speed)

        try:
            self.study.survey(progress)
        except _Stopped:
            return

    def _surveyed(self) -> None:
        self._wait("")
        self._draw_speed()

    def _wait(self, words: str) -> None:
        self.waiting.value = f'<span style="opacity:.7">{escape(words)}</span>'

    def _recommend(self) -> None:
        self.stop("survey")
        self.said.value = ""
        self.bar.value, self.bar.max = 0, SETTINGS
        self.bar.layout.display = self.stop_button.layout.display = ""
        self.recommend.disabled = True
        self.start("search", self._searching, done=self._searched)

    def _searching(self, job: Job) -> None:
        def progress(done: int, total: int, what: str) -> None:
            if job.stopping:
                raise _Stopped
            self.draw(lambda: setattr(self.bar, "value", done))

        try:
            found = self.study.search(SETTINGS, progress)
        except _Stopped:
            self.draw(lambda: self._say("the search was stopped; nothing was changed"))
            return
        self.draw(lambda: self._recommended(found.recommended, found.about))

    def _recommended(self, row: Row, about: dict[str, Any]) -> None:
        low, high = row["held_out"]["speedup_ci"]
        self._say(
            f"recommended of {about['settings']} settings: {row['policy']}, {row['held_out']['speedup']:.2f}× "
            f"({low:.2f} to {high:.2f}) on the {about['prompts']['held_out']} prompts that the search did not see"
        )
        self.controls.show(parse_policy(row["policy"]))

    def _searched(self) -> None:
        self.bar.layout.display = self.stop_button.layout.display = "none"
        self.recommend.disabled = False
        self._wait("")
        self._draw_speed()

    # --- copy, export, table ------------------------------------------------------------------------------------------

    def _say(self, words: str) -> None:
        self.said.value = f"<div>{escape(words)}</div>"

    def _copy(self) -> None:
        self.hands.copy(as_code(self.controls.policy))

    def _copied(self) -> None:
        words, (line, _) = escape(self.hands.outcome[0]), self.hands.clip
        self.said.value = f"<div>{words}: <code>{escape(line)}</code></div>"

    def _export(self) -> None:
        self.exported.value = export_html(self.controls.policy, self.row) if self.export.value else ""
