"""``make site``: the notebooks, run here, as static pages that share one plotly.js; the API's pages; a list of all.

nbconvert puts plotly.js into every page (5 MB each). So figures are kept as JSON and one script beside the pages draws
them. A live control, which needs a kernel, becomes a note that says where it runs. Formulas are set by MathJax from
its public address; without a network they show as TeX.
"""

from __future__ import annotations

import argparse
import html
import os
import pkgutil
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import nbformat
import pdoc
import pdoc.render
from jinja2.utils import htmlsafe_json_dumps
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

import treespec
from treespec.files import write_whole

PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"
SCRIPT = "plotly.min.js"
PROGRESS = {"FloatProgressModel", "IntProgressModel"}  # bars are over when a page is read
DRAW = """<script>
for (const place of document.querySelectorAll("[data-plotly]")) {
  const figure = JSON.parse(place.nextElementSibling.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displaylogo: false });
}
</script>"""
STYLE = """<style>
body { max-width: 1250px; margin: 0 auto; padding: 16px 24px; }
.live { border: 1px dashed #888; padding: 12px 16px; font-family: system-ui, sans-serif; }
@media print { a.back { display: none; } }
</style>"""
INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>treespec: the notebooks</title>
<style>
body {{ font: 17px/1.55 system-ui, sans-serif; max-width: 46em; margin: 2.5em auto; padding: 0 1.2em; }}
li {{ margin: 1.1em 0; }} p {{ margin: .2em 0; opacity: .75; font-size: .95em; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #15181c; color: #e6e8ea; }} a {{ color: #6fb3e0; }} }}
</style></head><body>
<h1>How many tokens can one forward give?</h1>
<p>The notebooks of treespec as they ran when this was built. To move the controls, run them: <code>make lab</code>.</p>
<ol start="0">
{items}
</ol>
<p><a href="api/treespec.html">The API</a>: every public name, with shapes, units, errors and sources.</p>
</body></html>
"""


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"))
    parser.add_argument("--out", type=Path, default=Path("site"))
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one cell")
    options = parser.parse_args()
    api(options.out / "api")
    sys.exit(build(options.notebooks, options.out, options.timeout))


def build(folder: Path, out: Path, timeout: int) -> int:
    """Run every notebook and write its page; 1 if one failed, whose old page then stays as it was."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # the kernels inherit it
    out.mkdir(parents=True, exist_ok=True)
    _write(out / SCRIPT, get_plotlyjs())
    books, failed = {}, 0
    for path in sorted(folder.glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        print(f"running {path} …", file=sys.stderr)
        try:
            resources = {"metadata": {"path": str(folder)}}
            NotebookClient(book, timeout=timeout, kernel_name="python3", resources=resources).execute()
        except CellExecutionError as error:
            failed += 1
            print(f"{path} failed: {error.ename}: {error.evalue}", file=sys.stderr)
            continue
        books[path.stem] = book
        _write(out / f"{path.stem}.html", page(book, path.name))
    _write(out / "index.html", index(books))
    print(out / "index.html")
    return int(failed > 0)


def api(out: Path, *modules: str) -> None:
    """The API's pages, made of the docstrings.

    Args:
        out: their folder.
        modules: which; default all of the package.
    """
    pdoc.render.configure(docformat="google", footer_text="treespec")
    inside = (module.name for module in pkgutil.walk_packages(treespec.__path__, "treespec."))
    with warnings.catch_warnings():
        # modules that a package's __all__ leaves out are asked for; others come twice then
        warnings.filterwarnings("ignore", message=".*has already been added")
        warnings.filterwarnings("ignore", message="Error parsing type annotation")  # shown as it is written
        pdoc.pdoc(*(modules or ("treespec", *inside)), output_directory=out)


def page(book: Any, name: str) -> str:
    """An executed notebook as HTML that draws with the shared script.

    Args:
        book: with outputs; it is changed.
        name: of the file, for notes.
    """
    state = book.metadata.pop("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        outputs = [still for output in cell.outputs if (still := _still(output, state, name)) is not None]
        cell.outputs = outputs
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        cell.metadata["transient"] = {"remove_source": bool(hidden)}  # code that only draws, folded away in JupyterLab
    exporter = HTMLExporter(template_name="lab", require_js_url="", embed_images=True)
    body, _ = exporter.from_notebook_node(book, {"metadata": {"name": title(book)[0] or name}})
    body = body.replace('<script src=""></script>', "")  # require.js, which nothing here uses
    back = '<p><a class="back" href="index.html">All notebooks</a></p>'
    body = body.replace("</head>", f'{STYLE}<script src="{SCRIPT}"></script></head>', 1)
    before, _, after = body.replace("<main>", f"<main>{back}", 1).rpartition("</body>")
    return f"{before}{DRAW}</body>{after}"


def _still(output: Any, state: dict[str, Any], name: str) -> Any:
    """The output as it can be shown without a kernel; None for what has nothing left to say."""
    data = output.get("data", {})
    if PLOTLY in data:
        figure = data[PLOTLY]
        height = int(figure.get("layout", {}).get("height") or 450)
        shown = f'<div data-plotly style="height:{height}px"></div>'
        shown += f'<script type="application/json">{htmlsafe_json_dumps(figure)}</script>'
        return nbformat.v4.new_output(output.output_type, {"text/html": shown})
    if WIDGET in data:
        if PROGRESS & _models(data[WIDGET].get("model_id", ""), state):
            return None
        words = f"A live control stands here. It needs a kernel: <code>make lab</code>, then {html.escape(name)}."
        return nbformat.v4.new_output(output.output_type, {"text/html": f'<div class="live">{words}</div>'})
    return output


def _models(root: str, state: dict[str, Any]) -> set[str]:
    """Names of a widget's models, its children's included."""
    found, waiting, seen = set(), [root], set()
    while waiting:
        model = waiting.pop()
        if model in seen or model not in state:
            continue
        seen.add(model)
        found.add(str(state[model].get("model_name", "")))
        children = state[model].get("state", {}).get("children") or []
        waiting += [str(child).removeprefix("IPY_MODEL_") for child in children]
    return found


def title(book: Any) -> tuple[str, str]:
    """A notebook's first heading, and the first sentence below it in bold or plain, both as plain text."""
    text = next((cell.source for cell in book.cells if cell.cell_type == "markdown"), "")
    head, _, rest = text.partition("\n")
    paragraph = next((part for part in rest.split("\n\n") if part.strip()), "")
    return head.lstrip("# ").strip(), " ".join(re.sub(r"[*_`]", "", paragraph).split())


def index(books: dict[str, Any]) -> str:
    """The page that lists the others.

    Args:
        books: by the stem of their files.
    """
    items = []
    for stem, book in books.items():
        head, first = (html.escape(text) for text in title(book))
        items.append(f'<li><a href="{html.escape(stem)}.html">{head or html.escape(stem)}</a><p>{first}</p></li>')
    return INDEX.format(items="\n".join(items))


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
