"""The files that a run keeps in its folder, by name; docs/runs.md has a row for each."""

from __future__ import annotations

from pathlib import Path

from workbench.core.files import remove

IDENTITY, INITIAL = "fingerprint.txt", "initial.safetensors"
STEPS, SNAPSHOTS, DEVICES, ADAPTER = "steps", "snapshots", "devices", "adapter"
PLAN, REPORT, TAGS = "plan.json", "report.json", "tags.json"
WORK_FILES = (INITIAL, SNAPSHOTS, STEPS, ADAPTER, PLAN, DEVICES, IDENTITY)
"""The files of a training while it runs, and its result.  The identity is last: if a removal in this order stops
half-way, the folder is still a run's folder."""


def remove_run_files(folder: Path, *, keep: tuple[str, ...] = ()) -> None:
    """Remove what a run has left in a folder, except `keep`.  Files that do not belong to a run stay."""
    for name in (TAGS, REPORT, *WORK_FILES):
        if name not in keep:
            remove(folder / name)
