"""What all dashboards share: debounced callbacks, errors shown in place, stoppable threads, an end that frees it all.

Callbacks of a notebook run one after another on an event loop, jobs in threads beside it. Both change widgets only
while they hold the panel's lock, so neither sees a figure half drawn by the other.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from html import escape
from typing import Any

import ipywidgets
from IPython import get_ipython

from treespec.errors import TreespecError
from treespec.widgets.hands import Hands
from treespec.widgets.still import still_html

DELAY = 0.2  # seconds without another change before a debounced callback runs
PATIENCE = 60.0  # seconds that close() waits for a job to come to its next stopping place
ALERT = "border-left:4px solid #D55E00;padding:.3em .8em;margin:.3em 0;white-space:pre-wrap"

Work = Callable[[], object]


class Job:
    """Work in a thread that can be asked to stop; ``work`` looks at :attr:`stopping` between its steps.

    Args:
        work: gets this job.
        after: a job to wait for before starting.
    """

    def __init__(self, work: Callable[[Job], None], after: Job | None = None) -> None:
        self._work, self._after, self._stop = work, after, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None
        self._work(self)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._stop.is_set()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end; False if it still runs after ``seconds``."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


class Panel(ipywidgets.VBox):
    """Base of the dashboards: a column of widgets that display, answer and go away as one.

    A subclass builds its widgets, binds them with :meth:`on` and :meth:`on_click`, and calls :meth:`lay_out` at the
    end. Running a notebook cell again closes the panels that its run before made.

    Attributes:
        lock: held by callbacks, and by a job while it changes widgets.
        hands: its keys and the clipboard.
        error: the exception on show, or None.
        closed: whether :meth:`close` was called.
    """

    closed = True  # until the constructor has run

    def __init__(self) -> None:
        super().__init__(layout=ipywidgets.Layout(width="100%", overflow="visible"))
        self.lock = threading.RLock()
        self.error: BaseException | None = None
        self.closed = False
        self.add_class("treespec-panel")
        self.hands = Hands()
        self.notice = ipywidgets.HTML()
        self.notice.layout.display = "none"
        self._depth = 0
        self._asked: dict[Hashable, int] = {}
        self._jobs: dict[str, Job] = {}
        self._unbind: list[Work] = []
        _register(self)

    def lay_out(self, *parts: ipywidgets.Widget) -> None:
        """Set the parts, top to bottom; the notice for errors comes last unless it is among them."""
        self.children = (*parts, *(() if self.notice in parts else (self.notice,)), self.hands)

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def on(self, widget: ipywidgets.Widget, work: Work, *, names: Any = "value", delay: float = 0.0) -> None:
        """Attempt ``work`` when a trait of ``widget`` changes, ``delay`` seconds after the last change.

        Changes of different widgets that lead to the same ``work`` count as one.
        """

        def changed(change: Any) -> None:
            self.later(work, delay) if delay else self.attempt(work)

        widget.observe(changed, names)
        self._unbind.append(lambda: widget.unobserve(changed, names))

    def on_click(self, button: ipywidgets.Button, work: Work) -> None:
        """Attempt ``work`` when the button is pressed."""

        def clicked(_: Any) -> None:
            self.attempt(work)

        button.on_click(clicked)
        self._unbind.append(lambda: button.on_click(clicked, remove=True))

    def later(self, work: Work, delay: float = DELAY, key: Hashable = None) -> None:
        """Attempt ``work`` after ``delay`` seconds, unless asked again by then: the last value wins.

        Where no event loop runs, as in a script, it is attempted at once.

        Args:
            work: what to do.
            delay: seconds.
            key: what counts as the same; default ``work`` itself.
        """
        name = work if key is None else key
        with self.lock:
            turn = self._asked[name] = self._asked.get(name, 0) + 1

        def due() -> None:
            if self._asked.get(name) == turn:  # a number, not a cancelled timer: the next may be asked on another loop
                self.attempt(work)

        try:
            asyncio.get_running_loop().call_later(delay, due)
        except RuntimeError:
            due()

    def attempt(self, work: Work) -> None:
        """Do ``work`` under the lock; its error is shown in the panel, its success takes an older error away."""
        with self.lock:
            if self.closed:
                return
            if self._depth:  # a callback that sets another widget off: one outcome for both
                work()
                return
            self._depth += 1
            try:
                work()
            except Exception as error:
                self.show_error(error)
            else:
                self.show_error(None)
            finally:
                self._depth -= 1

    def draw(self, work: Work) -> None:
        """For jobs: change widgets under the lock, unless the panel was closed meanwhile."""
        with self.lock:
            if not self.closed:
                work()

    def show_error(self, error: BaseException | None) -> None:
        """Show an error: ours as its sentence, others with type, message and a folded traceback; None clears."""
        if error is None and self.error is None:
            return
        self.notice.value = "" if error is None else error_html(error)
        self.error = None if error is None else without_frames(error)
        self.notice.layout.display = "none" if error is None else ""

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[Job], None], done: Work | None = None) -> Job:
        """Run ``work`` in a thread; a job of this name that still runs is stopped and waited for, in that thread.

        Args:
            name: of the job; one of a name runs at a time.
            work: gets the job, to look at :attr:`Job.stopping`; changes widgets through :meth:`draw` only.
            done: attempted at the end, whatever happened, unless the panel was closed or the job replaced.
        """

        def run(job: Job) -> None:
            try:
                failure: BaseException | None = None
                if not job.stopping:
                    work(job)
            except BaseException as error:  # whatever it is, the buttons must not stay as they are
                failure = error
            with self.lock:
                if self.closed or self._jobs.get(name) is not job:
                    return
                if done is not None:
                    self.attempt(done)
                if failure is not None:
                    self.show_error(failure)

        with self.lock:
            before = self._jobs.get(name)
            if before is not None:
                before.stop()
            job = self._jobs[name] = Job(run, after=before)
        return job

    def stop(self, name: str) -> None:
        """Ask the job of this name, if any, to stop."""
        if (job := self._jobs.get(name)) is not None:
            job.stop()

    def wait(self, name: str, seconds: float | None = None) -> bool:
        """Wait for the job of this name; False if it still runs after ``seconds``. Not from a callback."""
        job = self._jobs.get(name)
        return job is None or job.wait(seconds)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """With a still beside the widget: what a page shows whose kernel is gone."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data:
            data["text/html"] = still_html(self)
        return bundle

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the jobs, unbind the callbacks, close every widget inside, layouts and styles included."""
        if self.closed:
            super().close()
            return
        for job in self._jobs.values():
            job.stop()
        with self.lock:
            self.closed = True
        for job in self._jobs.values():
            job.wait(PATIENCE)
        with self.lock:
            for unbind in self._unbind:
                unbind()
            self._unbind.clear()
            for part in _parts(self):
                part.close()
            super().close()
        _forget(self)


def heading(question: str) -> ipywidgets.HTML:
    """A question over a part of a panel, as figures have theirs."""
    style = "font:600 15px system-ui,sans-serif;margin:.5em 0 .2em;line-height:1.3"
    return ipywidgets.HTML(f'<div style="{style}">{escape(question)}</div>')


def error_html(error: BaseException) -> str:
    """An error as HTML: a sentence for ours; type and message, and the traceback on demand, for others."""
    if isinstance(error, TreespecError):
        return f'<div role="alert" style="{ALERT}">{escape(str(error))}</div>'
    trace = escape("".join(traceback.format_exception(error)))
    message = f"{type(error).__name__}: {error}"
    return (
        f'<div role="alert" style="{ALERT}">{escape(message)}<details><summary>where it happened</summary>'
        f'<pre style="overflow:auto;max-height:20em">{trace}</pre></details></div>'
    )


def without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks: their frames would keep caches and models alive as long as it is on show."""
    links, seen = [error], set[int]()
    while links:
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [below for below in (link.__cause__, link.__context__) if below is not None]
    return error


def free(widget: ipywidgets.Widget) -> None:
    """Close a widget and all that it holds; ``Widget.close`` alone leaves children, layouts and styles behind."""
    for part in _parts(widget):
        part.close()
    widget.close()


def _parts(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """Every widget that a widget holds in its traits, innermost first, itself left out."""
    found: dict[int, ipywidgets.Widget] = {}

    def visit(holder: ipywidgets.Widget) -> None:
        for name in holder.keys:
            value = getattr(holder, name)
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, ipywidgets.Widget) and id(part) not in found and part is not widget:
                    found[id(part)] = part
                    visit(part)

    visit(widget)
    return reversed(found.values())


# --- one panel per run of a cell --------------------------------------------------------------------------------------

_made: dict[str, tuple[str, list[Panel]]] = {}  # cell -> (its run, the panels that this run made)


def _running_cell() -> tuple[str, str] | None:
    """Ids of the notebook cell that is being run and of this run of it; None where nobody says."""
    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell, run = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
    return (str(cell), str(run)) if cell and run else None


def _register(panel: Panel) -> None:
    where = _running_cell()
    if where is None:
        return
    cell, run = where
    before, panels = _made.get(cell, (run, []))
    if before != run:
        for old in list(panels):
            old.close()
        panels = []
    _made[cell] = (run, [*panels, panel])


def _forget(panel: Panel) -> None:
    for cell, (run, panels) in list(_made.items()):
        if panel in panels:
            rest = [p for p in panels if p is not panel]
            if rest:
                _made[cell] = (run, rest)
            else:
                del _made[cell]
