"""Which exercises of the labs were answered right: stored in a file, and shown in the index of the labs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from workbench.widgets.notebook_files import output_folder
from workbench.widgets.tables import Table
from workbench_labs.course.minutes import Measured, measured, minutes_of_work

_CHECK = re.compile(r"lab\.exercise\(\"(\w+)\"")


def exercises_of(notebook: Path) -> list[str]:
    """Return the names of a lab's exercises, in their order."""
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return list(dict.fromkeys(_CHECK.findall(code)))


def built(folder: Path, lab: str) -> set[str]:
    """Return the names of the exercises that somebody has answered right, by the newest file of a lab (see course.lab).

    Another student's older file does not count.
    """
    paths = (folder / output_folder(lab)).parent.glob(f"*/{lab}-*.json")
    for path in sorted(paths, key=lambda one: one.stat().st_mtime, reverse=True):
        try:
            answers = json.loads(path.read_text())["answers"]
            return {name for name, answer in answers.items() if answer["passed"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a file of something else
    return set()


def _cells_minutes(minutes: Measured) -> str:
    """Return the minutes that the cells took, 'at most' where they had to wait for other programs."""
    return f"{'at most ' if minutes.is_upper_bound else ''}{minutes.cells_s / 60:.1f}"


def labs(folder: Path | str = ".") -> Table:
    """Return the labs of a folder: minutes of work, measured minutes of the cells alone, exercises answered right."""
    minutes, rows = measured(), list[tuple[str, ...]]()
    for notebook in sorted(Path(folder).glob("[0-9]*.ipynb")):
        number, names = notebook.stem[:2], exercises_of(notebook)
        done = len(built(Path(folder), number).intersection(names))
        work = minutes_of_work(notebook)
        cells = _cells_minutes(minutes[number]) if number in minutes else ""
        state = "all done" if names and done == len(names) else ""
        rows.append((notebook.stem, "" if work is None else f"{work}", cells, f"{done} of {len(names)}", state))
    columns = ("lab", "minutes", "of them the cells'", "exercises answered right", "")
    return Table(columns, rows, title="The labs and your progress")
