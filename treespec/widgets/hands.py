"""What plain widgets lack: keys that work anywhere in a dashboard and stay there, the clipboard."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

SCRIPT = """
function render({ model, el }) {
  el.style.display = "none";
  const frame = setTimeout(() => {
    const root = el.closest(".treespec-panel") ?? document.body;
    if (!root.hasAttribute("tabindex")) root.tabIndex = -1;  // a click anywhere in it brings the keys here
    root.addEventListener("keydown", pressed, { capture: true });
    root.addEventListener("keydown", keep);
    cleanup = () => {
      root.removeEventListener("keydown", pressed, { capture: true });
      root.removeEventListener("keydown", keep);
    };
  }, 0);
  let cleanup = () => clearTimeout(frame);
  const chord = (event) => event.ctrlKey || event.metaKey || event.altKey;
  // a notebook takes arrows and letters for its own commands: on a list of choices Down went to the next cell
  function keep(event) { if (!chord(event) && event.key !== "Escape") event.stopPropagation(); }
  function pressed(event) {
    const typing = ["INPUT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (typing || chord(event)) return;
    if (!model.get("listen").includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    model.set("pressed", [event.key, model.get("pressed")[1] + 1]);
    model.save_changes();
  }
  async function copy() {
    const [text] = model.get("clip");
    let done = "copied";
    try { await navigator.clipboard.writeText(text); }
    catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      if (!document.execCommand("copy")) done = "the browser refused; mark the line and copy it";
      area.remove();
    }
    model.set("outcome", [done, model.get("outcome")[1] + 1]);
    model.save_changes();
  }
  model.on("change:clip", copy);
  return () => { cleanup(); model.off("change:clip", copy); };
}
export default { render };
"""

# A redrawn figure asks the page for its measures; these are then found without laying out the whole page again.
STYLE = """
.treespec-panel .widget-box { contain: layout style; }
.treespec-panel .js-plotly-plot { contain: layout paint style; }
"""


class Hands(anywidget.AnyWidget):
    """Keys, clipboard and style of the panel (CSS class ``treespec-panel``) that it is shown in.

    Keys pressed in the panel do not reach the notebook's shortcuts, but for Escape and those with Ctrl, Alt or Cmd.

    Attributes:
        listen: keys to listen to, as ``KeyboardEvent.key`` names them; not while somebody types into a text field.
        pressed: the last of them, and how many there were.
        clip: a text for the clipboard, and how many there were.
        outcome: what came of it, and how many there were.
    """

    _esm = SCRIPT
    _css = STYLE
    listen = traitlets.List(traitlets.Unicode()).tag(sync=True)
    pressed = traitlets.List(["", 0]).tag(sync=True)
    clip = traitlets.List(["", 0]).tag(sync=True)
    outcome = traitlets.List(["", 0]).tag(sync=True)

    def copy(self, text: str) -> None:
        """Put a text on the clipboard of whoever looks at the page."""
        last: list[Any] = self.clip
        self.clip = [text, last[1] + 1]
