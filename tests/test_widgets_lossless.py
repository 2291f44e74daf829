"""The laboratory of losslessness: its law is enumerated, its draws are the engine's, its tests pass and fail as they must."""

import re
import threading
from collections import Counter

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances
from scipy import stats

from treespec.exactness import drawn_tree, emitted_law, plain_law, total_variation
from treespec.plots.laws import ALARM
from treespec.rejection import Rrs
from treespec.verify import RULES
from treespec.widgets import LosslessLab
from treespec.widgets.live_figure import bring_plotly
from treespec.widgets.sampling import BIASED, CHOICES, START, BiasedRrs, Tally, Toy, draw, g_test, policy_of, same_law

pytestmark = pytest.mark.thorough

SECONDS = 300  # the machine may be paused
ENOUGH = 250  # texts per side that find the biased rule out


@pytest.fixture(scope="module")
def toy():
    return Toy()


def drawn(toy, rule, count):
    tally = Tally()
    assert list(draw(toy, rule, tally, count, lambda: False)) == list(range(1, count + 1))
    return tally


def test_the_law_is_that_of_the_last_three_tokens(toy):
    law = toy.law()
    assert len(law) == 27 and sum(law.values()) == pytest.approx(1.0)
    text = (2, 0, 1)  # after the prompt: anything, then the text
    p = [toy.target.distribution([START]).tolist(), toy.target.distribution]
    by_hand = sum(
        p[0][first]
        * float(p[1]([START, first])[2] * p[1]([first, 2])[0] * p[1]([2, 0])[1])
        for first in range(3)
    )  # fmt: skip
    assert law[text] == pytest.approx(by_hand)


@pytest.mark.parametrize("rule", RULES)
def test_lossless_rules_meet_the_law(toy, rule):
    tally = drawn(toy, rule, ENOUGH)
    assert g_test(tally.own, toy.law()) > 1e-4
    assert same_law(tally.plain, tally.own) > 1e-4


def test_the_biased_rule_is_found_out(toy):
    tally = drawn(toy, BIASED, ENOUGH)
    assert g_test(tally.own, toy.law()) < ALARM
    assert g_test(tally.plain, toy.law()) > 1e-4 and same_law(tally.plain, tally.own) < 1e-4


@pytest.mark.parametrize("rule, least, most", [(Rrs, 0.0, 1e-12), (BiasedRrs, 0.05, 1.0)])
def test_how_biased_it_is_by_enumeration(toy, rule, least, most):
    """The live rules through every random outcome: the bias is the rule's, not the samples'."""

    def made(chance):
        return rule(chance, chance)

    def after(model):
        return lambda path: model.distribution([START, *path])

    law = emitted_law(made, drawn_tree(made, policy_of(BIASED), after(toy.draft), 2), after(toy.target), 3)
    assert least <= total_variation(law, plain_law(after(toy.target), 3)) <= most


def test_speculation_really_happens(toy, monkeypatch):
    """Texts of the two sides are drawn apart, and the speculative ones by trees."""
    from treespec.decode import Decoding

    nodes = []
    honest = Decoding._verify
    monkeypatch.setattr(Decoding, "_verify", lambda self, kept: nodes.append(len(kept)) or honest(self, kept))
    toy.sample("rrs", 5)
    assert max(nodes) == 7  # 2 + 4 candidates and the root
    nodes.clear()
    toy.sample("rrs", 5, plain=True)
    assert set(nodes) == {1}
    nodes.clear()
    toy.sample("block", 5)
    assert max(nodes) == 3
    assert toy.sample("match", 8) == toy.sample("match", 8)


def test_the_g_test_is_scipys(toy):
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    counts = Counter({(0,): 60, (1,): 20, (2,): 20})
    expected = stats.power_divergence([20, 20, 60], [20, 30, 50], lambda_="log-likelihood").pvalue
    assert g_test(counts, law) == pytest.approx(expected)
    other = Counter({(0,): 40, (1,): 40, (2,): 20})
    table = np.array([[60, 20, 20], [40, 40, 20]])
    expected = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood").pvalue
    assert same_law(counts, other) == pytest.approx(expected)


def test_rare_texts_are_put_together():
    law = {(i,): p for i, p in enumerate((0.005, 0.01, 0.02, 0.465, 0.5))}
    counts = Counter({(0,): 2, (2,): 4, (3,): 94, (4,): 100})
    pooled = stats.power_divergence([6, 94, 100], [7, 93, 100], lambda_="log-likelihood").pvalue
    assert g_test(counts, law) == pytest.approx(pooled)
    assert g_test(Counter({(0,): 1}), law) == 1.0 and same_law(Counter({(0,): 1}), Counter({(1,): 1})) == 1.0
    assert g_test(Counter(), law) == 1.0 and same_law(Counter(), Counter()) == 1.0


@pytest.fixture
def lab():
    made = LosslessLab(rule="match")
    made.batch.options = [*made.batch.options, ("20 texts", 20)]
    made.batch.value = 20
    yield made
    made.close()


def sample(lab):
    lab.draw_button.click()
    assert lab.wait("draw", SECONDS) and lab.error is None, lab.notice.value


def test_figures_and_words_show_the_counts(lab):
    assert "nothing drawn yet" in lab.verdict.value
    sample(lab)
    tally, law = lab.tally, lab.law
    assert tally.samples == tally.plain.total() == 20
    plain, own, exact = lab.bars.figure.data
    assert list(own.y) == [tally.own[text] / 20 for text in law] and list(exact.y) == list(law.values())
    assert list(plain.y) == [tally.plain[text] / 20 for text in law]
    samples, against_plain, against_law = tally.trail[-1]
    assert (samples, against_plain) == (20, same_law(tally.plain, tally.own)) and against_law == g_test(tally.own, law)
    assert list(lab.trail.figure.data[0].x)[-1] == 20 and lab.trail.figure.data[0].y[-1] == pytest.approx(against_law)
    assert "20 texts per side: no difference to be seen" in lab.verdict.value
    assert f"total variation from the law {tally.distance(law):.3f}" in lab.verdict.value
    cells = re.findall(r"<tr><td>(\w+)</td><td>([\d.]+)</td><td>([\d.]+)</td><td>([\d.]+)</td></tr>", lab.table.value)
    assert len(cells) == 27 and cells[0][0] == "aaa" and float(cells[0][3]) == own.y[0]
    assert lab.progress.value == 20 and not lab.draw_button.disabled and lab.stop_button.disabled


def test_drawing_goes_on_where_it_ended_and_starts_over_with_another_rule(lab):
    sample(lab)
    first = lab.tally.own.copy()
    sample(lab)
    assert lab.tally.samples == 40 and first <= lab.tally.own
    lab.rule.value = "rrs"
    assert lab.tally.samples == 0 and lab.tally.trail == [] and sum(lab.bars.figure.data[1].y) == 0
    assert "Rule rrs with policy uniform" in lab.verdict.value
    lab.reset_button.click()
    assert "nothing drawn yet" in lab.verdict.value


def test_a_biased_rule_is_called_biased(lab):
    lab.rule.value, lab.batch.value = BIASED, 500
    sample(lab)
    assert "do not follow the target&#x27;s law: the rule is biased" in lab.verdict.value
    assert lab.trail.figure.data[0].y[-1] < ALARM


@pytest.mark.parametrize("how", ["stop", "reset", "close"])
def test_it_can_be_stopped(lab, monkeypatch, how):
    reached, go = threading.Event(), threading.Event()
    honest = lab.toy.sample

    def gated(rule, seed, plain=False):
        if lab.tally.samples == 3:
            reached.set()
            assert go.wait(SECONDS)
        return honest(rule, seed, plain)

    monkeypatch.setattr(lab.toy, "sample", gated)
    lab.draw_button.click()
    assert reached.wait(SECONDS) and lab.draw_button.disabled and not lab.stop_button.disabled
    if how == "close":
        threading.Timer(0.2, go.set).start()
        lab.close()
        assert not lab._jobs["draw"].running
        return
    (lab.stop_button if how == "stop" else lab.reset_button).click()
    go.set()
    assert lab.wait("draw", SECONDS)
    assert lab.tally.samples == (4 if how == "stop" else 0) and not lab.draw_button.disabled


def test_every_choice_has_its_words(lab):
    assert {value for _, value in lab.rule.options} == set(CHOICES) == {*RULES, BIASED}
    assert "deliberately wrong" in {value: words for words, value in lab.rule.options}[BIASED]


def test_closing_frees_everything():
    bring_plotly()  # stays for the next figures
    before = set(_instances)
    LosslessLab().close()
    assert set(_instances) == before
