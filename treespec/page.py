"""A self-contained HTML page out of sections: what :mod:`treespec.report` says, how it is laid out and locked down.

Everything is escaped by jinja2; figures travel as JSON in blocks that no browser runs. The page's policy names its two
scripts by their hashes and forbids every request, so that even text that slipped through could run or load nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Table:
    """Text in rows; the first cell of each names it."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def sides(self) -> list[str]:
        """How each column is set: figures to the right, words to the left."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.heads))]
        figures = [all(not cell or cell == "–" or cell[0].isdigit() for cell in column) for column in columns]
        return ["figures" if i and figure else "words" for i, figure in enumerate(figures)]


@dataclass(frozen=True)
class Figure:
    """A plotly figure with its twin in text.

    Args:
        name: unique on the page, an identifier.
        question: what it answers, in words.
        figure: of plotly.
        table: the same as text.
        heading: above it; "" for none.
        note: below it.
    """

    name: str
    question: str
    figure: Any
    table: Table
    heading: str = ""
    note: str = ""

    @property
    def height(self) -> int:
        """Pixels, so that the page does not jump when the figure is drawn."""
        return int(self.figure.layout.height or 450)

    @property
    def json(self) -> Markup:
        """The figure as JSON that is safe inside HTML."""
        return htmlsafe_json_dumps(self.figure, dumps=lambda figure, **_: figure.to_json())


@dataclass(frozen=True)
class Tile:
    """One number that has to be seen."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Command:
    """A line for a shell, and why one would run it."""

    why: str
    line: str


@dataclass(frozen=True)
class Section:
    """One question of the page with whatever answers it, shown in the order of the fields."""

    name: str
    question: str
    answer: str = ""
    tiles: Sequence[Tile] = ()
    texts: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    points: Sequence[str] = ()
    commands: Sequence[Command] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()
    after: Sequence[str] = ()


def render(question: str, made: str, sections: Sequence[Section]) -> str:
    """The page as HTML that needs nothing beside itself.

    Args:
        question: its title.
        made: by what, when, from which files; one line.
        sections: in order.
    """
    from plotly.offline import get_plotlyjs  # of the "lab" extra: only pages with figures need it

    boot = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    plotly = get_plotlyjs()
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly, boot))
    # plotly writes styles into the page, and pictures of itself to save
    pictures = "style-src 'unsafe-inline'; img-src data: blob:"
    policy = f"default-src 'none'; script-src {allowed}; {pictures}; base-uri 'none'; form-action 'none'"
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            question=question,
            made=made,
            sections=sections,
            policy=Markup(policy),
            plotly=Markup(plotly),
            boot=Markup(boot),
        )
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no character


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
