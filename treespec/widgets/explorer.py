"""TreeExplorer: move a policy's parameters and watch tree, speed and times follow, on a recorded trace."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as w
import numpy as np

from treespec.cost import CostModel
from treespec.pairs import known_tokenizer
from treespec.plots import figure_html, table_html, token_texts
from treespec.plots.costs import frontier_parts, step_ms, time_parts
from treespec.plots.texts import entropy_parts
from treespec.plots.trees import tree_parts
from treespec.policies import DynamicTreePruner, Policy, parse_policy
from treespec.prompts import data_dir
from treespec.trace import Trace
from treespec.widgets.base import Job, Panel
from treespec.widgets.controls import PolicyControls
from treespec.widgets.handover import as_code, export_html
from treespec.widgets.hands import Hands
from treespec.widgets.live_figure import LiveFigure
from treespec.widgets.pricing import CostControls
from treespec.widgets.study import Row, Study

DRAG = 0.05  # seconds after a slider's last move; a redraw takes longer, so the moves meanwhile count as one
TRAIL = 10  # places of the ring that stay visible
SETTINGS = 400  # of the recommendation
TREE, SPEED, TEXT, TIME = "tree", "speed", "text", "time"
TALL = {TREE: 430, SPEED: 430, TEXT: 320, TIME: 320}


class _Stopped(Exception):
    """A job was asked to stop."""


class TreeExplorer(Panel):
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
        self.study = Study(trace, pricing.cost, tokenizer)
        super().__init__()
        self.add_class("treespec-panel")
        self.controls, self.pricing = PolicyControls(policy), pricing
        self.trail: list[tuple[float, float]] = []
        self.row: Row | None = None
        self.selected: int | None = None
        self._shown: Policy = self.controls.policy
        self._compare = compare
        self._build_choices()
        self._build_buttons()
        self._build_figures()
        self._bind()
        self._arrange()
        self.attempt(self._respec)
        self._survey()

    # --- what is on the page ------------------------------------------------------------------------------------------

    def _build_choices(self) -> None:
        prompts = self.study.trace.prompts
        options = [(f"{p.id} ({p.category})", i) for i, p in enumerate(prompts) if p.positions]
        self.prompt = w.Dropdown(options=options, description="prompt", layout=w.Layout(width="260px"))
        self.prompt.style = {"description_width": "50px"}
        last = len(self.study.rows_of[self.prompt.value]) - 1
        self.position = w.IntSlider(max=last, description="position", layout=w.Layout(width="300px"))
        self.position.style = {"description_width": "60px"}
        small = w.Layout(width="36px")
        self.back = w.Button(description="◄", tooltip="position back, key [", layout=small)
        self.ahead = w.Button(description="►", tooltip="position ahead, key ]", layout=small)
        self.play = w.Play(max=last, interval=900, layout=w.Layout(width="90px"), show_repeat=False)
        w.jslink((self.play, "value"), (self.position, "value"))
        self.hands = Hands(listen=["[", "]"])

    def _build_buttons(self) -> None:
        def button(words: str, tip: str) -> w.Button:
            return w.Button(description=words, tooltip=tip, layout=w.Layout(width="auto"))

        self.recommend = button("recommend", "search for the fastest setting on this trace at this cost")
        self.stop_button = button("stop", "stop the search")
        self.stop_button.layout.display = "none"
        self.bar = w.IntProgress(layout=w.Layout(width="120px", display="none"))
        self.reset = button("reset", "back to the article's setting")
        self.copy = button("copy", "a line of Python that rebuilds this policy, to the clipboard")
        self.export = w.ToggleButton(
            description="export", tooltip="this setting for other engines", layout={"width": "auto"}
        )
        self.tables = w.ToggleButton(description="table", tooltip="the figures' data as text", layout={"width": "auto"})
        self.status, self.said, self.detail = w.HTML(), w.HTML(), w.HTML()
        self.exported, self.listed = w.HTML(), w.HTML()
        self.waiting = w.HTML()

    def _build_figures(self) -> None:
        study, rows = self.study, self.study.named
        tree = study.explain(self._shown, int(study.rows_of[self.prompt.value][0]))
        self.figures = {
            TREE: LiveFigure(tree_parts(tree.tree, bonus=tree.bonus, height=TALL[TREE])),
            SPEED: LiveFigure(frontier_parts(rows, height=TALL[SPEED])),
            TEXT: LiveFigure(entropy_parts(study.trace, self.prompt.value, texts=self._texts(), height=TALL[TEXT])),
            TIME: LiveFigure(time_parts(rows, height=TALL[TIME])),
        }

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
        for button, work in (
            (self.back, lambda: self._step(-1)),
            (self.ahead, lambda: self._step(1)),
            (self.recommend, self._recommend),
            (self.stop_button, lambda: self.stop("search")),
            (self.reset, lambda: self.controls.show(DynamicTreePruner())),
            (self.copy, self._copy),
        ):
            self.on_click(button, work)
        for number in range(len(self.figures[TREE].figure.data)):
            if self.figures[TREE].parts[0][number].get("customdata") is not None:
                self.figures[TREE].on_point(number, lambda node: self.attempt(lambda: self._select(int(node))))
        self.figures[TEXT].on_point(0, lambda at: self.attempt(lambda: self._go(int(at))))
        for number in (1, 4):  # the cloud, the named marks
            self.figures[SPEED].on_point(number, lambda spec: self.attempt(lambda: self._take(str(spec))))

    def _arrange(self) -> None:
        wrap = w.Layout(flex_flow="row wrap", align_items="center", width="100%")
        top = w.Box([self.pricing, self.prompt, self.position, self.back, self.ahead, self.play], layout=wrap)
        figures = w.Box(list(self.figures.values()), layout=w.Layout(flex_flow="row wrap", width="100%"))
        buttons = w.Box(
            [self.recommend, self.stop_button, self.bar, self.reset, self.copy, self.export, self.tables, self.waiting],
            layout=wrap,
        )
        self.lay_out(
            *(top, self.controls, self.notice, self.status, buttons, self.said, figures),
            *(self.detail, self.exported, self.listed, self.hands),
        )

    # --- what callbacks do --------------------------------------------------------------------------------------------

    def _respec(self) -> None:
        """Another setting: the tree at once, the rest when its replay is there."""
        policy = self.controls.policy
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
            self.draw(self._draw_all)

    def _draw_all(self) -> None:
        row = self.study.row(self._shown)
        before, self.row = self.row, {**row, "strategy": "YOU"}
        if before is not None and before["policy"] != row["policy"]:
            self.trail = [*self.trail, (step_ms(before), before["tokens_per_step"])][-TRAIL:]
        self._draw_tree()
        self._draw_text()
        self._draw_speed()

    def _draw_speed(self) -> None:
        """Ring, bars and status: what other settings and the cost model have a say in."""
        if self.row is None:
            return
        named = self.study.named
        parts = frontier_parts([*named, *self.study.cloud], you=self.row, trail=self.trail, height=TALL[SPEED])
        self.figures[SPEED].show(parts)
        rows = [self.row, *(r for r in named if r["strategy"] in ("plain", "D entropy + threshold"))]
        best = self.study.best()
        if len(self.study.settings) > 1 and best["policy"] not in {r["policy"] for r in rows[1:]}:
            rows.append({**best, "strategy": f"best: {best['policy'].partition(':')[0]}"})
        self.figures[TIME].show(time_parts(rows, height=TALL[TIME]))
        words = escape(self.study.verdict(self.row))
        style, where = "font-size:14px;line-height:1.5", escape(self.study.provenance())
        self.status.value = f'<div style="{style}" title="{where}"><b>{words}</b></div>'
        self._list()

    def _draw_tree(self) -> None:
        found = self.study.explain(self._shown, self._row)
        parts = tree_parts(found.tree, bonus=found.bonus, selected=self.selected, height=TALL[TREE])
        self.figures[TREE].show(parts)
        said = self.study.place(self._shown, self._row)
        if found.truncated:
            said = "the policy wants more here than was recorded; " + said
        self.detail.value = f'<div style="opacity:.8">{escape(said)}</div>'

    def _draw_text(self) -> None:
        policy, study = self._shown, self.study
        bands = (policy.low, policy.high) if isinstance(policy, DynamicTreePruner) else None
        replay = study.replay(policy) if study.knows(policy) else None
        self.figures[TEXT].show(
            entropy_parts(
                study.trace,
                self.prompt.value,
                texts=self._texts(),
                replay=replay,
                bands=bands,
                position=self.position.value,
                height=TALL[TEXT],
            )
        )

    @property
    def _row(self) -> int:
        return int(self.study.rows_of[self.prompt.value][self.position.value])

    def _texts(self) -> list[str]:
        return token_texts(self.study.trace, self.prompt.value, self.study.tokenizer)

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
        if self._compare:
            self.start("survey", self._surveying, done=self._surveyed)

    def _surveying(self, job: Job) -> None:
        seen: list[int] = []

        def progress(done: int, total: int, what: str) -> None:
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

    def _list(self) -> None:
        if not self.tables.value:
            self.listed.value = ""
            return
        rows = [*([self.row] if self.row else []), *self.study.named]
        parts = [f"<h4>The article's table, and YOU</h4>{table_html(rows)}"]
        for shown_figure in self.figures.values():
            title = shown_figure.figure.layout.title.text
            parts.append(f"<details><summary>{title}</summary>{figure_html(shown_figure.figure)}</details>")
        self.listed.value = "".join(parts)
