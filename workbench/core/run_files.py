"""The files that a run keeps in its folder, by name; docs/runs.md has a row for each."""

from __future__ import annotations

import shutil
from pathlib import Path

IDENTITY, INITIAL = "fingerprint.txt", "initial.safetensors"
STEPS, SNAPSHOTS, DEVICES, ADAPTER = "steps", "snapshots", "devices", "adapter"
PLAN, REPORT, TAGS = "plan.json", "report.json", "tags.json"
WORK_FILES = (IDENTITY, INITIAL, SNAPSHOTS, STEPS, ADAPTER, PLAN, DEVICES)
"""What a training keeps while it runs, and its result."""


def remove_run_files(folder: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Remove what a run has left in a folder, except `keep`.  Files that do not belong to a run stay."""
    for name in (*WORK_FILES, REPORT, TAGS):
        path = folder / name
        if name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
