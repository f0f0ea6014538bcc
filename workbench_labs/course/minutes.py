"""How long each lab takes: work as its first cell says, and the cells' own time, measured.

`python -m workbench_labs.course.minutes [LAB...]` runs labs (all, or those named by number) at their real size, with
their solutions, on this machine, and writes data/lab-minutes.json.  Nothing else should run then.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from workbench.core.catalogue import data_folder
from workbench.core.serial import from_json, read_text, to_json, write_text
from workbench.runs.notebooks import run_notebook
from workbench_labs.course.release import RELEASED, SOURCES

_WORK = re.compile(r"^\| Time \| about (\d+) minutes", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The seconds that all cells of a lab took, on a machine with so many cores."""

    cells_s: float
    cores: int


def minutes_of_work(notebook: Path) -> int | None:
    """Return the minutes that a lab's first cell states; None if it states none."""
    first = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    stated = _WORK.search(first)
    return None if stated is None else int(stated[1])


def measured_file() -> Path:
    """Return the file of what was measured."""
    return data_folder() / "lab-minutes.json"


def measured() -> dict[str, Measured]:
    """Return what the cells of each lab took, by its number; empty if nothing was measured."""
    path = measured_file()
    if not path.exists():
        return {}
    return from_json(read_text(path, "the labs' minutes"), dict[str, Measured], source=f"'{path}'")


def measure(lab: str) -> Measured:
    """Run a lab at its real size, with its solutions if it has some."""
    [notebook] = [*SOURCES.glob(f"{lab}_*.ipynb")] or [*RELEASED.glob(f"{lab}_*.ipynb")]
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        began_s = time.monotonic()
        run_notebook(notebook, Path(folder) / notebook.name, {"output": folder})
        return Measured(cells_s=round(time.monotonic() - began_s, 1), cores=os.cpu_count() or 1)


def main(labs: list[str]) -> None:
    """Measure some labs, all by default, and write each one's time at once."""
    for lab in labs or sorted({path.name[:2] for path in RELEASED.glob("[0-9]*.ipynb")}):
        known = measured() | {lab: measure(lab)}
        write_text(measured_file(), to_json(dict(sorted(known.items()))) + "\n")
        sys.stdout.write(f"Lab {lab}: {known[lab].cells_s:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
