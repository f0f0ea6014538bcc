"""`workbench bench classroom`: how many students one computer carries before their runs are marked invalid.

Each student is a separate process that runs the same job on four emulated devices, with its own seed and folder.
All press *Run* at the same moment: the worst case of a class.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from workbench.core.catalogue import load_cluster
from workbench.core.errors import RuntimeSetupError
from workbench.core.report import Report
from workbench.core.run_folder import child_environment, scratch_folder
from workbench.runs.as_text import as_command
from workbench_studies.bench.frame import Figures, Progress, jobs_of, line_of, require_words

STUDENTS = (1, 2, 3, 4)
WORDS = tuple(map(str, STUDENTS))
MOST_S = 1800


def bench(progress: Progress = print, *, only: Iterable[str] = ()) -> Figures:
    """Return for each number of students: how many runs stayed valid, their time dilation, their minutes, and by how
    much predicted and measured steps differ.

    only: numbers of students.  Raises RuntimeSetupError if a run fails.
    """
    chosen = tuple(only)
    require_words(chosen, WORDS)
    points = []
    with scratch_folder() as folder:
        for students in map(int, chosen or WORDS):
            begin_s = time.monotonic()
            reports = together(students, folder / str(students))
            point = {
                "students": students,
                "students_for_each_core": students / (os.cpu_count() or 1),
                "valid": sum(report.valid for report in reports),
                "dilation": median(report.dilation for report in reports),
                "largest_dilation": max(report.dilation for report in reports),
                "minutes": (time.monotonic() - begin_s) / 60,
                "median_deviation": median(deviations(reports)),
            }
            points.append(point)
            progress(line_of(point))
    return {"cores": os.cpu_count() or 1, "points": points}


def together(students: int, folder: Path) -> list[Report]:
    """Return the reports of runs that begin at the same moment."""
    [job] = jobs_of("classroom").values()
    reports = [folder / f"{student}.json" for student in range(students)]
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        runs = []
        for student, report in enumerate(reports):
            _, *words = shlex.split(as_command(replace(job, seed=student), load_cluster("laptop")))
            words += ["--report", str(report), "--workdir", str(folder / f"student{student}")]
            log_file = stack.enter_context((folder / f"{student}.txt").open("w+", encoding="utf-8"))
            run = subprocess.Popen(
                [sys.executable, "-m", "workbench", *words],
                env=child_environment(),
                stdout=subprocess.DEVNULL,
                stderr=log_file,
            )
            stack.callback(run.wait)
            stack.callback(run.terminate)  # nothing is left if one of them fails
            runs.append((run, log_file))
        for run, log_file in runs:
            if run.wait(MOST_S):
                log_file.seek(0)
                request = f"Runs of students on this computer were asked for, {students} at the same time."
                raise RuntimeSetupError(request, log_file.read().strip()[-1000:], "Ask for fewer with --only.")
    return [Report.read(report) for report in reports]


def deviations(reports: Sequence[Report]) -> list[float]:
    """Return each measured step's relative distance from its prediction."""
    return [
        abs(step.measured_s / step.predicted_s - 1)
        for report in reports
        for step in report.steps
        if step.measured_s and step.predicted_s
    ]
