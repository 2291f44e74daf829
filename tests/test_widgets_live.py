"""The live decoder without a browser: text, kinds, bars and trees are the engine's; Stop, measurement, recording."""

import functools
import threading

import pytest
import torch
from ipywidgets.widgets.widget import _instances

import treespec
from treespec.drafters import ModelDrafter
from treespec.pairs import Pair, load_pair
from treespec.policies import parse_policy
from treespec.trace import Trace
from treespec.widgets import LiveDecoder
from treespec.widgets.live_figure import bring_plotly
from treespec.widgets.stepview import PHASES, StepView, step_html

SECONDS = 120  # the machine may be paused
POLICY = "uniform:depth=2,width=2"


@pytest.fixture
def toy():
    return load_pair("toy", "model")


@pytest.fixture
def live(toy):
    made = LiveDecoder(toy, prompt="the cat", policy=POLICY)
    made.new_tokens.value, made.measured.value = 20, False
    yield made
    made.close()


def run(live):
    live.run_button.click()
    assert live.wait("decode", SECONDS)
    assert live.error is None, live.notice.value


def test_what_streams_is_what_generate_gives(live, toy):
    run(live)
    out = toy.generate("the cat", policy=POLICY, max_new_tokens=20)
    assert live.written.tokens == out.tokens and "".join(live.written.texts()) == out.text
    assert [e.tokens for e in live.events] == [e.tokens for e in out.steps]
    kinds = {kind: live.written.count(kind) for kind in ("accepted", "bonus", "plain")}
    assert kinds["accepted"] == sum(len(e.path) for e in out.steps) > 0 and sum(kinds.values()) == 20
    assert f"20 tokens, {out.stats.steps} steps, {out.stats.tokens_per_step:.2f} tokens per step" in live.summary.value
    assert live.run_button.disabled is False and live.stop_button.disabled is True


def test_the_bars_are_the_steps_times(live):
    run(live)
    steps = live.events[1:]
    draft, prune, verify, rest, given = live.bars.figure.data
    assert (
        list(draft.x) == [e.index for e in steps] and list(given.text)[:-1] == [str(len(e.tokens)) for e in steps][:-1]
    )
    assert list(draft.y) == pytest.approx([1e3 * e.times.draft for e in steps])
    assert list(verify.y) == pytest.approx([1e3 * e.times.verify for e in steps])
    sums = [a + b + c + d for a, b, c, d in zip(draft.y, prune.y, verify.y, rest.y)]
    assert sums == pytest.approx([1e3 * e.times.total for e in steps])
    assert live.table.value.count("<td") >= 4 * len(steps) and f"step 1: draft {draft.y[0]:.2f} of" in live.table.value
    assert given.text[-1] == f"<b>▾{len(steps[-1].tokens)}</b>", "the last step is on show"


def test_choosing_a_step_marks_it_everywhere(live):
    run(live)
    live.steps.step.value = 2
    event = live.events[2]
    assert live.steps.event is event and f"Step 2, verified: {len(event.path)} of" in live.steps.tree.value
    assert live.bars.figure.data[-1].text[1].startswith("<b>▾")
    assert live.text.value.count("border-top") == len(event.tokens)
    live.bars.clicked = [0, 3, 1]
    assert live.steps.step.value == 4 and "Step 4, verified" in live.steps.tree.value


def test_a_second_run_replaces_the_first(live, toy):
    run(live)
    live.prompt.value, live.new_tokens.value = "a dog ran", 7
    live.controls.show("linear:gamma=2")
    run(live)
    assert live.written.tokens == toy.generate("a dog ran", policy="linear:gamma=2", max_new_tokens=7).tokens
    assert live.steps.step.max == len(live.events) - 1 and len(live.bars.figure.data[0].x) == len(live.events) - 1


def test_it_measures_against_plain_and_compares_the_texts(live):
    live.measured.value = True
    run(live)
    assert "× plain decoding</b> on this prompt" in live.summary.value
    assert "Output identical to plain decoding: <b>yes, every token id</b>" in live.summary.value
    assert "2 rounds in turns" in live.summary.value


def test_a_text_that_is_not_plain_decodings_is_said_not_to_be(live, monkeypatch):
    """The verdict comes from token ids: a decoder that cheats is found out."""
    live.measured.value = True
    honest = live._decode

    def cheat(asked, job):
        honest(asked, job)
        live.written.tokens[-1] ^= 1

    monkeypatch.setattr(live, "_decode", cheat)
    run(live)
    assert "Output identical to plain decoding: <b><b>no</b></b>" in live.summary.value


def test_sampling_keeps_texts_comparable(live, toy):
    live.measured.value, live.temperature.value = True, 0.8
    run(live)
    same = toy.generate(
        "the cat", policy="plain", rule="coupled", do_sample=True, temperature=0.8, top_k=0, max_new_tokens=20
    )
    assert live.written.tokens == same.tokens != toy.generate("the cat", policy="plain", max_new_tokens=20).tokens
    assert "yes, every token id" in live.summary.value


class Gate:
    """Makes a target's forwards wait for permission once a number of them is over."""

    def __init__(self, model, free):
        self.calls, self.free, self.reached, self.go = 0, free, threading.Event(), threading.Event()
        inner = model.forward

        @functools.wraps(inner)  # the engine reads the signature
        def forward(*args, **kwargs):
            self.calls += 1
            if self.calls > self.free:
                self.reached.set()
                assert self.go.wait(SECONDS)
            return inner(*args, **kwargs)

        model.forward = forward


@pytest.mark.parametrize("how", ["stop", "close", "again"])
def test_stop_and_close_leave_the_models_usable(toy, how):
    expected = toy.generate("the cat", policy=POLICY, max_new_tokens=12).tokens
    live = LiveDecoder(toy, prompt="the cat", policy=POLICY)
    live.new_tokens.value = 400
    gate = Gate(toy.target, free=6)
    live.run_button.click()
    assert gate.reached.wait(SECONDS)
    assert live.run_button.disabled and not live.stop_button.disabled
    if how == "close":
        threading.Timer(0.2, gate.go.set).start()
        live.close()  # waits for the step under way
        assert not live._jobs["decode"].running
    else:
        live.stop_button.click() if how == "stop" else live.attempt(live.run)
        first = live._jobs["decode"]
        gate.go.set()
        if how == "again":
            live.stop("decode")
        assert first.wait(SECONDS) and live.wait("decode", SECONDS)
    if how == "stop":
        assert (
            0 < len(live.written.tokens) < 400
            and live.summary.value.startswith("<div")
            and "stopped: " in live.summary.value
        )
        assert "plain decoding" not in live.summary.value, "a stopped text is not measured"
    gate.go.set()
    assert toy.generate("the cat", policy=POLICY, max_new_tokens=12).tokens == expected
    live.close()


def test_stop_ends_a_measurement(live, toy, monkeypatch):
    live.measured.value, live.new_tokens.value = True, 60
    reached = threading.Event()
    say = live._say

    def listen(text):
        say(text)
        if text.startswith("measuring, 1 of"):
            reached.set()
            live.stop("decode")

    monkeypatch.setattr(live, "_say", listen)
    run(live)
    assert reached.is_set() and "measurement stopped" in live.status.value
    assert len(live.written.tokens) == 60 and "identical" not in live.summary.value


def test_wrong_input_is_one_sentence_and_clears_nothing(live):
    run(live)
    text = live.text.value
    live.prompt.value = "   "
    live.run_button.click()
    assert "the prompt is empty; give some text" in live.notice.value and live.text.value == text
    live.prompt.value = "the cat"
    live.controls.show("dynamic")
    live.controls.parameters["deep"].value = 3
    live.run_button.click()
    assert "deep must be at least depth" in live.notice.value and live.run_button.disabled is False
    live.controls.show(POLICY)
    run(live)
    assert live.notice.layout.display == "none"


def test_a_failure_in_the_thread_shows_and_frees_the_buttons(toy, monkeypatch):
    live = LiveDecoder(Pair(toy.target, None, toy.tokenizer, "toy"), prompt="the cat", policy="linear")
    live.run_button.click()
    assert live.wait("decode", SECONDS)
    assert "policy &#x27;linear&#x27; needs a draft" in live.notice.value and not live.run_button.disabled
    live.close()


def test_recording_is_a_trace_of_this_prompt_and_refuses_to_overwrite(live, tmp_path, toy):
    run(live)
    out = tmp_path / "live.parquet"
    live.file.value = str(out)
    live.record_button.click()
    assert live.wait("record", SECONDS) and live.error is None
    trace = Trace.load(out)
    assert [p.id for p in trace.prompts] == ["live"] and len(trace) == 19 and "recorded 20 tokens" in live.status.value
    replayed = treespec.replay(trace, parse_policy("linear:gamma=2")).totals
    steps = toy.generate("the cat", policy="linear:gamma=2", max_new_tokens=20).stats
    assert replayed["tokens_per_step"] == pytest.approx(steps.tokens_per_step)
    before = out.read_bytes()
    live.record_button.click()
    assert f"{out} exists and is left as it is; name another file" in live.notice.value
    assert out.read_bytes() == before and not live.record_button.disabled


def test_closing_frees_everything(toy):
    bring_plotly()  # stays for the next figures
    before = set(_instances)
    live = LiveDecoder(toy, prompt="the cat", policy=POLICY)
    live.new_tokens.value, live.measured.value = 12, False
    run(live)
    live.close()
    assert set(_instances) == before


# --- the steps' view --------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(toy):
    out = toy.generate("the cat", policy="dynamic:tau=0.2,high=9,budget=5", max_new_tokens=16)
    view = StepView(lambda work: work())
    view.add(out.steps)
    return view


def test_slider_phase_and_play_are_one_place(steps):
    assert steps.frame == 3 * len(steps.events) - 1, "the last step is followed"
    steps.step.value = 1
    assert steps.frame == 5 and steps.play.value == 5 and steps.phase.value == "verified"
    steps.play.value = 6
    assert (steps.step.value, steps.phase.value) == (2, "grown")
    steps.phase.value = "pruned"
    assert steps.frame == steps.play.value == 7
    steps.add(steps.events[-1:])
    assert steps.step.value == 2 and steps.step.max == len(steps.events) - 1, "who looks at a step is left there"


def test_the_phases_show_what_they_say(steps):
    event = next(e for e in steps.events if e.path and (e.tree.reason != 0).any())
    grown, pruned, verified = (step_html(event, phase) for phase in PHASES)
    assert f"grown: {len(event.tree) - 1} candidate" in grown and "pruned: below τ" not in grown and "★" not in grown
    cut = int((event.tree.reason == 1).sum())
    assert f"{cut} below τ" in pruned and f"{event.nodes} of {len(event.tree)} nodes go to the target" in pruned
    assert "accepted 0" in pruned and f"accepted {len(event.path)}" in verified and "★" in verified
    assert f"verified: {len(event.path)} of {event.nodes - 1} candidate" in verified
    assert event.tree.accepted == event.path, "drawing changes no event"


def test_tokens_are_escaped(steps):
    event = steps.events[1]
    event.tree.labels = ["<img src=x>"] * len(event.tree)
    assert "<img" not in step_html(event, "verified")


def test_a_decoder_that_is_stopped_while_it_waits_touches_nothing(toy):
    """Two decoders share a pair: one that is stopped before its turn must not begin a text with the other's drafter."""
    toy.draft = ModelDrafter(toy.draft)
    one, two = (LiveDecoder(toy, prompt="the cat", policy=POLICY) for _ in range(2))
    for decoder in (one, two):
        decoder.new_tokens.value, decoder.measured.value = 20, False
    gate = Gate(toy.target, free=6)
    one.run_button.click()
    assert gate.reached.wait(SECONDS)
    before = gate.calls
    two.run_button.click()
    two.stop_button.click()
    assert two.wait("decode", SECONDS) and gate.calls == before and two.events == []
    assert not two.run_button.disabled and "stopped" in two.status.value and two.error is None
    gate.go.set()
    assert one.wait("decode", SECONDS) and one.error is None and len(one.written.tokens) == 20
    one.close()
    two.close()


@pytest.mark.parametrize("error", [RuntimeError("no <kernel>"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_model_that_raises_is_shown_and_can_be_run_again(live, toy, monkeypatch, error):
    run(live)

    @functools.wraps(type(toy.target).forward)
    def broken(*args, **kwargs):
        raise error

    with monkeypatch.context() as during:
        during.setattr(type(toy.target), "forward", broken)
        for _ in range(2):
            live.run_button.click()
            assert live.wait("decode", SECONDS)
            assert "no &lt;kernel&gt;" in live.notice.value or "ran out of memory" in live.notice.value
            assert live.run_button.disabled is False and live.stop_button.disabled is True
    run(live)
    assert len(live.written.tokens) == 20 and live.notice.value == ""


def test_pressing_run_fifty_times_is_one_text(live, toy):
    for _ in range(50):
        live.run_button.click()
    assert live.wait("decode", SECONDS) and live.error is None
    assert live.written.tokens == toy.generate("the cat", policy=POLICY, max_new_tokens=20).tokens
    assert sum(len(e.tokens) for e in live.events) == 20, "no step of an earlier press is among them"


def test_its_still_holds_the_text_and_the_steps(live):
    run(live)
    still = live._repr_mimebundle_()["text/html"]
    assert live.summary.value in still and live.text.value in still and live.steps.tree.value in still
