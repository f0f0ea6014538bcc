"""Notebooks in a real JupyterLab: widgets answer, nothing fails to display, nothing is left behind.

The index and the first lab run whole, of the others the cells that lead to a widget: those of several in one notebook,
because to open one and to start its kernel takes longer than most clicks.

WORKBENCH_SCREENSHOTS names a folder for pictures; without it only what fails is pictured.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from explorer_clicks import (
    HANDLE,
    move_slider,
    try_bowl,
    try_confidant,
    try_divider,
    try_explorer,
    try_layer_cutter,
    try_ring,
    try_roofline,
    try_split_editor,
    try_straggler,
    try_training,
)
from jupyterlab_browser import HEIGHT, ROOT, WIDTH, Lab, Notebook, missing, wait_until
from notebook_parts import write_parts
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


CARDS = ".jupyter-widgets .workbench-card text"
"""The words on a map of devices."""


def try_cluster_form(notebook: Notebook, device: str) -> None:
    """A link is dragged; the map is Python's answer."""
    # Two steps down from 1000 Mbit/s is 200, from 200 it is 50.
    before, after = ("200", "50") if device == "moss" else ("1000", "200")
    knob = notebook.named(HANDLE, f"{device}: link rate in Mbit/s")
    pointer = ActionChains(notebook.driver)
    pointer.click_and_hold(knob).move_by_offset(0, 10).perform()
    wait_until(lambda: after in notebook.text_of(CARDS).split(), "the map to follow the pointer")
    assert knob.text == f"{after} Mbit/s"
    wait_until(lambda: "-edited'" in notebook.text_of(".widget-html"), "the form to say that it was edited")
    notebook.shoot("cluster-form-edited")
    ActionChains(notebook.driver).release().perform()
    notebook.press("Reset")
    wait_until(lambda: "-edited'" not in notebook.text_of(".widget-html"), "the map to be as before")
    wait_until(lambda: knob.get_attribute("aria-valuetext") == f"{before} Mbit/s", "the knob to be back")


def try_job_form(notebook: Notebook) -> None:
    field = notebook.named("input", "Samples of one optimizer step, over all devices")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("30", Keys.ENTER)
    wait_until(lambda: "not a multiple" in notebook.text_of("[role=alert]"), "the form to say what is wrong")
    notebook.shoot("job-form-error")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("32", Keys.ENTER)
    wait_until(lambda: "not a multiple" not in notebook.text_of("[role=alert]"), "the form to be content")


def try_run_panel(notebook: Notebook) -> None:
    notebook.press("Simulate")
    wait_until(lambda: "Finished in" in notebook.text_of(".widget-vbox .workbench-live-head"), "the simulation")
    notebook.press("Run")
    caption, device = ".widget-vbox .workbench-caption", ".widget-vbox .workbench-live-devices svg"
    wait_until(lambda: "measured" in notebook.text_of(caption), "a measured step over the predicted one")
    wait_until(lambda: "%" in notebook.text_of(device), "the devices' work")
    wait_until(lambda: labels_of(notebook, ".widget-vbox") == LIVE, "all pictures of the run")
    notebook.shoot("run-panel-running")
    wait_until(lambda: "after epoch" in notebook.text_of(".widget-html"), "the run")
    notebook.shoot("run-panel-finished")


LIVE = ["Map of", "Training loss", "Devices:", "What each device does"]
"""How the names of a live view's pictures begin."""


def labels_of(notebook: Notebook, where: str) -> list[str]:
    """Return which of these pictures of live views can be seen there, large enough to be read."""
    names = """
        const pictures = [...document.querySelectorAll(`${arguments[0]} .workbench-live :is([role=img], img)`)];
        const seen = pictures.filter(one => one.getBoundingClientRect().width > 200);
        return seen.map(one => one.ariaLabel || one.alt || "");
    """
    result = notebook.js(names, where)
    return [begin for begin in LIVE if any(label.startswith(begin) for label in result)]


def try_live_view_without_kernel(notebook: Notebook) -> None:
    """The last state of a run stays in the notebook."""
    notebook.reopen()
    wait_until(lambda: labels_of(notebook, ".workbench-reopened") == LIVE, "the pictures of the run")
    notebook.wait_idle()
    wait_until(lambda: notebook.faults() == [], "JupyterLab to look for the widgets no longer")
    notebook.js("document.querySelector('.workbench-reopened .workbench-live').scrollIntoView()")
    notebook.shoot("live-view-reopened")


def try_player(notebook: Notebook) -> None:
    names = "return [...document.querySelectorAll('.widget-play button')].map(one => one.ariaLabel)"
    wait_until(lambda: {"Play", "Stop"} <= set(notebook.js(names)), "the player's buttons")
    before = notebook.text_of("[aria-live] table")
    move_slider(notebook, "The moment that is shown", Keys.PAGE_UP * 25)  # as of a key that is held down
    wait_until(lambda: notebook.text_of("[aria-live] table") != before, "the player to move")
    notebook.shoot("player-moved")


def in_quickstart(notebook: Notebook) -> None:
    try_cluster_form(notebook, "delta")
    try_job_form(notebook)
    try_run_panel(notebook)
    try_player(notebook)
    try_live_view_without_kernel(notebook)


def try_keys(notebook: Notebook) -> None:
    """Letters typed in a list of choices would be JupyterLab's: "d d" deletes the cell."""
    cells = len(notebook.cells())
    chosen = notebook.driver.find_element(By.CSS_SELECTOR, ".jupyter-widgets select")
    notebook.js("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", chosen)
    chosen.send_keys("d", "d")
    assert len(notebook.cells()) == cells


def try_names(notebook: Notebook) -> None:
    nameless = """
        const kinds = ".noUi-handle, input, select, button, .widget-readout[contenteditable]";
        const controls = document.querySelectorAll(`.jupyter-widgets :is(${kinds})`);
        const label = one => one.labels?.length && one.labels[0].textContent;
        const named = one => one.ariaLabel || label(one) || one.textContent.trim() || one.title;
        return [controls.length, [...controls].filter(one => !named(one)).map(one => one.outerHTML)];
    """
    count, result = notebook.js(nameless)
    assert count and not result
    spoken = "return [...document.querySelectorAll('.workbench-knob')].map(one => one.ariaValueText)"
    assert all(re.fullmatch(r"[\d.e+]+ (of a core|GFLOP/s|MB|Mbit/s|ms)", words) for words in notebook.js(spoken))


def try_wrong_value(notebook: Notebook) -> None:
    """What was typed stays, an alert belongs to its field, and nothing is drawn of it."""
    notebook.press("Table")
    wait_until(lambda: notebook.named("input", "moss: link rate in Mbit/s, typed").is_displayed(), "the table")
    field = notebook.named("input", "moss: link rate in Mbit/s, typed")
    for typed, said in (("0", "at least 0.01"), ("abc", "must be a number")):
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(typed, Keys.ENTER)
        wait_until(lambda said=said: said in notebook.text_of(".workbench-devices [role=alert]"), "the alert")
    invalid = "return [arguments[0].value, arguments[0].ariaInvalid, document.getElementById(arguments[1])?.innerText]"
    wait_until(lambda: field.get_attribute("aria-describedby"), "the alert to belong to its field")
    value, is_invalid, alert = notebook.js(invalid, field, field.get_attribute("aria-describedby"))
    assert (value, is_invalid) == ("abc", "true") and "must be a number" in alert
    notebook.shoot("wrong-value")
    notebook.press("Reset")
    wait_until(lambda: "number" not in notebook.text_of(".workbench-devices [role=alert]"), "the alert to go")


def try_narrow_and_dark(notebook: Notebook) -> None:
    cropped = """
        const plots = ".widget-vbox:has(> * > .js-plotly-plot), .widget-vbox:has(> .js-plotly-plot)";
        const boxes = [...document.querySelectorAll(plots)];
        return boxes.filter(box => box.scrollWidth > box.clientWidth + 1).length;
    """
    cards = "return [...document.querySelectorAll('.jupyter-widgets .workbench-card')].map(one => one.clientWidth)"
    notebook.driver.set_window_size(1024, HEIGHT)
    try:
        wait_until(lambda: not notebook.js(cropped), "the figures to become narrower")
        assert min(notebook.js(cards)) > 180
        notebook.js("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
        look = "return getComputedStyle(document.querySelector('.js-plotly-plot .main-svg')).backgroundColor"
        wait_until(lambda: notebook.js(look) == "rgba(0, 0, 0, 0)", "the figures to become dark")
        notebook.shoot("narrow-and-dark")
    finally:
        notebook.js("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
        notebook.driver.set_window_size(WIDTH, HEIGHT)


def try_while_a_cell_runs(notebook: Notebook) -> None:
    """A long cell must not stop the widgets; ipykernel 7.4.0 alone keeps their messages until the cell has ended."""
    end = notebook.screenshots / "end-of-the-cell"
    end.parent.mkdir(parents=True, exist_ok=True)
    notebook.begin_cell(f"import os, time\nwhile not os.path.exists({str(end)!r}):\n    time.sleep(0.1)")
    move_slider(notebook, "moss: link rate in Mbit/s", Keys.ARROW_LEFT, 2)
    wait_until(lambda: "50" in notebook.text_of(CARDS).split(), "the map to follow the knob during the cell")
    assert notebook.last_cell_runs()
    end.touch()
    notebook.press("Reset")
    wait_until(lambda: not notebook.last_cell_runs(), "the cell to end")
    # Otherwise the reset may undo what is done next.
    wait_until(lambda: "50" not in notebook.text_of(CARDS).split(), "the old rate")


def try_reopening(notebook: Notebook) -> None:
    """Without its kernel a notebook keeps its figures, and says what a panel needs."""
    says = "The controls need their kernel"
    assert says not in notebook.text_of("body")
    notebook.reopen()
    wait_until(lambda: says in notebook.text_of("body"), "the panels to say what they need")
    notebook.js("[...document.querySelectorAll('.workbench-reopened')].at(-1).scrollIntoView({block: 'center'})")
    notebook.wait_idle()
    wait_until(lambda: notebook.faults() == [], "JupyterLab to look for the widgets no longer")
    notebook.shoot("reopened")


def in_devices(notebook: Notebook) -> None:
    try_while_a_cell_runs(notebook)
    try_cluster_form(notebook, "moss")
    try_wrong_value(notebook)
    try_keys(notebook)
    try_names(notebook)
    try_narrow_and_dark(notebook)
    try_reopening(notebook)


def in_several(notebook: Notebook) -> None:
    try_bowl(notebook)
    try_roofline(notebook)
    try_training(notebook)
    try_divider(notebook)
    try_layer_cutter(notebook)
    try_straggler(notebook)
    try_player(notebook)
    try_ring(notebook)
    try_confidant(notebook)


def try_smaller_window(notebook: Notebook) -> None:
    """A chart keeps its height."""
    heights = "return [...document.querySelectorAll('.js-plotly-plot')].map(one => one.offsetHeight)"
    before = notebook.js(heights)
    notebook.driver.set_window_size(WIDTH - 200, HEIGHT)
    try:
        widths = "return [...document.querySelectorAll('.js-plotly-plot .main-svg')].map(one => one.clientWidth)"
        wait_until(lambda: max(notebook.js(widths)) < WIDTH - 200, "the charts to fit into a smaller window")
        assert min(notebook.js(heights)) >= min(before) > 200
    finally:
        notebook.driver.set_window_size(WIDTH, HEIGHT)


def in_cut(notebook: Notebook) -> None:
    try_smaller_window(notebook)
    try_explorer(notebook)
    try_split_editor(notebook)


def menu_of(notebook: Notebook, label: str) -> Select:
    """Return the menu with this label; ipywidgets shows no tooltip of a menu that has one."""
    menu = notebook.driver.find_element(By.XPATH, f"//label[text()='{label}']/following-sibling::select")
    notebook.js("arguments[0].scrollIntoView({block: 'center'})", menu)
    return Select(menu)


def try_adviser(notebook: Notebook) -> None:
    """Another goal changes the ranking; another combination is explained, and its command copied."""
    idle = """
        const buttons = [...document.querySelectorAll('button.jupyter-button')];
        return buttons.some(one => one.textContent.trim() === 'Advise' && !one.disabled);
    """

    def has_advised(goal: str) -> bool:
        return f"Best for {goal}" in notebook.text_of(".widget-html") and notebook.js(idle)

    wait_until(lambda: has_advised("time"), "the advice that the cell asked for")
    notebook.shoot("adviser")
    menu_of(notebook, "What counts").select_by_visible_text("memory")
    notebook.press("Advise")
    wait_until(lambda: has_advised("memory"), "advice on memory")
    combinations = menu_of(notebook, "Combination")
    names = [option.text for option in combinations.options]
    combinations.select_by_index(next(number for number, name in enumerate(names) if "Confidant" in name))
    notebook.press("Copy as command")
    wait_until(lambda: "--method confidant" in notebook.text_of(".workbench-copied"), "its command")
    notebook.shoot("adviser-memory")


def in_index(notebook: Notebook) -> None:
    links = "return [...document.querySelectorAll('.jp-MarkdownOutput a')].map(one => one.textContent)"
    assert {"00 Ten minutes", "10 Never drain", "real devices"} <= set(notebook.js(links))
    assert re.search(r"00_quickstart[^\n]*\d of \d", notebook.text_of("table"))
    notebook.shoot("index")


CLICKS: dict[str, Callable[[Notebook], None]] = {
    "index": in_index,
    "00_quickstart": in_quickstart,
    "01_devices": in_devices,
    "04_cut_for_unequal_devices": in_cut,
    "05_slopes 06_forward_only 07_cut_a_layer 08_break_it 09_data_that_stay 10_never_drain": in_several,
    "comparison": try_adviser,
}
SHOWN = {
    "01_devices": ("01-cluster-form", "01-training-bandwidth"),
    "04_cut_for_unequal_devices": ("09-22-54920a", "09-explore", "09-editor"),
    "05_slopes": ("05-08-da7a4c",),
    "06_forward_only": ("06-12-a30d6d", "06-28-13c440", "06-48-fe358e"),
    "07_cut_a_layer": ("07-cost-cutter",),
    "08_break_it": ("broken-16-f86f62",),
    "09_data_that_stay": ("ring-17-ae99e6", "ring-22-986b2f"),
    "10_never_drain": ("drain-11-a73bd0", "drain-20-fa8531", "drain-29-e7d22e", "drain-37-17b7c1"),
    "comparison": ("advise",),
}
"""The cells that show a widget or a chart, of notebooks that do not run whole."""


def file_of(names: str) -> str:
    """Return the file in which notebooks are opened: with their parts, where there are several."""
    return f"{names.split()[0]}.ipynb"


@pytest.fixture(scope="module", autouse=True)
def _notebooks(lab: Lab) -> Iterator[None]:
    for names in CLICKS:
        paths = {name: ROOT / "notebooks" / f"{name}.ipynb" for name in names.split()}
        if paths.keys() <= SHOWN.keys():
            write_parts({path: SHOWN[name] for name, path in paths.items()}, lab.notebooks / file_of(names))
        else:
            shutil.copy(paths[names], lab.notebooks)
    yield
    shutil.rmtree(Path(tempfile.gettempdir()) / "workbench-tiny", ignore_errors=True)  # the notebooks' output


@pytest.mark.parametrize("names", CLICKS)
def test_widgets_answer(names: str, lab: Lab, tmp_path: Path) -> None:
    notebook = lab.open(file_of(names), Path(os.environ.get("WORKBENCH_SCREENSHOTS", tmp_path / "screenshots")))
    try:
        notebook.run_all()
        assert notebook.faults() == []
        assert notebook.barriers() == []
        CLICKS[names](notebook)
        notebook.wait_idle()
        assert notebook.faults() == []
    except BaseException:
        notebook.shoot("failed")
        raise
    finally:
        notebook.close()
