"""Run labs at their real size in JupyterLab in Chromium: `python -m tests.browser.real_size FOLDER [LAB...]`.

Each lab's source runs with its solutions.  FOLDER gets pictures of the whole notebook (light, dark, and narrow: a
window of 1280 at 200 %) and the notebook with its outputs; what went wrong is printed.  The time of the cells goes to
data/lab-minutes.json.  Nothing else should run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from tests.browser import jupyterlab_browser
from tests.browser.jupyterlab_browser import ROOT, Notebook, browser, jupyterlab
from workbench_labs.course.minutes import Measured, keep

LIMIT_S = 3600
"""Of a lab: so long that only a cell that hangs exceeds it."""


@contextmanager
def loads() -> Iterator[list[float]]:
    """Give a list that gets the machine's load average every five seconds until the end."""
    results, ended = [os.getloadavg()[0]], threading.Event()

    def watch() -> None:
        while not ended.wait(5.0):
            results.append(os.getloadavg()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield results
    finally:
        ended.set()
        thread.join()


def run(lab: str, pictures: Path) -> Measured:
    """Run a lab, keep its pictures and outputs, and print what went wrong."""
    [source] = (ROOT / "labs").glob(f"{lab}_*.ipynb")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="workbench-") as temporary_directory, loads() as result:
        folder = Path(temporary_directory)
        with jupyterlab(folder, [source], {}) as address, browser(folder) as driver:
            notebook = Notebook(driver, address, source.name, pictures)
            began_s = time.monotonic()
            try:
                notebook.run_all()
            finally:
                taken_s = time.monotonic() - began_s
                load = fmean(result)
                notebook.shoot_all()
                (pictures / source.name).write_text(json.dumps(notebook.content()))
                notebook.use_theme("JupyterLab Dark")
                notebook.screenshots = pictures / "dark"
                notebook.shoot_all()
                notebook.use_theme("JupyterLab Light")
                driver.set_window_size(640, jupyterlab_browser.HEIGHT)
                notebook.screenshots = pictures / "narrow"
                notebook.shoot_all()
            faults = [*notebook.faults(), *_messages(notebook)]
            sys.stdout.write(f"Lab {lab}: {taken_s:.0f} s, {faults or 'no faults'}\n")
            sys.stdout.flush()
            notebook.close()
    return Measured(
        cells_s=round(taken_s, 1),
        cores=os.cpu_count() or 1,
        load=round(load, 1),
        date=time.strftime("%Y-%m-%d"),
        commit=commit.stdout.strip(),
    )


def _messages(notebook: Notebook) -> list[str]:
    """Return what libraries wrote beside the outputs, which a page shows in red."""
    return [
        f"cell {number} wrote: {''.join(output['text'])[:200]}"
        for number, cell in enumerate(notebook.cells())
        for output in cell.get("outputs", ())
        if output.get("name") == "stderr"
    ]


def main(pictures: Path, labs: list[str]) -> None:
    """Run some labs, all by default, and write each one's time at once."""
    jupyterlab_browser.LIMIT_S = LIMIT_S
    pictures.mkdir(parents=True, exist_ok=True)
    for lab in labs or sorted(path.name[:2] for path in (ROOT / "labs").glob("*.ipynb")):
        keep(lab, run(lab, pictures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
