"""The start notebook as a person meets it: JupyterLab in a browser, Run All Cells, every picture on the page."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")

pytestmark = pytest.mark.browser

REPO = Path(__file__).resolve().parents[2]
NOTEBOOK = "00_start_here.ipynb"
PICTURES = REPO / "artefacts"  # ignored by git
TOKEN = "start-notebook"
WIDTH, HEIGHT = 1250, 900  # the width the pictures are designed for
RUN_ALL_SECONDS = 400  # about 90 on two quiet cores; the browser itself takes its share
# nothing that calls home, and what a container without a user namespace or a GPU needs
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    # no pop-up over the page, no request to the outside
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # keep every cell in the page: by default JupyterLab takes out those that are scrolled away
    "notebook-extension/tracker": {"windowingMode": "none"},
}
# The kernel shares its cores with the browser. Threads that spin while they wait for one another would make each
# forward several times slower then.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture
def chromium():
    """Debian's own chromium; playwright's download is not needed."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed; as root, `make chromium` installs it")
    return path


@pytest.fixture
def lab(chromium, tmp_path):
    """JupyterLab's address, on a copy of the notebooks and with settings of its own, so the repo stays clean."""
    shutil.copytree(REPO / "notebooks", tmp_path / "root" / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for name, values in SETTINGS.items():
        path = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    port, log = free_port(), tmp_path / "lab.log"
    own = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"),
        *(f"--ServerApp.root_dir={tmp_path / 'root'}", f"--IdentityProvider.token={TOKEN}"),
    ]
    environment = {**os.environ, **ENVIRONMENT, **{name: str(tmp_path / part) for name, part in own.items()}}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_up(f"http://127.0.0.1:{port}/api", server, log)
            yield f"http://127.0.0.1:{port}/lab/tree/notebooks/{NOTEBOOK}?token={TOKEN}"
        finally:
            server.terminate()  # the server ends its kernels itself
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@pytest.fixture
def page(chromium):
    """A browser page; on the way out everything is closed, whatever happened."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
        try:
            yield browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        finally:
            browser.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(url, server, log, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not come up; its log ends with:\n{log.read_text()[-2000:]}")


def photograph(page, name):
    """The whole notebook in one picture, at the reading width."""
    scroller = page.locator(".jp-WindowedPanel-outer").first
    height = scroller.evaluate("panel => panel.scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": min(int(height) + 120, 14_000)})
    page.mouse.move(WIDTH - 5, HEIGHT - 5)  # no hover box in the picture
    page.wait_for_timeout(2000)  # the plots fit themselves to the page
    scroller.evaluate("panel => { panel.scrollTop = 0 }")
    page.wait_for_timeout(500)
    page.screenshot(path=PICTURES / name)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def test_run_all_cells_and_look(lab, page):
    PICTURES.mkdir(exist_ok=True)
    page.goto(lab, timeout=90_000)
    page.locator(".jp-Notebook").wait_for(timeout=90_000)
    page.locator("text=Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)  # earlier, Run would ask for a kernel
    page.screenshot(path=PICTURES / "start-notebook-opened.png")

    page.click("text=Run")
    page.click('text="Run All Cells"')
    outputs = page.locator(".jp-OutputArea-output")
    error = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    last = outputs.filter(has_text="Measured on:")
    try:
        last.or_(error).first.wait_for(timeout=1000 * RUN_ALL_SECONDS)
    finally:
        photograph(page, "start-notebook-light.png")

    assert error.all_inner_texts() == []
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts() == []
    assert outputs.filter(has_text="identical to plain decoding? yes").count() == 1
    assert outputs.filter(has_text="guessed by the draft, accepted").count() >= 1
    trees = outputs.locator("svg[role=img]")
    assert [tree.locator("rect").count() for tree in trees.all()] == [1, 1], "two trees with one root each"
    fates = " ".join(trees.last.locator("title").all_text_contents())
    for why in ("below τ", "parent too uncertain", "over budget", "too deep"):  # the toy's tree shows every reason
        assert f"pruned: {why}" in fates
    assert page.locator("table.comparison tbody tr").count() == 5
    plots = page.locator(".js-plotly-plot")
    assert plots.count() == 2
    assert plots.filter(has_text="Which tree pays on this machine?").locator(".bars .point").count() == 5

    page.click("text=Settings")
    page.hover("text=Theme")
    page.click('text="JupyterLab Dark"')
    page.locator("body[data-jp-theme-light=false]").wait_for(state="attached", timeout=30_000)
    photograph(page, "start-notebook-dark.png")
