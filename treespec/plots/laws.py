"""Two samples against the law they should follow, and the tests' p values along the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from treespec.marks import BLUE, GREY, VERMILION
from treespec.plots.style import Parts, axis, figure, hatched, look, note, safe

MEET = "Do both ways of drawing meet the same law?"
FAIL = "Would a biased rule be found out?"
WORDS = "biased: chance does not explain this"
LEAST_P = 1e-12  # p values below are drawn here
ALARM = 1e-6  # so rare that looking often does not explain it


def law_figure(
    law: Mapping[Any, float], plain: Mapping[Any, int], own: Mapping[Any, int], names: Sequence[str], height: int = 330
) -> go.Figure:
    """Shares of every text, without and with speculation, over the exact probability.

    Args:
        law: probability by text.
        plain: counts by text without speculation.
        own: counts by text with speculation.
        names: of the texts, in the law's order.
        height: pixels.
    """
    return figure(law_parts(law, plain, own, names, height))


def law_parts(
    law: Mapping[Any, float], plain: Mapping[Any, int], own: Mapping[Any, int], names: Sequence[str], height: int = 330
) -> Parts:
    """Traces and layout of :func:`law_figure`; always as many traces."""
    at = list(range(len(law)))
    shown = [safe(name) for name in names]
    sides = []
    for words, counts, colour, shape in (
        ("without speculation", plain, GREY, ""),
        ("with speculation", own, BLUE, "/"),
    ):
        total = max(sum(counts.values()), 1)
        shares = [counts.get(text, 0) / total for text in law]
        sides.append(
            {
                "type": "bar",
                "name": words,
                "x": at,
                "y": shares,
                "marker": hatched(colour, shape),
                "hovertext": [
                    f"{name}: {share:.4f} {words}, the law says {p:.4f}"
                    for name, share, p in zip(shown, shares, law.values())
                ],
                "hoverinfo": "text",
            }
        )
    exact = {
        "type": "scatter",
        "mode": "markers",
        "name": "the target's law, enumerated",
        "x": at,
        "y": list(law.values()),
        "marker": {"symbol": "line-ew-open", "size": 17, "color": VERMILION, "line": {"width": 2.5}},
        "hoverinfo": "skip",
    }
    layout = look(
        MEET,
        height,
        margin={"t": 62, "b": 62},
        barmode="group",
        bargap=0.22,
        bargroupgap=0.0,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemclick": False},
        xaxis=axis("text", tickvals=at, ticktext=shown, showgrid=False, tickangle=-60),
        yaxis=axis("share of the texts", rangemode="tozero"),
    )
    return [*sides, exact], layout


def trail_figure(trail: Sequence[tuple[int, float, float]], height: int = 330) -> go.Figure:
    """The p values of two G-tests as the samples grow.

    Args:
        trail: ``(samples, p against plain sampling, p against the law)``.
        height: pixels.
    """
    return figure(trail_parts(trail, height))


def trail_parts(trail: Sequence[tuple[int, float, float]], height: int = 330) -> Parts:
    """Traces and layout of :func:`trail_figure`; always as many traces."""
    samples = [n for n, _, _ in trail]
    lines = []
    for k, words, colour, dash, symbol in (
        (2, "with speculation, against the law", BLUE, "solid", "circle"),
        (1, "with against without speculation", GREY, "dot", "square"),
    ):
        values = [row[k] for row in trail]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": words,
                "x": samples,
                "y": [max(p, LEAST_P) for p in values],
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"symbol": symbol, "size": 6, "color": colour},
                "hovertext": [f"{n:,} texts: p = {p:.2g}, {words}" for n, p in zip(samples, values)],
                "hoverinfo": "text",
            }
        )
    last = max(samples, default=100)
    layout = look(
        FAIL,
        height,
        margin={"t": 62, "b": 62, "l": 64},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemclick": False},
        xaxis=axis("texts drawn per side", range=[0, last * 1.04], tickformat=","),
        yaxis=axis(
            "p value of the G-test",
            type="log",
            range=[-12.4, 0.3],
            tickvals=[1, 1e-3, 1e-6, 1e-9, 1e-12],
            ticktext=["1", "10⁻³", "10⁻⁶", "10⁻⁹", "≤ 10⁻¹²"],
        ),
        shapes=[
            {
                "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": LEAST_P / 3, "y1": ALARM,
                "fillcolor": VERMILION, "opacity": 0.1, "line": {"width": 0},
            }
        ],
        annotations=[note(WORDS, x=0.02, xanchor="left", y=0.03, yanchor="bottom")],
    )  # fmt: skip
    return lines, layout
