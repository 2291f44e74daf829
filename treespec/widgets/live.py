"""A text as it is decoded: who gave each token, where each step's time went, every tree grown, pruned and verified."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import ipywidgets as w

from treespec.api import start
from treespec.compare import COMPARABLE, compare
from treespec.errors import TraceError
from treespec.events import Stats, StepEvent
from treespec.pairs import Pair
from treespec.plots import figure_html
from treespec.plots.costs import PHASES as PHASES_OF_TIME
from treespec.plots.steps import step_parts
from treespec.policies import Autoregressive, Policy
from treespec.prompts import Prompt
from treespec.spans import Written
from treespec.trace import PromptInfo, Sampling, record
from treespec.widgets.base import Job, Panel, Work, heading
from treespec.widgets.controls import LABEL, WIDE, PolicyControls
from treespec.widgets.live_figure import LiveFigure
from treespec.widgets.stepview import PHASES, StepView

PROMPT = "Why is the sky blue? Answer in three short sentences, then repeat the second one."
ROUNDS = 2  # of the measurement, each with every decoding once
REDRAW = 0.15  # seconds between two drawings of a text under way
MOST_NEW = 512
LINE = "font:13px system-ui,sans-serif;margin:.2em 0"


@dataclass(frozen=True)
class Asked:
    """What a run was asked for."""

    prompt: str
    policy: Policy
    sampling: Sampling


class _Stopped(Exception):
    """Ends a comparison between two steps."""


class LiveDecoder(Panel):
    """Type a prompt, choose a policy, run: the text streams, coloured by who gave each token.

    Decoding runs in a thread and can be stopped between steps; a stopped or closed decoder leaves the models ready for
    the next call. Afterwards the same prompt is decoded plainly and with the policy, undrawn and in turns, for the
    speed-up and for the comparison of the texts.

    Args:
        pair: target, draft and tokenizer (:func:`treespec.load_pair`).
        prompt: what the box says first.
        policy: what the controls say first.
    """

    def __init__(self, pair: Pair, prompt: str = PROMPT, policy: Policy | str = "dynamic") -> None:
        super().__init__()
        self.pair = pair
        self.asked: Asked | None = None
        self.events: list[StepEvent] = []
        self.written = Written(pair.tokenizer)
        self._marked = -1
        self._build(prompt, policy)
        self.on_click(self.run_button, self.run)
        self.on_click(self.stop_button, self._stop)
        self.on_click(self.record_button, self.record)
        self.on(self.steps, self._mark, names="frame")
        for phase in range(len(PHASES_OF_TIME)):
            self.bars.on_point(phase, self._clicked)
        self._busy(False)

    def _build(self, prompt: str, policy: Policy | str) -> None:
        wide = {"width": "99%"}
        self.prompt = w.Textarea(prompt, placeholder="a user's turn", rows=3, layout=wide)
        self.controls = PolicyControls(policy)
        self.new_tokens = w.IntSlider(64, 1, MOST_NEW, description="new tokens", style=LABEL, layout={"width": WIDE})
        self.temperature = w.FloatSlider(
            value=0.0, min=0.0, max=1.5, step=0.1, description="temperature", style=LABEL, layout={"width": WIDE}
        )
        self.measured = w.Checkbox(True, description="then measure against plain decoding", indent=False)
        self.run_button = w.Button(description="Run", button_style="primary", icon="play")
        self.stop_button = w.Button(description="Stop", icon="stop", tooltip="ends after the step under way")
        self.file = w.Text("live.parquet", description="to file", continuous_update=False, layout={"width": "260px"})
        self.record_button = w.Button(
            description="Record this as a trace", icon="save", layout={"width": "auto"},
            tooltip="decodes the prompt once more and writes what the draft would guess at every position",
        )  # fmt: skip
        self.status = w.HTML()
        self.text = w.HTML(layout={"width": "100%", "min_height": "6em"})
        self.summary = w.HTML(layout={"min_height": "4.5em"})
        self.table = w.HTML()
        self.bars = LiveFigure(step_parts([]))
        self.steps = StepView(self.attempt)
        wrap = {"flex_flow": "row wrap", "align_items": "center"}
        self.lay_out(
            heading("How does a text grow when its next tokens are guessed?"),
            self.prompt,
            self.controls,
            w.HBox([self.new_tokens, self.temperature, self.measured], layout=wrap),
            w.HBox([self.run_button, self.stop_button, self.status], layout=wrap),
            self.notice,
            self.text,
            self.summary,
            w.HBox([self.record_button, self.file], layout=wrap),
            w.HBox([self.bars], layout=wrap),
            self.table,
            heading("What did the draft grow, what was pruned, what did the target accept?"),
            self.steps,
        )

    # --- what a person does -------------------------------------------------------------------------------------------

    def run(self) -> Job:
        """Decode what the controls say; a run under way is stopped first.

        Raises:
            TreespecError: for an empty prompt or parameters that do not fit.
        """
        asked = self._read()
        self.pair.prompt_ids(asked.prompt)  # an empty prompt is refused before anything is cleared
        self.asked = asked
        self.events, self.written, self._marked = [], Written(self.pair.tokenizer), -1
        self.steps.clear()
        self.text.value = self.summary.value = self.table.value = ""
        self.bars.show(step_parts([]))
        self._busy(True)
        return self.start("decode", functools.partial(self._work, asked), done=functools.partial(self._busy, False))

    def record(self) -> Job:
        """Record the last run's prompt, or what the controls say, as a trace of its own.

        Raises:
            TraceError: if the file exists.
        """
        asked, out = self.asked or self._read(), Path(self.file.value.strip())
        if not out.name:
            raise TraceError("name a file to record to, such as live.parquet")
        if os.path.lexists(out):
            raise TraceError(f"{out} exists and is left as it is; name another file")
        self._busy(True, stop=False)
        self._say(f"recording {out} …")
        work = functools.partial(self._record, asked, out)
        return self.start("record", work, done=functools.partial(self._busy, False))

    def _read(self) -> Asked:
        heat = round(float(self.temperature.value), 3)
        drawn: dict[str, Any] = {"kind": "coupled", "temperature": heat} if heat > 0 else {}
        return Asked(self.prompt.value, self.controls.policy, Sampling(max_new_tokens=self.new_tokens.value, **drawn))

    def _stop(self) -> None:
        self.stop("decode")
        self._say("stopping after the step under way …")

    def _busy(self, busy: bool, stop: bool = True) -> None:
        self.run_button.disabled = self.record_button.disabled = busy
        self.stop_button.disabled = not (busy and stop)

    def _say(self, text: str) -> None:
        self.status.value = f'<span style="{LINE}">{escape(text)}</span>'

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _show(self, asked: Asked, work: Work) -> None:
        """Draw for a run, unless another one has begun: the page is that one's then."""
        self.draw(lambda: work() if asked is self.asked else None)

    def _work(self, asked: Asked, job: Job) -> None:
        with _alone(self.pair, job) as ours:
            if not ours:
                self._show(asked, lambda: self._say("stopped"))
                return
            self._decode(asked, job)
            if self.measured.value and not job.stopping and not isinstance(asked.policy, Autoregressive):
                self._measure(asked, job)

    def _decode(self, asked: Asked, job: Job) -> None:
        pair, ids = self.pair, self.pair.prompt_ids(asked.prompt)
        self._show(asked, lambda: self._say(f"reading {len(ids)} tokens …"))
        options = asked.sampling.options()
        decoding = start(pair.target, pair.draft, ids, policy=asked.policy, tokenizer=pair.tokenizer, **options)
        fresh: list[StepEvent] = []
        drawn = 0.0
        for event in decoding:
            event.tree.tokenizer = pair.tokenizer
            fresh.append(event)
            if job.stopping:
                break
            if monotonic() - drawn > REDRAW:
                self._show(asked, functools.partial(self._take, fresh))
                fresh, drawn = [], monotonic()
        self._show(asked, functools.partial(self._take, fresh, "stopped" if job.stopping else "done"))

    def _take(self, events: list[StepEvent], state: str = "") -> None:
        """Draw new steps; ``state`` once no more will come."""
        for event in events:
            self.written.add(event)
        self.events = [*self.events, *events]
        self.steps.add(events)
        self._mark(always=True)
        sums = Stats.of(self.events)
        said = f"{sums.tokens} tokens, {sums.steps} steps, {sums.tokens_per_step:.2f} tokens per step"
        self._say(state or said)
        if state:
            more = f"bonus tokens counted, the prompt's forward not; {sums.nodes:.1f} nodes per check, root included"
            line = f'<div style="{LINE}">{state}: {said} ({more}).</div>'
            self.summary.value = f"{line}<div>{self.written.legend()}</div>"
            points = figure_html(self.bars.figure)
            self.table.value = f'<details style="{LINE}"><summary>the bars as a table</summary>{points}</details>'

    def _measure(self, asked: Asked, job: Job) -> None:
        plain: list[list[int]] = []  # a text per round

        def watch(policy: Policy, event: StepEvent) -> None:
            if isinstance(policy, Autoregressive):
                plain.extend([[]] if event.is_prefill else [])
                plain[-1].extend(event.tokens)
            if job.stopping:
                raise _Stopped

        def progress(done: int, total: int, what: str) -> None:
            self._show(asked, lambda: self._say(f"measuring, {done} of {total} decodings done …"))

        self._show(asked, lambda: self._say("measuring: warming up …"))
        sampling = asked.sampling
        try:
            result = compare(
                self.pair, [Prompt("live", "live", [asked.prompt])], [Autoregressive(), asked.policy],
                rules=(COMPARABLE,), rounds=ROUNDS, max_new_tokens=sampling.max_new_tokens,
                temperature=0.0 if sampling.kind == "greedy" else sampling.temperature, seed=sampling.seed,
                progress=progress, watch=watch,
            )  # fmt: skip
        except _Stopped:
            self._show(asked, lambda: self._say("measurement stopped"))
            return
        same = bool(result["rows"][1]["lossless"]) and plain[0] == self.written.tokens
        self._show(asked, functools.partial(self._conclude, result["rows"], same))

    def _conclude(self, rows: list[dict[str, Any]], same: bool) -> None:
        plain, own = rows
        verdict = "faster" if own["speedup"] > 1 else "slower"
        answer = "yes, every token id" if same else "<b>no</b>"
        self.summary.value += (
            f'<div style="{LINE}"><b>{own["speedup"]:.2f}× plain decoding</b> on this prompt ({verdict}): '
            f"{own['tokens_per_s']:.1f} against {plain['tokens_per_s']:.1f} tokens a second. Measured apart from the "
            f"drawing, after a warm-up, {ROUNDS} rounds in turns, the prompt's forward included, the same engine for "
            f'both; one prompt says little about others.</div><div style="{LINE}">Output identical to plain decoding: '
            f"<b>{answer}</b>.</div>"
        )
        self._say("done")

    def _record(self, asked: Asked, out: Path, job: Job) -> None:
        with _alone(self.pair, job) as ours:
            if not ours:
                return
            infos = record(self.pair, [Prompt("live", "live", [asked.prompt])], out, sampling=asked.sampling)
        self.draw(functools.partial(self._recorded, infos, out))

    def _recorded(self, infos: list[PromptInfo], out: Path) -> None:
        self._say(f"recorded {infos[0].new_tokens} tokens to {out}; look at it with TreeExplorer")

    # --- linked views -------------------------------------------------------------------------------------------------

    def _clicked(self, step: int) -> None:
        self.attempt(lambda: self.steps.go(int(step)))

    def _mark(self, always: bool = False) -> None:
        """Mark the step on show in the text and above the bars."""
        step = self.steps.frame // len(PHASES)
        if step == self._marked and not always:
            return
        self._marked = step
        self.text.value = self.written.html(step)
        self.bars.show(step_parts(self.events, chosen=step))


# a drafter that is not ours may have one state, and times taken beside each other are worth nothing, so a pair decodes
# one text at a time; holds no model alive
_IN_USE: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


@contextmanager
def _alone(pair: Pair, job: Job) -> Iterator[bool]:
    """Wait until no other decoder uses the pair; False for a job that was stopped meanwhile: it must not touch it."""
    lock = _IN_USE.setdefault(pair.target, threading.Lock())
    held = False
    while not (held or job.stopping):
        held = lock.acquire(timeout=0.1)
    try:
        yield held
    finally:
        if held:
            lock.release()
