"""The history of runs in a real JupyterLab: two are chosen and drawn, tagged, removed; the figure outlives the kernel.

WORKBENCH_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import made_up_report
import nbformat
import pytest
from jupyterlab_browser import HEIGHT, WIDTH, Lab, Notebook, missing, wait_until
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By

from workbench.methods.common.folder import begin_folder

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
TRACES = """
    const plots = [...document.querySelectorAll('.js-plotly-plot')].filter(one => one.offsetParent);
    return plots.flatMap(plot => plot._fullData || []).filter(one => one.showlegend).map(one => one.name);
"""


def keep_runs(folder: Path) -> None:
    """Three finished runs: with other numbers, with another method, and one that the host was too busy for."""
    example_report = made_up_report.report()
    steps = tuple(
        replace(step, step=at, epoch=epoch, loss=0.7 / (1 + 0.04 * (40 * epoch + at)) + 0.03 * (at * 7 % 5) / 5)
        for epoch in range(3)
        for at, step in enumerate([example_report.steps[2 * epoch]] * 40)
    )
    example_report = replace(example_report, steps=steps, chosen_epoch=3)
    for number, name in enumerate(("narrow", "wide", "busy")):
        job = replace(example_report.job, options={"reduction": 4 * (number + 1)}, epochs=3)
        losses = tuple(replace(step, loss=step.loss * (1 - 0.1 * number)) for step in steps)
        epochs = tuple(replace(epoch, metrics={"accuracy": 0.7 + 0.04 * number}) for epoch in example_report.epochs)
        run = replace(example_report, job=job, steps=losses, epochs=epochs, valid=name != "busy")
        begin_folder(folder / name, "digest", job)
        run.write(folder / name / "report.json")


def choose(notebook: Notebook, run: str) -> None:
    def pressed() -> bool:
        boxes = notebook.driver.find_elements(By.CSS_SELECTOR, ".widget-checkbox label")
        try:
            [box] = [box for box in boxes if run in box.text] or [None]
            if box is not None:
                notebook.js("arguments[0].scrollIntoView({block: 'center'})", box)
                box.find_element(By.CSS_SELECTOR, "input").click()
        except StaleElementReferenceException:  # the list was just made again
            return False
        return box is not None

    wait_until(pressed, f"the run '{run}' in the list")


def traces(notebook: Notebook) -> list[str]:
    return list(notebook.js(TRACES))


def test_runs_are_chosen_drawn_tagged_and_removed(lab: Lab, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("WORKBENCH_SCREENSHOTS", tmp_path / "screenshots"))
    runs, file = tmp_path / "runs", lab.notebooks / "history.ipynb"
    keep_runs(runs)
    cells = [f"from workbench.widgets import RunHistory\nhistory = RunHistory([{str(runs)!r}])\nhistory", "1 + 1"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    result = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel)
    nbformat.write(result, file)
    notebook, driver = lab.open(file.name, pictures), lab.driver
    try:
        notebook.run_all()
        wait_until(lambda: "Choose two or more" in notebook.text_of(".js-plotly-plot"), "the figure to say what to do")
        for name in ("wide", "narrow"):
            choose(notebook, name)
        wait_until(lambda: traces(notebook) == ["wide", "narrow"], "both runs in the figure")
        wait_until(lambda: "reduction" in notebook.text_of(".widget-html table"), "the table of what differs")
        assert notebook.barriers() == []
        for width, theme in ((WIDTH, "Light"), (1024, "Light"), (1024, "Dark")):
            driver.set_window_size(width, HEIGHT)
            notebook.js(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})")
            is_dark = "return document.body.dataset.jpThemeLight === 'false'"
            wait_until(lambda is_dark=is_dark, theme=theme: notebook.js(is_dark) is (theme == "Dark"), "the theme")
            notebook.shoot(f"{width}-{theme}")
        notebook.use_theme("JupyterLab Light")
        field = driver.find_element(By.CSS_SELECTOR, "input[placeholder='words with blanks']")
        choose(notebook, "narrow")
        field.clear()
        field.send_keys("baseline\n")
        notebook.press("Tag")
        wait_until(lambda: traces(notebook) == ["baseline"], "the figure to use the tag")
        notebook.press("Remove")
        wait_until(lambda: "for good" in notebook.text_of("button.jupyter-button"), "the question to appear")
        notebook.press("Remove for good")
        wait_until(lambda: not (runs / "wide").exists(), "the run to be removed")
        choose(notebook, "busy")
        wait_until(lambda: traces(notebook) == ["busy"], "the third run in the figure")
        assert notebook.faults() == []
        notebook.reopen()
        wait_until(lambda: traces(notebook) == ["busy"], "the figure to be there without the kernel")
        notebook.shoot("reopened")
    except BaseException:
        notebook.shoot("failed")
        raise
    finally:
        notebook.close()
