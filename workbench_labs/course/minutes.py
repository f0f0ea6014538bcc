"""How long each lab takes: work as its first cell says, and the cells' own time, measured.

`python -m tests.browser.real_size` runs the labs at their real size and writes data/lab-minutes.json.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from workbench.core.catalogue import data_folder
from workbench.core.serial import read_json, write_json

_WORK = re.compile(r"^\| Time \| about (\d+) minutes", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The seconds that all cells of a lab took, with their solutions, at the real size.

    cores: the machine's number of cores.  load: mean of its load average meanwhile, the lab's own processes included.
    date: such as 2026-11-28.  commit: the labs' commit.
    """

    cells_s: float
    cores: int
    load: float
    date: str
    commit: str

    @property
    def is_upper_bound(self) -> bool:
        """Return whether more processes wanted to compute than the machine has cores, so that the cells had to wait."""
        return self.load > self.cores + 1


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
    return read_json(path, dict[str, Measured], "the labs' minutes")


def keep(lab: str, minutes: Measured) -> None:
    """Write what a lab's cells took, in place of an earlier measurement of it."""
    write_json(measured_file(), dict(sorted((measured() | {lab: minutes}).items())))
