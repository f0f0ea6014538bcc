"""Every notebook in a real JupyterLab: all cells run, its widgets answer, nothing fails to display, nothing is left behind.

WORKBENCH_SCREENSHOTS names a folder for the pictures (default: the test's temporary folder).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyterlab_browser import ROOT, Notebook, browser, jupyterlab, missing, wait_until
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=missing())]


def move_slider(notebook: Notebook, title: str, key: str, times: int = 1) -> None:
    handle = notebook.named(".noUi-handle", title)
    for _ in range(times):
        handle.send_keys(key)


def try_cluster_form(notebook: Notebook, device: str) -> None:
    # Two steps down from 1000 Mbit/s is 200, from 200 it is 50.
    before, after = ("200", "50") if device == "moss" else ("1000", "200")
    move_slider(notebook, f"{device}: link rate in Mbit/s", Keys.ARROW_LEFT, 2)
    bars = ".jupyter-widgets .js-plotly-plot .bartext"
    wait_until(lambda: after in notebook.text_of(bars).split(), 30, "the overview to follow the slider")
    assert "-edited'" in notebook.text_of(".widget-html")
    notebook.shoot("cluster-form-edited")
    notebook.press("Reset")
    wait_until(lambda: "-edited'" not in notebook.text_of(".widget-html"), 30, "the overview to be as before")
    wait_until(lambda: after not in notebook.text_of(bars).split() and before in notebook.text_of(bars).split(), 30, "the old bars")


def try_job_form(notebook: Notebook) -> None:
    field = notebook.named("input", "Samples of one optimizer step, over all devices")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("30", Keys.ENTER)
    wait_until(lambda: "not a multiple" in notebook.text_of("[role=alert]"), 30, "the form to say what is wrong")
    notebook.shoot("job-form-error")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("32", Keys.ENTER)
    wait_until(lambda: "not a multiple" not in notebook.text_of("[role=alert]"), 30, "the form to be content")


def try_run_panel(notebook: Notebook) -> None:
    notebook.press("Simulate")
    wait_until(lambda: "Finished in" in notebook.text_of(".widget-html [role=status]"), 60, "the simulation")
    notebook.press("Run")
    wait_until(lambda: "doing" in notebook.text_of(".widget-html"), 90, "the devices to say what they are doing")
    notebook.shoot("run-panel-running")
    wait_until(lambda: "Test split" in notebook.text_of(".widget-html"), 120, "the run")
    notebook.shoot("run-panel-finished")


def try_player(notebook: Notebook) -> None:
    before = notebook.text_of("table[aria-live]")
    move_slider(notebook, "The moment that is shown", Keys.PAGE_UP, 25)
    wait_until(lambda: notebook.text_of("table[aria-live]") != before, 30, "the player to move")
    notebook.shoot("player-moved")


def in_quickstart(notebook: Notebook) -> None:
    try_cluster_form(notebook, "delta")
    try_job_form(notebook)
    try_run_panel(notebook)
    try_player(notebook)


def in_devices(notebook: Notebook) -> None:
    try_cluster_form(notebook, "moss")


def in_pac_plus(notebook: Notebook) -> None:
    try_job_form(notebook)
    try_player(notebook)


@pytest.mark.parametrize(
    ("name", "click_through"), [("00_quickstart", in_quickstart), ("01_devices", in_devices), ("02_pac_plus", in_pac_plus)]
)
def test_notebook_runs_and_its_widgets_answer(name: str, click_through: Callable[[Notebook], None], tmp_path: Path) -> None:
    file = f"{name}.ipynb"
    pictures = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or tmp_path / "screenshots")
    with jupyterlab(tmp_path, [ROOT / "notebooks" / file]) as address, browser(tmp_path) as driver:
        notebook = Notebook(driver, address, file, pictures)
        try:
            notebook.run_all(seconds=300)
            notebook.shoot_all()
            assert notebook.faults() == []
            click_through(notebook)
            notebook.wait_idle()
            assert notebook.faults() == []
        except BaseException:
            notebook.shoot("failed")
            raise
        finally:
            notebook.close()
