"""What all figures share: transparent paper, middling ink, a question as title, text that cannot turn into markup."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from torch import Tensor

CLEAR, INK, RULE = "rgba(0,0,0,0)", "#7a7a7a", "rgba(128,128,128,.22)"
TITLE = 34  # pixels kept for the title
Parts = tuple[list[dict[str, Any]], dict[str, Any]]  # traces of fixed number and order, and the layout


def safe(text: str) -> str:
    """Text for plotly, which reads some HTML and, between dollars, TeX."""
    return escape(text, quote=False).replace("$", "&#36;")


def look(title: str, height: int, **more: Any) -> dict[str, Any]:
    """A layout; ``more`` is laid over it."""
    margin = {"l": 56, "r": 16, "t": TITLE + 12, "b": 48, **more.pop("margin", {})}
    base: dict[str, Any] = {
        "template": "none",
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "title": {
            "text": safe(title),
            "font": {"size": 15},
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "pad": {"l": 4},
            "y": 1 - 9 / height,
            "yanchor": "top",
            "yref": "container",
        },
        "height": height,
        "margin": margin,
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "#333333", "bordercolor": INK, "font": {"color": "#f4f4f4"}},
        "showlegend": False,
        "uirevision": "same",  # a zoom outlives a redraw
        "dragmode": "pan",
    }
    return base | more


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with faint rules."""
    base = {"gridcolor": RULE, "zeroline": False, "linecolor": RULE, "tickcolor": RULE, "automargin": False}
    base["ticklabeloverflow"] = "allow"  # else every label is measured on every redraw
    return {**base, **({"title": {"text": safe(title), "standoff": 8}} if title else {}), **more}


def hatched(colour: str, shape: str) -> dict[str, Any]:
    """A bar's marker: a colour, and a pattern over it, so that nobody has to tell colours apart."""
    pattern = {"shape": shape, "size": 6, "solidity": 0.25, "fgcolor": "#ffffff", "fillmode": "overlay"}
    return {"color": colour, "line": {"width": 0}, "pattern": pattern}


def column(values: Any) -> list[float | None]:
    """Numbers as JSON knows them: a tensor of any dtype, on any device and with a gradient or not, or any sequence of
    numbers; what is not finite becomes None, a gap.
    """
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().flatten().tolist()
    numbers = [float(v.detach() if isinstance(v, Tensor) else v) for v in values]
    return [v if math.isfinite(v) else None for v in numbers]


def plain(value: Any) -> Any:
    """The same without tensors, arrays and what JSON does not know."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (Tensor, np.ndarray)):
        return plain(value.detach().double().cpu().tolist() if isinstance(value, Tensor) else value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figure(parts: Parts) -> go.Figure:
    """A figure of traces and layout."""
    return go.Figure(*plain(parts))


def note(text: str, **more: Any) -> dict[str, Any]:
    """An annotation without an arrow, placed on the paper unless told otherwise; ``text`` is markup."""
    base = {"text": text, "showarrow": False, "font": {"size": 11, "color": INK}}
    return {**base, "xref": "paper", "yref": "paper", **more}
