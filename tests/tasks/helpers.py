"""Data sets: where published ones lie, and how large tasks are."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.tasks.task import Task


def real_data(name: str) -> Path | None:
    """Return the folder that holds a data set, None if there is none: WORKBENCH_TEST_DATA names it."""
    named = os.environ.get("WORKBENCH_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "data"
    return folder if (folder / name).is_dir() else None


def sizes(task: Task) -> list[int]:
    """Return the numbers of samples to train, validate and test with."""
    return [len(split) for split in (task.train, task.validation, task.test)]
