"""What is left of a dashboard on a page whose kernel is gone: a still of it, in the same output."""

from __future__ import annotations

from collections.abc import Iterator

import ipywidgets

NOTE = "border-left:4px solid #999;padding:.3em .8em;margin:.3em 0;font:13px system-ui,sans-serif"


def still_html(panel: ipywidgets.Widget) -> str:
    """A panel as it is now, without controls: its texts, and what its figures and canvases show."""
    shown = [
        part.value for part in _in_order(panel) if isinstance(part, ipywidgets.HTML) and part.layout.display != "none"
    ]
    stills = [part.still() for part in _in_order(panel) if hasattr(part, "still")]
    said = "A still of this dashboard; its kernel is gone or was not there. Run the cell again for the live one."
    return f'<div style="{NOTE}">{said}</div>' + "".join(f"<div>{part}</div>" for part in [*shown, *stills] if part)


def _in_order(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """What a box shows, from the top."""
    for part in getattr(widget, "children", ()):
        yield part
        yield from _in_order(part)
