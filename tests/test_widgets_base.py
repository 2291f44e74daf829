"""Shared behaviour of the dashboards: the last value wins, errors show, jobs stop, closing frees everything."""

import asyncio
import gc
import threading
import weakref

import ipywidgets
import pytest
from ipywidgets.widgets.widget import _instances

from treespec.errors import PolicyError
from treespec.widgets import base
from treespec.widgets.base import Job, Panel

SECONDS = 60  # a job may be paused by somebody who measures


class Small(Panel):
    def __init__(self):
        super().__init__()
        self.slider = ipywidgets.IntSlider(description="n")
        self.other = ipywidgets.IntSlider(description="m")
        self.button = ipywidgets.Button(description="go")
        self.seen, self.presses = [], 0
        self.on(self.slider, self.changed, delay=0.01)
        self.on(self.other, self.changed, delay=0.01)
        self.on_click(self.button, self.press)
        self.lay_out(ipywidgets.HBox([self.slider, self.other]), self.button)

    def changed(self):
        self.seen.append((self.slider.value, self.other.value))
        if self.slider.value == 13:
            raise PolicyError("13 <is> refused")

    def press(self):
        self.presses += 1
        if self.presses == 2:
            raise KeyError("<b>lost</b>")


@pytest.fixture
def panel():
    made = Small()
    yield made
    made.close()


def test_of_many_changes_the_last_value_wins(panel):
    async def drag():
        for value in range(1, 9):
            panel.slider.value = value
        panel.other.value = 5  # another slider, the same callback
        assert panel.seen == []
        await asyncio.sleep(0.2)
        assert panel.seen == [(8, 5)]
        panel.slider.value = 3
        await asyncio.sleep(0.2)

    asyncio.run(drag())
    assert panel.seen == [(8, 5), (3, 5)]


def test_without_an_event_loop_callbacks_run_at_once(panel):
    panel.slider.value = 4
    assert panel.seen == [(4, 0)]


def test_errors_show_and_the_next_success_takes_them_away(panel):
    assert panel.notice.layout.display == "none"
    panel.slider.value = 13
    assert isinstance(panel.error, PolicyError) and panel.notice.layout.display != "none"
    assert ">13 &lt;is&gt; refused<" in panel.notice.value and "Traceback" not in panel.notice.value
    panel.slider.value = 12
    assert panel.error is None and panel.notice.value == "" and panel.notice.layout.display == "none"
    panel.button.click()
    panel.button.click()
    assert "KeyError: &#x27;&lt;b&gt;lost&lt;/b&gt;&#x27;" in panel.notice.value  # no markup from an error's text
    assert "<details>" in panel.notice.value and "in press" in panel.notice.value


def test_an_error_inside_a_nested_callback_is_not_cleared_by_the_outer_one(panel):
    panel.attempt(lambda: panel.attempt(lambda: [][1]))
    assert isinstance(panel.error, IndexError)


def test_jobs_stop_when_asked_and_tell_their_end(panel):
    steps, ended, going = [], [], threading.Event()

    def work(job):
        while not job.stopping:
            steps.append(1)
            going.set()

    job = panel.start("count", work, done=lambda: ended.append(panel.closed))
    assert going.wait(SECONDS) and job.running
    panel.stop("count")
    assert panel.wait("count", SECONDS) and steps and ended == [False]


def test_a_new_job_of_the_name_waits_for_the_old_one(panel):
    order, first = [], threading.Event()

    def slow(job):
        first.set()
        while not job.stopping:
            pass
        order.append("old")

    panel.start("one", slow, done=lambda: order.append("old done"))
    first.wait(SECONDS)
    panel.start("one", lambda job: order.append("new"), done=lambda: order.append("new done"))
    assert panel.wait("one", SECONDS)
    assert order == ["old", "new", "new done"]  # what the old one would say at its end no longer counts


def test_a_failing_job_shows_its_error_and_is_over(panel):
    def work(job):
        raise PolicyError("no such thing")

    ended = []
    panel.start("fail", work, done=lambda: ended.append(1))
    assert panel.wait("fail", SECONDS) and ended == [1]
    assert "no such thing" in panel.notice.value


def test_closing_stops_jobs_and_frees_every_widget():
    before = set(_instances)
    panel = Small()
    panel.start("loop", lambda job: job._stop.wait(SECONDS))
    drawn = []
    panel.close()
    assert panel.closed and not panel._jobs["loop"].running
    assert set(_instances) == before, "layouts and styles too"
    panel.slider.value = 7
    panel.button.click()
    panel.draw(lambda: drawn.append(1))
    panel.attempt(lambda: drawn.append(1))
    assert panel.seen == [] and panel.presses == 0 and drawn == []
    panel.close()  # twice is once


def test_running_a_cell_again_closes_what_it_made_before(monkeypatch):
    where = {"now": ("cell-1", "run-1")}
    monkeypatch.setattr(base, "_running_cell", lambda: where["now"])
    before = set(_instances)
    first, beside = Small(), Small()
    where["now"] = ("cell-2", "run-2")
    other = Small()
    assert not (first.closed or beside.closed)
    where["now"] = ("cell-1", "run-3")
    again = Small()
    assert first.closed and beside.closed and not (other.closed or again.closed)
    other.close()
    again.close()
    assert set(_instances) == before and base._made == {}


def test_the_running_cell_is_read_from_the_request(monkeypatch):
    class Shell:
        parent = None

        def get_parent(self):
            return self.parent

    monkeypatch.setattr(Shell, "parent", {"header": {"msg_id": "m"}, "metadata": {"cellId": "c"}})
    monkeypatch.setattr(base, "get_ipython", Shell)
    assert base._running_cell() == ("c", "m")
    monkeypatch.setattr(Shell, "parent", {})
    assert base._running_cell() is None
    monkeypatch.setattr(base, "get_ipython", lambda: None)
    assert base._running_cell() is None


def test_a_job_can_be_waited_for():
    gate = threading.Event()
    job = Job(lambda job: gate.wait(SECONDS))
    assert not job.wait(0.01) and job.running
    gate.set()
    assert job.wait(SECONDS) and not job.running


class Held:
    """Something large that a failing callback had in hand."""


def test_an_error_on_show_keeps_nothing_of_where_it_happened(panel):
    held = []

    def fail():
        big = Held()
        held.append(weakref.ref(big))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("then") from error

    panel.attempt(fail)
    panel.start("fail", lambda job: fail())
    assert panel.wait("fail", SECONDS)
    assert isinstance(panel.error, RuntimeError) and "test_widgets_base.py" in panel.notice.value
    gc.collect()
    assert [big() for big in held] == [None, None]


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), RuntimeError(), MemoryError("full")])
def test_whatever_ends_a_job_is_shown_and_the_buttons_come_back(panel, error):
    def work(job):
        panel.draw(lambda: setattr(panel.button, "disabled", True))
        raise error

    panel.start("fail", work, done=lambda: setattr(panel.button, "disabled", False))
    assert panel.wait("fail", SECONDS)
    assert panel.button.disabled is False and type(error).__name__ in panel.notice.value


def test_a_page_without_a_kernel_has_a_still(panel):
    panel.children = (
        *panel.children,
        ipywidgets.HTML("<b>what was there</b>"),
        ipywidgets.VBox([ipywidgets.HTML("deep")]),
    )
    panel.attempt(lambda: panel.show_error(PolicyError("13 <is> refused")))
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    still = bundle["text/html"]
    assert "Run the cell again" in still and still.index("what was there") < still.index("deep")
