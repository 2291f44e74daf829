"""Text by origin: accepted, bonus and plain tokens, and characters that span tokens."""

import re

import pytest

from treespec import StepEvent, TokenTree
from treespec.events import StepTimes
from treespec.pairs import load_pair
from treespec.spans import KINDS, Written


def step(index, tokens, accepted=0, nodes=1, finished=False):
    tree = TokenTree.root_only(0)
    return StepEvent(index, 5, tree, list(range(1, accepted + 1)), tokens, tokens[-1], nodes, [], StepTimes(), finished)


def kinds(html):
    return re.findall(r'title="step (\d+): (\w+)">([^<]*)<', html)


def test_who_gave_each_token():
    written = Written()
    for event in (step(0, [7]), step(1, [8, 9, 10], accepted=2, nodes=6), step(2, [11]), step(3, [12, 13], 2, 4)):
        written.add(event)
    html = written.html(chosen=1)
    assert kinds(html) == [
        ("0", "plain", "7 "), ("1", "accepted", "8 "), ("1", "accepted", "9 "), ("1", "bonus", "10 "),
        ("2", "plain", "11 "), ("3", "accepted", "12 "), ("3", "accepted", "13 "),  # a stop: no bonus
    ]  # fmt: skip
    assert html.count("border-top") == 3, "the chosen step's tokens are marked"
    assert [written.count(kind) for kind in KINDS] == [4, 1, 2]
    assert "accepted</span> 4" in written.legend() and "nothing was guessed</span> 2" in written.legend()


class Halves:
    """Two tokens make one character, as byte-level tokenizers do."""

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4], [2, 4], [4], [3, 4]])
def test_characters_that_span_tokens_are_shown_whole(cuts):
    written, start = Written(Halves()), 0
    data = "aé".encode() + b"<"
    for index, end in enumerate(cuts):
        written.add(step(index, list(data[start:end]), finished=end == len(data)))
        assert "\ufffd" not in written.html()
        start = end
    assert written.texts() == ["a", "", "é", "<"] and "&lt;</span>" in written.html()


def test_half_a_character_at_the_end_is_shown_as_such():
    written = Written(Halves())
    written.add(step(0, list("aé".encode()[:2]), finished=True))
    assert written.texts() == ["a", "\ufffd"]


def test_the_texts_make_the_text():
    pair = load_pair("toy", "model")
    out = pair.generate("the cat", policy="uniform:depth=2,width=2", max_new_tokens=12)
    written = Written(pair.tokenizer)
    for event in out.steps:
        written.add(event)
    assert "".join(written.texts()) == out.text and written.tokens == out.tokens
    alone = sum(len(event.tokens) for event in out.steps if event.nodes == 1)  # the prefill, and where no room is left
    assert written.count("plain") == alone > 0 and sum(written.count(kind) for kind in KINDS) == 12
