"""How sure the draft is along a recorded text, and which of its tokens were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from treespec.marks import BLUE, GREEN, GREY, PURPLE, SKY, VERMILION, short
from treespec.plots.style import Parts, axis, figure, look, note, safe
from treespec.trace import Replay, Trace
from treespec.tree import visible

SURE = "How sure is the draft along the text?"
TICKS = 40  # tokens whose texts are written under the axis


def entropy_figure(
    trace: Trace,
    prompt: int,
    *,
    texts: Sequence[str] | None = None,
    replay: Replay | None = None,
    bands: tuple[float, float] | None = None,
    position: int | None = None,
    title: str = SURE,
    width: int = 620,
    height: int = 330,
) -> go.Figure:
    """The draft's entropy after every token of one text.

    Args:
        trace: recorded supertrees.
        prompt: number of the text in the trace.
        texts: of its tokens, as :func:`token_texts` gives them; ids without.
        replay: of a policy on the trace: its accepted tokens are underlined.
        bands: the dynamic pruner's ``low`` and ``high`` in bits, shaded.
        position: number of a token in the text, to be ringed.
        title: of the figure.
        width: pixels that the figure will have.
        height: pixels.
    """
    return figure(
        entropy_parts(
            trace,
            prompt,
            texts=texts,
            replay=replay,
            bands=bands,
            position=position,
            title=title,
            width=width,
            height=height,
        )
    )


def token_texts(trace: Trace, prompt: int, tokenizer: Any = None) -> list[str]:
    """The texts of a prompt's recorded tokens with visible white space; ids without a tokenizer."""
    tokens = trace.tokens(prompt)
    return [str(t) if tokenizer is None else visible(str(tokenizer.decode([t]))) for t in tokens]


def entropy_parts(
    trace: Trace,
    prompt: int,
    *,
    texts: Sequence[str] | None = None,
    replay: Replay | None = None,
    bands: tuple[float, float] | None = None,
    position: int | None = None,
    title: str = SURE,
    width: int = 620,
    height: int = 330,
) -> Parts:
    """Traces and layout of :func:`entropy_figure`; always as many traces. ``customdata`` is the number in the text."""
    texts = token_texts(trace, prompt) if texts is None else texts
    rows = np.flatnonzero(trace.prompt == prompt)
    bits = trace.nodes["entropy"][trace.root[rows]].astype(float)
    top = max(4.0, 1.08 * float(np.nanmax(bits, initial=0.0)))
    floor = -0.09 * top  # where the underlines run
    numbers = list(range(len(rows)))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": numbers,
            "y": [None if b != b else b for b in bits.tolist()],  # JSON knows no NaN
            "line": {"color": BLUE, "width": 1.5},
            "marker": {"color": BLUE, "size": 7},
            "hovertext": [_said(texts, i, b, bands) for i, b in zip(numbers, bits)],
            "hoverinfo": "text",
            "customdata": numbers,
        },
        *_underlines(replay, rows, floor),
        _ring(bits, position),
    ]
    every = max(1, -(-len(texts) // TICKS))
    layout = look(
        title,
        height,
        margin={"l": 56, "r": 70, "b": 74},
        xaxis=axis(
            range=[-0.6, len(texts) - 0.4],
            tickvals=list(range(0, len(texts), every)),
            ticktext=[safe(short(t, 8)) for t in texts[::every]],
            tickangle=-60,
            tickfont={"size": 11},
            showgrid=False,
        ),
        yaxis=axis("entropy after the token, bits", range=[1.7 * floor, top]),
        shapes=_shades(bands, top),
        annotations=[
            *_names(bands, top),
            note(
                f'<span style="color:{GREEN}">━━</span> guessed and accepted   ┅┅ given by the target',
                x=1,
                y=1,
                xanchor="right",
                yanchor="bottom",
            ),
        ],
    )
    return traces, layout


def _said(texts: Sequence[str], i: int, bits: float, bands: tuple[float, float] | None) -> str:
    before = safe("".join(texts[max(0, i - 6) : i]))
    line = f"…{before}<b>{safe(texts[i])}</b>" if before else f"<b>{safe(texts[i])}</b>"
    if bits != bits:
        return f"{line}<br>token {i}: the draft was not asked"
    verdict = ""
    if bands:
        low, high = bands
        verdict = ": sure, one child" if bits < low else ": lost, no child" if bits >= high else ": a few children"
    return f"{line}<br>token {i}: {bits:.2f} bits about the next{verdict}"


def _underlines(replay: Replay | None, rows: np.ndarray, floor: float) -> list[dict[str, Any]]:
    """Runs of accepted tokens, and the tokens that the target gave."""
    accepted: tuple[list[float | None], list[float | None]] = ([], [])
    given: tuple[list[float | None], list[float | None]] = ([], [])
    if replay is not None and len(rows):
        mine = np.flatnonzero((replay.rows >= rows[0]) & (replay.rows <= rows[-1]))
        given[0].extend((-0.35, 0.35, None))  # the prefill's token
        for step in mine:
            at, tokens = int(replay.rows[step] - rows[0]), int(replay.tokens[step])
            taken = min(int(replay.grown.accepted[step]), tokens)
            if taken:
                accepted[0].extend((at + 0.65, at + taken + 0.35, None))
            if tokens > taken:
                given[0].extend((at + tokens - 0.35, at + tokens + 0.35, None))
    for xs, ys in (accepted, given):
        ys.extend(None if x is None else floor for x in xs)
    looks = ((accepted, {"color": GREEN, "width": 5}), (given, {"color": GREY, "width": 3, "dash": "dot"}))
    return [
        {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "line": line, "hoverinfo": "skip"}
        for (xs, ys), line in looks
    ]


def _ring(bits: np.ndarray, position: int | None) -> dict[str, Any]:
    there = position is not None and position < len(bits) and bits[position] == bits[position]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [position] if there else [],
        "y": [float(bits[position])] if there else [],
        "marker": {"symbol": "circle-open", "size": 17, "color": VERMILION, "line": {"color": VERMILION, "width": 3}},
        "hoverinfo": "skip",
    }


def _shades(bands: tuple[float, float] | None, top: float) -> list[dict[str, Any]]:
    if bands is None:
        return []
    low, high = (min(b, top) for b in bands)
    edges = ((0.0, low, GREEN, 0.13), (low, high, SKY, 0.13), (high, top, PURPLE, 0.16))
    return [
        {
            "type": "rect",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": a,
            "y1": b,
            "fillcolor": colour,
            "opacity": opacity,
            "line": {"width": 0},
            "layer": "below",
        }
        for a, b, colour, opacity in edges
    ]


def _names(bands: tuple[float, float] | None, top: float) -> list[dict[str, Any]]:
    """What each band means, at the right edge; a band too thin to hold words stays nameless."""
    if bands is None:
        return []
    low, high = (min(b, top) for b in bands)
    edges = ((0.0, low, "1 child"), (low, high, "a few"), (high, top, "no child"))
    return [
        note(words, x=1.0, xanchor="left", y=(a + b) / 2, yref="y", align="left", xshift=4)
        for a, b, words in edges
        if b - a > 0.06 * top
    ]
