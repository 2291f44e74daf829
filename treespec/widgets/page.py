"""The explorer's page: its widgets, where they lie, and how its figures are drawn. What they do is in ``explorer``."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as w

from treespec.plots import figure_html, table_html, token_texts
from treespec.plots.costs import time_parts
from treespec.plots.frontier import frontier_parts
from treespec.plots.rows import step_ms
from treespec.plots.texts import entropy_parts
from treespec.plots.trees import tree_parts
from treespec.policies import DynamicTreePruner, Policy
from treespec.widgets.base import Panel
from treespec.widgets.controls import PolicyControls
from treespec.widgets.live_figure import LiveFigure
from treespec.widgets.pricing import CostControls
from treespec.widgets.study import Row, Study

TRAIL = 10  # places of the ring that stay visible
LOOKED_AT = 24  # positions, for the one to begin with
TREE, SPEED, TEXT, TIME = "tree", "speed", "text", "time"
TALL = {TREE: 430, SPEED: 430, TEXT: 320, TIME: 320}
LEAST = 390  # pixels of a figure: two fit beside each other in a notebook beside the file browser


class ExplorerPage(Panel):
    """Widgets and drawing of :class:`treespec.widgets.explorer.TreeExplorer`.

    Args:
        study: what is shown.
        controls: of the policy.
        pricing: of the cost model.
    """

    def __init__(self, study: Study, controls: PolicyControls, pricing: CostControls) -> None:
        super().__init__()
        self.study, self.controls, self.pricing = study, controls, pricing
        self.trail: list[tuple[float, float]] = []
        self.row: Row | None = None
        self.selected: int | None = None
        self._shown: Policy = controls.policy
        self._build_choices()
        self._build_buttons()
        self._build_figures()
        self._arrange()

    # --- what is on the page ------------------------------------------------------------------------------------------

    def _build_choices(self) -> None:
        prompts = self.study.trace.prompts
        options = [(f"{p.id} ({p.category})", i) for i, p in enumerate(prompts) if p.positions]
        self.prompt = w.Dropdown(options=options, description="prompt", layout=w.Layout(width="260px"))
        self.prompt.style.description_width = "50px"
        last = len(self.study.rows_of[self.prompt.value]) - 1
        self.position = w.IntSlider(max=last, description="position", layout=w.Layout(width="300px"))
        self.position.style.description_width = "60px"
        small = w.Layout(width="36px")
        self.back = w.Button(description="◄", tooltip="position back, key [", layout=small)
        self.ahead = w.Button(description="►", tooltip="position ahead, key ]", layout=small)
        self.play = w.Play(max=last, interval=900, layout=w.Layout(width="90px"), show_repeat=False)
        self._link = w.jslink((self.play, "value"), (self.position, "value"))
        self.hands.listen = ["[", "]"]

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
        self.position.value = self._telling()
        tree = study.explain(self._shown, self._row)
        self.figures = {
            TREE: LiveFigure(tree_parts(tree.tree, bonus=tree.bonus, height=TALL[TREE]), LEAST),
            SPEED: LiveFigure(frontier_parts(rows, height=TALL[SPEED]), LEAST),
            TEXT: LiveFigure(
                entropy_parts(study.trace, self.prompt.value, texts=self._texts(), height=TALL[TEXT]), LEAST
            ),
            TIME: LiveFigure(time_parts(rows, height=TALL[TIME]), LEAST),
        }

    def _telling(self) -> int:
        """A position to begin with: of the first some, where the tree has most to tell."""
        rows = self.study.rows_of[self.prompt.value][:LOOKED_AT].tolist()
        trees = [self.study.explain(self._shown, row).tree for row in rows]
        told = [(len(tree.reason.unique()), len(tree.accepted), -i) for i, tree in enumerate(trees)]
        return -max(told)[2]

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
            *(self.detail, self.exported, self.listed),
        )

    def close(self) -> None:
        """Free everything; the link between player and slider is no part of the page."""
        if hasattr(self, "_link"):  # else it was refused before there was a page
            self._link.close()
        super().close()

    # --- drawing ------------------------------------------------------------------------------------------------------

    def _draw_all(self, tree: bool = True) -> None:
        """Everything; without the tree where it stands already and only its place in the walk became known."""
        row = self.study.row(self._shown)
        before, self.row = self.row, {**row, "strategy": "YOU"}
        if before is not None and before["policy"] != row["policy"]:
            self.trail = [*self.trail, (step_ms(before), before["tokens_per_step"])][-TRAIL:]
        if tree:
            self._draw_tree()
        else:
            self._tell()
        self._draw_text()
        self._draw_speed()

    def _draw_speed(self) -> None:
        """Ring, bars and status: what other settings and the cost model have a say in."""
        if self.row is None:
            return
        named = self.study.named
        rows = [*named, *self.study.cloud]
        self.figures[SPEED].show(frontier_parts(rows, you=self.row, trail=self.trail, **self._room(SPEED)))
        rows = [self.row, *(r for r in named if r["strategy"] in ("plain", "D entropy + threshold"))]
        best = self.study.best()
        if len(self.study.settings) > 1 and best["policy"] not in {r["policy"] for r in rows[1:]}:
            rows.append({**best, "strategy": f"best: {best['policy'].partition(':')[0]}"})
        self.figures[TIME].show(time_parts(rows, **self._room(TIME)))
        words = escape(self.study.verdict(self.row))
        style, where = "font-size:14px;line-height:1.5", escape(self.study.provenance())
        self.status.value = f'<div style="{style}" title="{where}"><b>{words}</b></div>'
        self._list()

    def _room(self, name: str) -> dict[str, Any]:
        """Pixels that a figure has."""
        return {"width": self.figures[name].wide, "height": TALL[name]}

    def _refit(self) -> None:
        """Labels are placed for a width; the page has told another one."""
        self._draw_tree()
        self._draw_text()
        self._draw_speed()

    def _draw_tree(self) -> None:
        found = self.study.explain(self._shown, self._row)
        parts = tree_parts(found.tree, bonus=found.bonus, selected=self.selected, **self._room(TREE))
        self.figures[TREE].show(parts)
        self._found = found
        self._tell()

    def _tell(self) -> None:
        """What the tree on show is in the policy's walk."""
        found = self._found
        said = self.study.place(self._shown, self._row)
        if found.truncated:
            said = f"the policy wants more here than was recorded; {said}"
        if found.missing:
            said = f"{found.missing} more nodes are verified, too improbable to have been recorded; {said}"
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
                **self._room(TEXT),
            )
        )

    @property
    def _row(self) -> int:
        return int(self.study.rows_of[self.prompt.value][self.position.value])

    def _texts(self) -> list[str]:
        return token_texts(self.study.trace, self.prompt.value, self.study.tokenizer)

    def _list(self) -> None:
        if not self.tables.value:
            self.listed.value = ""
            return
        rows = [*([self.row] if self.row else []), *self.study.named]
        parts = [f"<h4>The article's table, and YOU</h4>{table_html(rows)}"]
        for shown_figure in self.figures.values():
            title = shown_figure.look["title"]["text"]
            parts.append(f"<details><summary>{title}</summary>{figure_html(shown_figure.figure)}</details>")
        self.listed.value = "".join(parts)
