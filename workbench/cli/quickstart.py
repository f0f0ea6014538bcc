"""Run the quickstart notebook headless through papermill and say what came out: what `make quickstart` calls."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.cli.show import summary
from workbench.core.errors import ConfigError
from workbench.core.report import Report

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"
FOLDER = ROOT / "figures" / "quickstart"
REPORT = FOLDER / "report.json"  # the notebook writes it, and the figures beside it


def main() -> int:
    """Run the notebook; return the exit code: 0, 1 if a cell failed, 130 if interrupted."""
    began = time.time()
    FOLDER.mkdir(parents=True, exist_ok=True)
    REPORT.unlink(missing_ok=True)  # an old report must not pass for this run's
    # jsonschema would build a grammar of web addresses on import, which takes longer than all the rest and checks nothing of ours.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from papermill.exceptions import PapermillExecutionError

    print(f"Running {NOTEBOOK.relative_to(ROOT)} ...", flush=True)
    try:
        # Unix sockets in a folder of our own: nobody else reaches the kernel, and no port is opened.
        with tempfile.TemporaryDirectory(prefix="workbench-kernel-", ignore_cleanup_errors=True) as sockets:

            class PrivateKernel(AsyncKernelManager):
                def __init__(self, **settings: Any) -> None:
                    super().__init__(transport="ipc", connection_file=f"{sockets}/kernel.json", **settings)

            papermill.execute_notebook(
                NOTEBOOK,
                FOLDER / NOTEBOOK.name,
                cwd=NOTEBOOK.parent,
                kernel_name="python3",
                progress_bar=sys.stderr.isatty(),
                kernel_manager_class=PrivateKernel,
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # an end on a busy machine is no error
            )
    except PapermillExecutionError as error:
        print(f"Cell {error.exec_count} of {NOTEBOOK.name} failed: {error.ename}: {error.evalue}", file=sys.stderr)
        print(f"The whole trace is in {FOLDER / NOTEBOOK.name}. `workbench doctor` says what this machine lacks.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. `make quickstart` starts again.", file=sys.stderr)
        return 130
    try:
        report = Report.read(REPORT)
    except ConfigError as error:
        print(f"{NOTEBOOK.name} ran, but left no report: {error}", file=sys.stderr)
        return 1
    print(f"\nQuickstart, {time.time() - began:.0f} s\n{summary(report, figures=FOLDER)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
