"""One step of a text at a time: what the draft grew, what the policy pruned, what the target verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as w
import torch
import traitlets

from treespec.draw import STYLE, tree_html
from treespec.events import StepEvent
from treespec.marks import DEAD
from treespec.tree import Reason, visible
from treespec.widgets.base import Work

PHASES = ("grown", "pruned", "verified")
PLAY_MS = 900  # a phase is on show this long
ROOM = "30em"  # kept for the tree, so that what is below does not jump


class StepView(w.VBox):
    """A slider over steps, the three phases of each, a button that plays them, and the tree.

    Args:
        attempt: runs the callbacks, one at a time: :meth:`treespec.widgets.base.Panel.attempt`.

    Attributes:
        events: the steps so far; add with :meth:`add`.
        frame: three times the place of the step on show, plus its phase.
    """

    frame = traitlets.Int(0)

    def __init__(self, attempt: Callable[[Work], None]) -> None:
        super().__init__(layout={"width": "100%"})
        self._setting = False
        self.events: list[StepEvent] = []
        self.step = w.IntSlider(value=0, min=0, max=0, description="step", layout={"width": "420px"})
        self.phase = w.ToggleButtons(options=PHASES, value=PHASES[-1], style={"button_width": "80px"})
        self.phase.tooltips = ["all that the draft guessed", "what the policy cut, and why", "what the target accepted"]
        self.play = w.Play(value=0, min=0, max=0, interval=PLAY_MS, show_repeat=False)
        self.tree = w.HTML(layout={"width": "100%", "min_height": ROOM, "overflow": "auto"})
        self.step.observe(lambda change: attempt(self._moved), "value")
        self.phase.observe(lambda change: attempt(self._moved), "value")
        self.play.observe(lambda change: attempt(self._played), "value")
        self.observe(self._show, "frame")
        controls = w.HBox([self.play, self.step, self.phase], layout={"flex_flow": "row wrap", "align_items": "center"})
        self.children = (controls, self.tree)

    @property
    def event(self) -> StepEvent | None:
        """The step on show."""
        return self.events[self.frame // len(PHASES)] if self.events else None

    def clear(self) -> None:
        """Forget all steps."""
        self.events = []
        self.play.playing = False
        self.step.max = self.play.max = self.frame = 0
        self.tree.value = ""

    def add(self, events: list[StepEvent]) -> None:
        """Take in steps; whoever looks at the last one goes on to the new last one."""
        follow = self.frame // len(PHASES) >= len(self.events) - 1
        self.events = [*self.events, *events]
        self.play.max = len(PHASES) * len(self.events) - 1
        self.step.max = len(self.events) - 1
        if follow:
            self.go(len(self.events) - 1)
        if not self.tree.value:
            self._show()

    def go(self, step: int, phase: str = PHASES[-1]) -> None:
        """Show a step."""
        self.frame = len(PHASES) * max(0, min(step, len(self.events) - 1)) + PHASES.index(phase)

    def _moved(self) -> None:
        if not self._setting:
            self.frame = len(PHASES) * self.step.value + PHASES.index(self.phase.value)

    def _played(self) -> None:
        if not self._setting:
            self.frame = self.play.value

    def _show(self, change: Any = None) -> None:
        step, phase = divmod(self.frame, len(PHASES))
        self._setting = True
        try:
            self.step.value, self.phase.value, self.play.value = step, PHASES[phase], self.frame
        finally:
            self._setting = False
        if self.event is not None:
            self.tree.value = step_html(self.event, PHASES[phase])


def step_html(event: StepEvent, phase: str) -> str:
    """A step's tree in one of its phases, under a sentence that says what happened in it. All text escaped."""
    tree = event.tree
    if phase == "grown":  # as it was before the policy's last word
        tree = dataclasses.replace(tree, reason=torch.full_like(tree.reason, Reason.KEPT), accepted=[])
    elif phase == "pruned":
        tree = dataclasses.replace(tree, accepted=[])
    shown = tree_html(tree, event.bonus if phase == "verified" else None)
    return f'<div style="{STYLE};margin:.4em 0"><b>{escape(SAY[phase](event))}</b></div>{shown}'


def _grown(event: StepEvent) -> str:
    if len(event.tree) == 1:
        return f"Step {event.index}: {'the prompt is read' if event.is_prefill else 'nothing was guessed'}."
    return (
        f"Step {event.index}, grown: {_count(len(event.tree) - 1, 'candidate')} in "
        f"{_count(len(event.draft_forwards), 'draft forward')}, {1e3 * event.times.draft:.1f} ms."
    )


def _pruned(event: StepEvent) -> str:
    dead = {look.words: int((event.tree.reason == why).sum()) for why, look in DEAD.items()}
    said = ", ".join(f"{n} {words}" for words, n in dead.items() if n)
    return (
        f"Step {event.index}, pruned: {said or 'nothing'}; {event.nodes} of {len(event.tree)} nodes go to the target, "
        f"the root included ({1e3 * event.times.prune:.1f} ms)."
    )


def _verified(event: StepEvent) -> str:
    text = ""
    if event.bonus is not None and event.tree.tokenizer is not None:
        text = f" “{visible(str(event.tree.tokenizer.decode([event.bonus])))}”"
    bonus = "the text ends inside the path" if event.bonus is None else f"one bonus token{text}"
    given = f"{len(event.path)} of {_count(event.nodes - 1, 'candidate')} accepted and {bonus}"
    return f"Step {event.index}, verified: {given}, in one target forward of {1e3 * event.times.verify:.1f} ms."


SAY: dict[str, Callable[[StepEvent], str]] = {"grown": _grown, "pruned": _pruned, "verified": _verified}


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"
