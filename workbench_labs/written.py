"""The files of a lab's run."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from workbench import plots
from workbench.core.report import Report
from workbench_labs.notes import note


def write_run(report: Report, folder: str, *, png: bool) -> Markup:
    """Write a run's report and its figures into a folder, and say where.  png: as pictures, too."""
    path = Path(folder)
    report.write(path / "report.json")
    files = plots.write_figures(report, path, png="auto" if png else False)
    return note(f"{len(files)} files in {path}; open index.html there (no network needed)")
