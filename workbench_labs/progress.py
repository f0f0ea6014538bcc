"""Which exercises of the labs were answered right: kept in a file, and shown in the index of the labs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from workbench.assets.fetch import cache_folder
from workbench.core.serial import write_text
from workbench.widgets.controls import output_folder
from workbench.widgets.tables import Table
from workbench_labs.course.minutes import measured, minutes_of_work

_CHECK = re.compile(r"exercises\.(check_\w+)\(|lab\.exercise\(\"(\w+)\"")


def progress_file() -> Path:
    """Return the file that keeps the names of the checks that were passed."""
    return cache_folder() / "labs-progress.json"


def passed() -> set[str]:
    """Return the names of the checks that were passed; none if the file is missing or unreadable."""
    try:
        found = json.loads(progress_file().read_text())
    except (OSError, ValueError):
        return set()
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def recorded(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check that notes when its answer is right."""

    @wraps(check)
    def run(*given: Any, **named: Any) -> Any:
        verdict = check(*given, **named)
        if verdict.passed and name not in (known := passed()):
            progress_file().parent.mkdir(parents=True, exist_ok=True)
            write_text(progress_file(), json.dumps(sorted({*known, name})))
        return verdict

    return run


def exercises_of(notebook: Path) -> list[str]:
    """Return the names of a lab's checks, in their order."""
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return list(dict.fromkeys(check or built for check, built in _CHECK.findall(code)))


def built(folder: Path, lab: str) -> set[str]:
    """Return the names of the functions that somebody has built and that passed, in a lab that keeps a file for each
    student (see course.lab).
    """
    found: set[str] = set()
    for path in (folder / output_folder(f"lab-{lab}")).glob(f"{lab}-*.json"):
        try:
            answers = json.loads(path.read_text())["answers"]
            found |= {name for name, answer in answers.items() if answer["passed"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a file of something else
    return found


def labs(folder: Path | str = ".") -> Table:
    """Return the labs of a folder: minutes of work, measured minutes of the cells alone, exercises answered right."""
    known, taken, rows = passed(), measured(), list[tuple[str, ...]]()
    for notebook in sorted(Path(folder).glob("[0-9]*.ipynb")):
        number, names = notebook.stem[:2], exercises_of(notebook)
        done = len({*known, *built(Path(folder), number)}.intersection(names))
        work = minutes_of_work(notebook)
        cells = f"{taken[number].cells_s / 60:.1f}" if number in taken else ""
        state = "all done" if names and done == len(names) else ""
        rows.append((notebook.stem, "" if work is None else f"{work}", cells, f"{done} of {len(names)}", state))
    columns = ("lab", "minutes", "of them the cells'", "exercises answered right", "")
    return Table(columns, rows, title="The labs and your progress")
