"""Run the quickstart notebook headless through papermill and print its result: `make quickstart` calls this."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from workbench.cli.output import next_steps, print_text, say, summary
from workbench.core.errors import ConfigError
from workbench.core.files import make_folder
from workbench.core.report import Report
from workbench.runs.notebooks import run_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"
FOLDER = ROOT / "figures" / "quickstart"
REPORT = FOLDER / "report.json"  # the notebook writes it, and the figures next to it


def main() -> int:
    """Run the notebook; return the exit code: 0, 1 if a cell failed, 130 if interrupted."""
    began = time.time()
    make_folder(FOLDER)
    REPORT.unlink(missing_ok=True)  # an old report must not pass for this run's
    from papermill.exceptions import PapermillExecutionError

    print_text(f"Running {NOTEBOOK.relative_to(ROOT)}: about 3 minutes on two free cores, more on a busy computer ...")
    try:
        run_notebook(NOTEBOOK, FOLDER / NOTEBOOK.name)
    except PapermillExecutionError as error:
        say(f"Cell {error.exec_count} of {NOTEBOOK.name} failed: {error.ename}: {error.evalue}")
        say(f"The whole trace is in {FOLDER / NOTEBOOK.name}. `workbench doctor` says what this machine lacks.")
        return 1
    except KeyboardInterrupt:
        say("Interrupted. `make quickstart` starts again.")
        return 130
    try:
        report = Report.read(REPORT)
    except ConfigError as error:
        say(f"{NOTEBOOK.name} ran, but left no report: {error}")
        return 1
    print_text(f"\nQuickstart, {time.time() - began:.0f} s\n{summary(report, figures=FOLDER)}")
    print_text(next_steps(report, REPORT, program=".venv/bin/workbench"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
