"""Clicks in the labs' explorers: a slider or a button is moved, and headline, alerts and figures must follow."""

from __future__ import annotations

import re

from jupyterlab_browser import Notebook, wait_until
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.keys import Keys

HANDLE = ":is(.noUi-handle, .workbench-knob)"
HEADLINE = ".widget-html [role=status]"
"""What an explorer says of the settings."""


def move_slider(notebook: Notebook, title: str, key: str, times: int = 1) -> None:
    """Press a key on the slider's handle, so many times; again where JupyterLab drew the cell meanwhile and lost it."""

    def is_moved() -> bool:
        try:
            handle = notebook.named(HANDLE, title)
            before = handle.get_attribute("aria-valuenow")
            handle.send_keys(key)
            after, first, last = (handle.get_attribute(f"aria-value{which}") for which in ("now", "min", "max"))
        except StaleElementReferenceException:
            return False
        return after != before or after in (first, last)

    for _ in range(times):
        wait_until(is_moved, f"the slider '{title}'")


def try_explorer(notebook: Notebook) -> None:
    wait_until(lambda: "samples/s" in notebook.text_of(HEADLINE), "the explorer to say its throughput")
    before = notebook.text_of(HEADLINE)
    move_slider(notebook, "tx2-h: speed in GFLOP/s", Keys.PAGE_DOWN, 6)
    wait_until(lambda: "against the beginning" in notebook.text_of(HEADLINE), "the plan to follow the slider")
    assert notebook.text_of(HEADLINE) != before
    notebook.shoot("explorer-slower")
    move_slider(notebook, "nano-h: memory for the job, in MB", Keys.HOME)
    move_slider(notebook, "nano-l: memory for the job, in MB", Keys.HOME)
    move_slider(notebook, "tx2-h: memory for the job, in MB", Keys.HOME)
    move_slider(notebook, "tx2-l: memory for the job, in MB", Keys.HOME)
    wait_until(lambda: "No plan fits." in notebook.text_of(HEADLINE), "the planner to refuse")
    wait_until(
        lambda: re.search("nano|tx2", notebook.text_of("[role=alert]")), "the device that lacks memory to be named"
    )
    notebook.shoot("explorer-refused")
    notebook.press("Reset")
    wait_until(lambda: "No plan fits." not in notebook.text_of(HEADLINE), "the planner to plan again")


def try_split_editor(notebook: Notebook) -> None:
    # The planner's plan follows costs that were measured here, and may have one stage, which has no slider.
    move_slider(notebook, "How many stages the layers are cut into", Keys.HOME)
    move_slider(notebook, "How many stages the layers are cut into", Keys.END)
    before = notebook.text_of(HEADLINE)
    move_slider(notebook, "Stage 0 has the layers before this one", Keys.ARROW_LEFT)
    wait_until(lambda: notebook.text_of(HEADLINE) != before, "the step to follow the split")
    notebook.shoot("editor-moved")
    notebook.press("Planner's plan")
    wait_until(lambda: "(+0.0% against the planner)" in notebook.text_of(HEADLINE), "the planner's plan")


def try_layer_cutter(notebook: Notebook) -> None:
    notebook.press("scheme 2")
    wait_until(lambda: "One layer, scheme 2" in notebook.text_of(".widget-html"), "the layer to be cut the other way")
    move_slider(notebook, "rpi-s: its part of the layer, relative to the others'", Keys.HOME)
    wait_until(lambda: "284 tokens on 3 devices" in notebook.text_of(".widget-html"), "the last device to be left out")
    notebook.shoot("cutter-scheme-2")


def try_straggler(notebook: Notebook) -> None:
    wait_until(lambda: "without re-scheduling" in notebook.text_of(HEADLINE), "the service in virtual time")
    notebook.shoot("straggler-lab")


def points_of(notebook: Notebook, trace: str) -> list[int]:
    """Return how many points each figure in the page has drawn of a trace."""
    script = """
        const drawn = [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot._fullData || []);
        return drawn.filter(one => one.name === arguments[0] && one._module).map(one => one.x.length);
    """
    return list(notebook.js(script, trace))


def try_bowl(notebook: Notebook) -> None:
    before = notebook.text_of(HEADLINE)
    move_slider(notebook, "Random directions of a step; each takes two forward passes", Keys.END)
    wait_until(lambda: notebook.text_of(HEADLINE) != before, "the slope from more directions")
    notebook.press("Ten steps")
    wait_until(lambda: "after 10 steps, 1280 forward passes" in notebook.text_of(HEADLINE), "the walk down the bowl")
    wait_until(lambda: 11 in points_of(notebook, "path"), "the walk in the figure")
    notebook.shoot("bowl-walked")


def try_roofline(notebook: Notebook) -> None:
    text = "little to gain"
    assert text not in notebook.text_of(HEADLINE)
    move_slider(notebook, "Tokens of each sample, padding included", Keys.END)
    move_slider(notebook, "Samples of each query", Keys.END)
    wait_until(lambda: text in notebook.text_of(HEADLINE), "long sentences to bound the machine by arithmetic")
    notebook.shoot("roofline-bound")


def try_training(notebook: Notebook) -> None:
    field = notebook.named("input", "Steps in all, those of the log included")
    steps = int(field.get_attribute("value") or 0) + 1
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(str(steps), Keys.ENTER)
    notebook.press("Learn")
    wait_until(lambda: f"{steps} steps" in notebook.text_of(HEADLINE), "the model to learn")
    wait_until(lambda: steps in points_of(notebook, "loss of a step"), "the last step in the figure")
    notebook.shoot("training-learnt")


def try_divider(notebook: Notebook) -> None:
    move_slider(notebook, "alpha: queries of each step", Keys.END)
    wait_until(lambda: "Not a step yet" in notebook.text_of(HEADLINE), "too many queries to be refused")
    wait_until(lambda: "4 queries" in notebook.text_of("[role=alert]"), "the number of queries to be named")
    notebook.press("Planner's division")
    wait_until(lambda: "(+0.0% against the planner)" in notebook.text_of(HEADLINE), "the planner's division")
    notebook.shoot("divider-planned")


def try_confidant(notebook: Notebook) -> None:
    notebook.press("Best order")
    wait_until(lambda: "Out of memory" not in notebook.text_of(HEADLINE), "a partition that fits")
    notebook.shoot("partition-best-order")
    move_slider(notebook, "How far a step goes along its gradient", Keys.END)
    wait_until(lambda: "run away" in notebook.text_of(HEADLINE), "stale gradients to run away")
    move_slider(notebook, "Heads on processor 1", Keys.ARROW_RIGHT)
    wait_until(lambda: "1 head too many" in notebook.text_of(HEADLINE), "the heads to be counted")
    notebook.shoot("heads-too-many")


def try_ring(notebook: Notebook) -> None:
    move_slider(notebook, "How many adapters are trained, from the top", Keys.END)
    wait_until(
        lambda: "24 layer times a mini-batch, 1.00 times" in notebook.text_of(HEADLINE), "all adapters to be trained"
    )
    move_slider(notebook, "Into how many parts a mini-batch is cut", Keys.ARROW_RIGHT, 2)
    wait_until(
        lambda: "24 layer times a mini-batch, 1.00 times" not in notebook.text_of(HEADLINE), "micro-batches to help"
    )
    notebook.shoot("ring-lab")
