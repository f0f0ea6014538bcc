"""What stays of figures, explorers and players in a notebook that is opened without its kernel, in a real JupyterLab.

WORKBENCH_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from jupyterlab_browser import Notebook, browser, jupyterlab, missing, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
EXPLORER = """
from workbench.core.catalogue import load_cluster
from workbench_labs.planning import paper_problem
from workbench_labs.split_editor import PlannerExplorer
explorer = PlannerExplorer(paper_problem("T5-Base", load_cluster("pac-env-a")))
explorer.tabs.selected_index = 1
explorer
"""
PLAYER = """
from workbench.cli.published import build_published, SECONDS
from workbench.core.costs import TableCosts
from workbench.core.program import Program
from workbench.simulator import simulate
from workbench.widgets import SchedulePlayer
schedule = build_published("1f1b", {"ranks": 3, "micro_batches": 40})
costs = TableCosts(seconds_by_kind=SECONDS | {"SEND": 0.4}, bytes_by_name={"act": 1000, "grad": 1000})
SchedulePlayer(simulate(Program(schedule=schedule, costs=costs, devices=("alpha", "beta", "gamma"))))
"""
SEEN = """
    const pictures = [...document.querySelectorAll(`.workbench-reopened ${arguments[0]}`)];
    return pictures.filter(one => one.getBoundingClientRect().width > 400).map(one => one.alt);
"""
KEPT = """
    return [...document.querySelectorAll('.workbench-reopened .workbench-picture')].map(one => one.src.slice(0, 19));
"""


def test_explorers_and_players_leave_their_last_figures(tmp_path: Path) -> None:
    screenshots = Path(os.environ.get("WORKBENCH_SCREENSHOTS", tmp_path / "screenshots"))
    file = tmp_path / "pictures.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in (EXPLORER, PLAYER)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), file)
    with jupyterlab(tmp_path / "lab", [file]) as address, browser(tmp_path) as driver:
        notebook = Notebook(driver, address, file.name, screenshots)
        try:
            notebook.run_all()
            assert notebook.faults() == []
            wait_until(lambda: len(notebook.js(KEPT)) == 2, "the pictures of both figures")
            assert notebook.js(SEEN, ".workbench-picture") == []  # the figures themselves are in sight
            notebook.reopen()
            wait_until(lambda: len(notebook.js(SEEN, ".workbench-picture")) == 2, "the pictures, without the kernel")
            explored, played = notebook.js(SEEN, ".workbench-picture")
            assert "Layers" in explored and "device does" in played
            assert any(label.startswith("Map of") for label in notebook.js(SEEN, "img"))
            assert "samples/s" in notebook.text_of(".workbench-reopened [role=status]")
            broken = "return [...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.alt)"
            assert notebook.js(broken) == []
            notebook.shoot("explorer")
            notebook.js("[...document.querySelectorAll('.workbench-reopened')].at(-1).scrollIntoView()")
            notebook.shoot("player")
        except BaseException:
            notebook.shoot("failed")
            raise
        finally:
            notebook.close()
