"""Run a job for a command: `workbench run`, `workbench simulate`, and torchrun's rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from workbench.cli.output import INTERRUPTED, RunProgress, next_steps, print_json, print_text, say, summary
from workbench.core.cluster import Cluster
from workbench.core.errors import WriteError
from workbench.core.files import require_writable
from workbench.core.job import Job, Mode, Tracker
from workbench.core.methods import declaration_of
from workbench.methods.base import Event


def run_and_show(
    job: Job, cluster: Cluster, mode: Mode, path: Path | None, as_json: bool, track: Tracker = "none", **settings: Any
) -> None:
    """Run a job, show its progress, and write and print its Report.

    path: where the Report is written.  settings: those of experiment.run.
    """
    require_writable(path)
    from workbench.experiment import run as run_job
    from workbench.runs.tracking import Tracking

    stages: set[str] = set()
    try:
        with Tracking(track, job, cluster, mode) as tracking, RunProgress(job, cluster) as progress:

            def take(event: Event) -> None:
                stages.add(event.stage)
                tracking.update(event)
                progress.update(event)

            report = run_job(job, cluster, mode, progress=take, **settings)
            tracking.finish(report)
    except KeyboardInterrupt:
        has_begun = "train" in stages or settings.get("resume")  # before, its folder holds no run
        can_resume = mode == "execute" and declaration_of(job.method).trains and has_begun
        say("Interrupted. To continue, give the same command with --resume." if can_resume else "Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    unwritten: WriteError | None = None
    if path is not None:
        try:
            report.write(path)
        except WriteError as error:  # the disk has filled up meanwhile: what came out is still worth telling
            unwritten = error
    if as_json and unwritten is None:
        print_json(report)
    else:
        (print_text if unwritten is None else say)(summary(report))
        if unwritten is not None:
            resumes = report.mode == "execute" and report.plan.inference is None
            raise WriteError(
                unwritten.asked, unwritten.found, f"{unwritten.todo}{' Repeat with --resume.' * resumes}"
            ) from unwritten
        if path is not None:
            print_text(f"Report      {path}")
        if tracking.shown:
            print_text(f"Tracked     {tracking.shown}")
        if following := next_steps(report, path):
            print_text(following)
