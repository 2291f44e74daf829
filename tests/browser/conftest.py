"""A real JupyterLab and a real browser for the tests of this folder.

The folder is a package (``__init__.py``) so that this file is not mistaken for the ``conftest`` of the folder above.
"""

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

import nbformat
import pytest
from jupyter_client import BlockingKernelClient

REPO = Path(__file__).resolve().parents[2]
PICTURES = REPO / "artefacts"  # ignored by git
TOKEN = "browser-tests"
WIDTH, HEIGHT = 1250, 900  # the width the pictures are designed for
PATIENCE = 90_000  # milliseconds; the machine may be busy measuring something
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


CLEAR = "import ipywidgets; ipywidgets.Widget.close_all(); get_ipython().run_line_magic('reset', '-f')"


class Lab:
    """A running JupyterLab over a copy of the notebooks.

    Notebooks that a test writes run in one kernel, one after the other, since a kernel takes ten seconds to import
    torch and transformers; the package's own notebooks get a new one, as they do with a person.
    """

    def __init__(self, port, home):
        self.port, self.home, self.notebooks, self.kernel = port, home, home / "root" / "notebooks", None

    def url(self, name):
        """Where a notebook opens."""
        return f"http://127.0.0.1:{self.port}/lab/tree/notebooks/{name}?token={TOKEN}&reset"

    def add(self, name, cells):
        """Write a notebook of code cells and say where it opens."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        nbformat.write(notebook, self.notebooks / name)
        session = {"path": f"notebooks/{name}", "name": name, "type": "notebook"}
        alive = self.kernel in [each["id"] for each in self.ask("api/kernels")]
        kernel = {"id": self.kernel} if alive else {"name": "python3"}
        self.kernel = self.ask("api/sessions", "POST", session | {"kernel": kernel})["kernel"]["id"]
        return self.url(name)

    def ask(self, path, method="GET", body=None):
        """Ask JupyterLab's own API; what it answers, if it does."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", body and json.dumps(body).encode(), method=method,
            headers={"Authorization": f"token {TOKEN}"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def tidy(self):
        """As it was at first: the light theme, no kernel of a notebook of the package, nothing left in the tests' own."""
        for session in self.ask("api/sessions"):
            if session["kernel"]["id"] != self.kernel:
                self.ask(f"api/sessions/{session['id']}", "DELETE")
        self.ask("lab/api/settings/@jupyterlab/apputils-extension:themes", "PUT", {"raw": "{}"})
        if self.kernel:
            client = BlockingKernelClient(connection_file=str(self.home / "runtime" / f"kernel-{self.kernel}.json"))
            client.load_connection_file()
            client.start_channels()
            try:
                client.execute_interactive(CLEAR, timeout=60)
            finally:
                client.stop_channels()


@pytest.fixture(scope="session")
def chromium():
    """Debian's own chromium; playwright's download is not needed."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed; as root, `make chromium` installs it")
    return path


@pytest.fixture(scope="session")
def server(chromium, tmp_path_factory):
    """JupyterLab on a copy of the notebooks and with settings of its own, so the repo stays clean."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(REPO / "notebooks", home / "root" / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    port, log = free_port(), home / "lab.log"
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
        *(f"--ServerApp.root_dir={home / 'root'}", f"--IdentityProvider.token={TOKEN}"),
    ]
    environment = {**os.environ, **ENVIRONMENT, **{name: str(home / part) for name, part in own.items()}}
    PICTURES.mkdir(exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_up(f"http://127.0.0.1:{port}/api", process, log)
            yield Lab(port, home)
        finally:
            process.terminate()  # the server ends its kernels itself
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def lab(server):
    """The server, and what a test did to it undone."""
    yield server
    server.tidy()


@pytest.fixture(scope="package")  # playwright's event loop must not be there for tests of other folders
def browser(chromium):
    """The browser; closed on the way out, whatever happened."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def page(browser):
    """A page that knows nothing of another test's."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    try:
        yield context.new_page()
    finally:
        context.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(url, process, log, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not come up; its log ends with:\n{log.read_text()[-2000:]}")


def open_notebook(page, url):
    """Open a notebook and wait for its kernel: earlier, Run would ask for one."""
    page.goto(url, timeout=PATIENCE)
    page.locator(".jp-Notebook").wait_for(timeout=PATIENCE)
    page.locator("text=Python 3 (ipykernel) | Idle").wait_for(timeout=PATIENCE)


def run_all(page):
    """Run All Cells through the menu; returns at once."""
    page.click("text=Run")
    page.click('text="Run All Cells"')


def errors(page):
    """The error outputs of all cells."""
    return page.locator('[data-mime-type="application/vnd.jupyter.error"]')


def go_dark(page):
    """Switch JupyterLab to its dark theme."""
    page.click("text=Settings")
    page.hover("text=Theme")
    page.click('text="JupyterLab Dark"')
    page.locator("body[data-jp-theme-light=false]").wait_for(state="attached", timeout=30_000)


def photograph(page, name, width=WIDTH):
    """The whole notebook in one picture, at the reading width."""
    scroller = page.locator(".jp-WindowedPanel-outer").first
    page.set_viewport_size({"width": width, "height": HEIGHT})
    height = scroller.evaluate("panel => panel.scrollHeight")
    page.set_viewport_size({"width": width, "height": min(int(height) + 120, 14_000)})
    page.mouse.move(width - 5, HEIGHT - 5)  # no hover box in the picture
    page.wait_for_timeout(2000)  # the plots fit themselves to the page
    scroller.evaluate("panel => { panel.scrollTop = 0 }")
    page.wait_for_timeout(500)
    page.screenshot(path=PICTURES / name)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
