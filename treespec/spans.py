"""A text as it was written: every token by who gave it, told apart by underline and tint. Plain HTML, all escaped."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from treespec.events import StepEvent
from treespec.marks import GREEN, GREY, OCHRE

TINT = "2b"  # alpha of a background, so that any page's colour shines through
LINE = "border-bottom:3px"
KINDS = {
    "accepted": (f"{LINE} solid {GREEN};background:{GREEN}{TINT}", "guessed by the draft, accepted"),
    "bonus": (f"{LINE} double {OCHRE};background:{OCHRE}{TINT}", "bonus: given by the target with the check"),
    "plain": (f"{LINE} dotted {GREY}", "given by the target, nothing was guessed"),
}
PAGE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9;font-size:14px"


@dataclass
class Written:
    """The text of a generation, step by step.

    Args:
        tokenizer: decodes the tokens; without one their ids are shown.
    """

    tokenizer: Any = None
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    _spans: list[tuple[str, str, int]] = field(default_factory=list)  # (text, kind, step)
    _shown: str = ""
    _text: str = ""

    def add(self, event: StepEvent) -> None:
        """Take in one step."""
        for k, token in enumerate(event.tokens):
            self.tokens.append(token)
            kind = "accepted" if k < len(event.path) else "bonus" if event.nodes > 1 else "plain"
            self._spans.append((self._next(token), kind, event.index))
        self.finished = event.finished

    def _next(self, token: int) -> str:
        """What the token adds to the text: a difference of growing prefixes, since a character may span tokens."""
        if self.tokenizer is None:
            return f"{token} "
        self._text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        whole = self._text.rstrip("\ufffd")  # half a character waits for its other half
        new = whole[len(self._shown) :]
        self._shown = whole if len(whole) > len(self._shown) else self._shown
        return new

    def texts(self) -> list[str]:
        """What each token adds; half a character is shown, with the last token, only when no other half can come."""
        out = [text for text, _, _ in self._spans]
        if out and self.finished:
            out[-1] += self._text[len(self._shown) :]
        return out

    def html(self, chosen: int | None = None) -> str:
        """The text; tokens of the step ``chosen`` have a line above."""
        spans = []
        for text, (_, kind, step) in zip(self.texts(), self._spans):
            frame = ";border-top:3px solid currentColor;font-weight:600" if step == chosen else ""
            spans.append(f'<span style="{KINDS[kind][0]}{frame}" title="step {step}: {kind}">{escape(text)}</span>')
        return f'<div style="{PAGE}">{"".join(spans)}</div>'

    def count(self, kind: str) -> int:
        """Tokens of a kind."""
        return sum(k == kind for _, k, _ in self._spans)

    def legend(self) -> str:
        """The kinds that occur, each with its number of tokens."""
        counts = {kind: self.count(kind) for kind in KINDS}
        found = [f'<span style="{KINDS[kind][0]}">{KINDS[kind][1]}</span> {n}' for kind, n in counts.items() if n]
        return " &nbsp; ".join(found)
