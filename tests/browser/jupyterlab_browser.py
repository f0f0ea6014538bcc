"""A real JupyterLab and a headless Chromium for tests: started in temporary folders, offline, and gone afterwards."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1300, 1500
PAGE_PIXELS = 1250  # of the notebook on one screenshot
LIMIT_S = 600
"""For each thing that is waited for: so long that only what never comes fails, however busy the host is."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FOLDER = "notebooks"
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "checkForUpdates": False,
        "fetchNews": "false",
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
}


def missing() -> str:
    """Why no browser test can run here, '' if one can."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium on this machine"
    return "" if shutil.which("chromedriver") else "no chromedriver on this machine"


SMALLEST = {"WORKBENCH_TINY": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def jupyterlab(folder: Path, notebooks: list[Path], variables: dict[str, str] = SMALLEST) -> Iterator[str]:
    """Serve copies of the notebooks from `folder` and give the address (with %s for a notebook's name); end with all
    that was started.  variables: of the kernels' environment."""
    work = folder / "work" / FOLDER
    work.mkdir(parents=True)
    for notebook in notebooks:
        shutil.copy(notebook, work)
    shutil.copytree(ROOT / "docs/pictures", work.parent / "docs/pictures")  # the server follows no link out of its root
    for plugin, settings in SETTINGS.items():
        path = folder / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    # As in tests/conftest.py: a parser that no schema here needs takes a third of what a kernel imports.
    left_out = folder / "left-out"
    left_out.mkdir()
    (left_out / "rfc3987_syntax.py").write_text("raise ImportError('left out by the tests')\n")
    token = secrets.token_hex(16)
    environment = os.environ | {
        **variables,
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(left_out), str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        **{
            name: str(folder / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        },
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--ip=127.0.0.1",
    ]
    probe = socket.socket()  # bound, but not listening, until the server does both: no other process gets the port
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    command += [
        f"--port={port}",
        "--port-retries=0",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={work.parent}",
    ]
    log = (folder / "jupyterlab.log").open("w")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` must end the server as Ctrl-C does
    server = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=work, start_new_session=True
    )
    try:
        with _killed_with_us(folder), probe:
            wait_until(
                lambda: _answers(f"http://127.0.0.1:{port}/api/status?token={token}", server), "JupyterLab to answer"
            )
            yield f"http://127.0.0.1:{port}/doc/tree/{work.name}/%s?token={token}&reset"
    finally:
        _end(server)
        log.close()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _killed_with_us(folder: Path) -> Iterator[None]:
    """If our process ends in here, also by a kill, each process with the folder on its command line is killed.

    Our end closes the pipe that the guard reads from.
    """
    script = 'cat > /dev/null; pkill -KILL -f -- "$1"'
    with subprocess.Popen(
        ["sh", "-c", script, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        try:
            yield
        finally:
            guard.kill()


def _answers(address: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, f"JupyterLab ended with {server.returncode}"
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server as Ctrl-C twice would; whatever of it is still there after a while is a fault."""
    try:
        family = psutil.Process(server.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    server.terminate()
    try:
        server.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
    _, left = psutil.wait_procs(family, timeout=LIMIT_S)
    names = [f"{process.pid} {process.name()}" for process in left if process.is_running()]
    for process in left:
        process.kill()
    assert not names, f"JupyterLab left processes behind: {names}"


@contextmanager
def browser(folder: Path) -> Iterator[webdriver.Chrome]:
    """A headless Chromium that can reach this machine only."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--user-data-dir={folder / 'chromium'}",
    ):
        options.add_argument(flag)
    log = f"--log-path={folder / 'chromedriver.log'}"
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"), service_args=[log]))
    driver.set_script_timeout(LIMIT_S)  # a busy page answers late, too
    # A window that nobody looks at may start without focus, and JupyterLab then has no current notebook.
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    try:
        with _killed_with_us(folder):
            yield driver
    finally:
        driver.quit()


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Return the condition's first true value; fail after LIMIT_S, saying what was waited for."""
    deadline, pause_s = time.monotonic() + LIMIT_S, 0.05
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.5)  # most changes take a moment; to look often costs the page its time
    return value


class Notebook:
    """A notebook open in the browser."""

    def __init__(self, driver: webdriver.Chrome, address: str, name: str, screenshots: Path) -> None:
        self.driver, self.address, self.name, self.screenshots = driver, address % name, name, screenshots
        self.path = f"{FOLDER}/{name}"
        if self.js("return Boolean(window.jupyterapp)"):  # loading JupyterLab again takes seconds
            self.js("jupyterapp.commands.execute('docmanager:open', {path: arguments[0]})", self.path)
        else:
            driver.get(self.address)
        self._wait_until_open()

    def _wait_until_open(self) -> None:
        wait_until(lambda: self.js(_READY, self.path), f"{self.name} with its kernel")

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def run_all(self) -> None:
        """Run all cells and wait until the kernel is idle."""
        self.js(
            "window.allDone = false; jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { "
            "window.allDone = true; });"
        )
        wait_until(lambda: self.js("return window.allDone"), f"all cells of {self.name}")
        self.wait_idle()

    def begin_cell(self, source: str) -> None:
        """Run a further cell at the notebook's end, without waiting for it."""
        self.js(
            f"""
            const content = {_PANEL}.content;
            content.model.sharedModel.addCell({{cell_type: "code", source: arguments[0]}});
            content.activeCellIndex = content.widgets.length - 1;
            jupyterapp.commands.execute("notebook:run-cell");
            """,
            source,
        )
        wait_until(self.last_cell_runs, "the cell to begin")

    def last_cell_runs(self) -> bool:
        """Return whether the last cell has begun and not ended."""
        return bool(self.js(f"return {_PANEL}.content.widgets.at(-1).inputArea.promptNode.textContent.includes('*')"))

    def wait_idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        wait_until(
            lambda: self.js(f"return {_PANEL}.sessionContext.session.kernel.status === 'idle'"), "the kernel to be idle"
        )

    def content(self) -> dict[str, Any]:
        """Return the notebook as it is now."""
        return dict(self.js(f"return {_PANEL}.content.model.sharedModel.toJSON()"))

    def cells(self) -> list[dict[str, Any]]:
        """Return the cells as they are now."""
        return list(self.content()["cells"])

    def use_theme(self, theme: str) -> None:
        """Change JupyterLab's theme, such as JupyterLab Dark."""
        self.js("jupyterapp.commands.execute('apputils:change-theme', {theme: arguments[0]})", theme)
        is_light = str("Light" in theme).lower()
        wait_until(lambda: self.js("return document.body.dataset.jpThemeLight") == is_light, f"the theme {theme}")

    def faults(self) -> list[str]:
        """What is wrong: cells with an error, cells that did not run, outputs that cannot be shown."""
        results = []
        for number, cell in enumerate(self.cells()):
            if cell["cell_type"] != "code":
                continue
            if cell["execution_count"] is None:
                results.append(f"cell {number} did not run")
            results += [
                f"cell {number}: {out['ename']}: {out['evalue']}"
                for out in cell["outputs"]
                if out["output_type"] == "error"
            ]
        # Asked in the page: to send all its text takes the driver seconds.
        shown = "return arguments[0].filter(words => document.body.innerText.includes(words))"
        wait_until(lambda: not self.js(shown, ["Loading widget"]), "the widgets to be shown")
        return results + self.js(shown, ["Error displaying widget", "Error creating widget"])

    def barriers(self) -> list[str]:
        """Return what axe-core calls serious or critical in the widgets, or in the text of a page without any, for
        readers with a screen reader or weak eyes."""
        script = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
        self.js(script)
        result = self.driver.execute_async_script(_AXE)
        return [
            f"{one['id']}: {html}"
            for one in result
            if one["impact"] in ("serious", "critical")
            for html in one["nodes"]
        ]

    def named(self, css: str, tooltip: str) -> WebElement:
        """Return the element of the widget with this tooltip, scrolled into sight."""
        named = f'{css}[title="{tooltip}"], :has(> label[title="{tooltip}"]) {css}'
        [element, *_] = wait_until(lambda: self.driver.find_elements(By.CSS_SELECTOR, named), f"'{tooltip}'")
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def text_of(self, css: str) -> str:
        """Return the text of all elements that match, read at one moment."""
        elements = "Array.from(document.querySelectorAll(arguments[0]))"
        return str(self.js(f"return {elements}.map(one => one.innerText ?? one.textContent).join(' ')", css))

    def press(self, label: str) -> None:
        """Press the button with this label by its key, as somebody without a mouse would."""
        [button] = wait_until(
            lambda: [
                element
                for element in self.driver.find_elements(By.CSS_SELECTOR, "button.jupyter-button")
                if element.text.strip() == label
            ],
            f"the button '{label}'",
        )
        self.js("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", button)
        button.send_keys(Keys.SPACE)

    def reopen(self) -> None:
        """Save the notebook, end its kernel and open it again."""
        self.js(
            "window.saved = false; jupyterapp.commands.execute('docmanager:save').finally(() => { window.saved = "
            "true; });"
        )
        wait_until(lambda: self.js("return window.saved"), "the notebook to be saved")
        self.close()
        self.driver.get(self.address)
        self._wait_until_open()

    def shoot(self, label: str = "") -> None:
        """Keep what is in sight as a picture, if pictures are wanted or something failed."""
        if label != "failed" and "WORKBENCH_SCREENSHOTS" not in os.environ:
            return
        self.screenshots.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(self.screenshots / f"{Path(self.name).stem}-{label}.png"))

    def shoot_all(self) -> None:
        """Keep the whole notebook as pictures."""
        total = self.js(f"return {_SCROLLER}.scrollHeight")
        for page in range(-(-total // PAGE_PIXELS)):
            self.js(f"{_SCROLLER}.scrollTop = arguments[0]", page * PAGE_PIXELS)
            time.sleep(0.8)
            self.shoot(f"{page:02d}")

    def close(self) -> None:
        """Shut the kernel down, as its menu does, and take the notebook out of the page."""
        self.js(f"window.shut = false; {_PANEL}.sessionContext.shutdown().then(() => {{ window.shut = true; }})")
        wait_until(lambda: self.js("return window.shut"), "the kernel to shut down")
        self.js(f"{_PANEL}.dispose()")


class Lab(NamedTuple):
    """A JupyterLab in a browser.  notebooks: the folder of its notebooks."""

    address: str
    driver: webdriver.Chrome
    notebooks: Path

    def open(self, name: str, screenshots: Path) -> Notebook:
        """Open a notebook of the folder in a window of the usual size."""
        self.driver.set_window_size(WIDTH, HEIGHT)
        return Notebook(self.driver, self.address, name, screenshots)


_PANEL = "jupyterapp.shell.currentWidget"
_SCROLLER = "document.querySelector('.jp-WindowedPanel-outer')"
_READY = f"""
    const panel = window.jupyterapp && {_PANEL};
    const kernel = panel && panel.sessionContext && panel.sessionContext.session && panel.sessionContext.session.kernel;
    const is_open = panel?.context?.path === arguments[0];
    return Boolean(kernel) && is_open && kernel.status === 'idle' && panel.content.widgets.length > 1;
"""
_AXE = """
    const done = arguments[0];
    const part = [".jupyter-widgets", ".jp-RenderedHTMLCommon"].find(one => document.querySelector(one));
    const asked = {resultTypes: ["violations"], selectors: false};
    axe.run({include: [[part]]}, asked).then(result => done(result.violations.map(
        one => ({id: one.id, impact: one.impact, nodes: one.nodes.map(node => node.html.slice(0, 300))}))));
"""
