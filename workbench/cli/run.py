"""`workbench plan`, `simulate` and `run`: a job on a cluster, planned, in virtual time, or executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.job import (
    ALL_FIELDS,
    CLUSTER,
    PLANNED_FIELDS,
    SIMULATED_FIELDS,
    ClusterName,
    ReportFile,
    WorkFolder,
    takes_job,
)
from workbench.cli.output import INTERRUPTED, Json, print_json, say
from workbench.core.catalogue import load_cluster
from workbench.core.errors import WriteError
from workbench.core.files import require_writable
from workbench.core.job import Fidelity, Job, Mode


@takes_job(*PLANNED_FIELDS)
def plan(job: Job, cluster: ClusterName = CLUSTER, as_json: Json = False) -> None:
    """Plan a job: which layers and samples each device gets."""
    described = load_cluster(cluster)
    from workbench.cli.progress import RunProgress
    from workbench.cli.show import show_plan
    from workbench.experiment import plan as make_plan

    with RunProgress(job, described) as progress:
        made = make_plan(job, described, progress=progress.update)
    if as_json:
        print_json(made)
    else:
        show_plan(made, described)


@takes_job(*SIMULATED_FIELDS)
def simulate(job: Job, cluster: ClusterName = CLUSTER, report: ReportFile = None, as_json: Json = False) -> None:
    """Run a job in virtual time: what would it take on these devices?"""
    _run(job, cluster, "simulate", report, as_json)


@takes_job(*ALL_FIELDS)
def run(
    job: Job,
    cluster: ClusterName = CLUSTER,
    mode: Annotated[Mode, typer.Option(help="Replay in virtual time, or run with real tensors.")] = "execute",
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = "auto",
    workdir: WorkFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same job.")] = False,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on a cluster, simulated or executed, and write the Report."""
    _run(job, cluster, mode, report, as_json, workdir=workdir, resume=resume, fidelity=fidelity)


def _run(job: Job, cluster: str, mode: Mode, path: Path | None, as_json: bool, **settings: Any) -> None:
    if path is not None:
        require_writable(path)
    described = load_cluster(cluster)
    from workbench.cli.progress import RunProgress
    from workbench.experiment import run as run_job
    from workbench.methods import INFERRING

    try:
        with RunProgress(job, described) as progress:
            report = run_job(job, described, mode, progress=progress.update, **settings)
    except KeyboardInterrupt:
        can_resume = mode == "execute" and job.method not in INFERRING
        say("Interrupted. To go on where it stopped, give the same command with --resume." if can_resume else "Interrupted.")
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
        from workbench.cli.show import next_steps, summary

        print(summary(report), file=sys.stderr if unwritten is not None else sys.stdout)
        if unwritten is not None:
            kept = report.mode == "execute" and report.plan.inference is None
            raise WriteError(unwritten.asked, unwritten.found, f"{unwritten.todo}{' Repeat with --resume.' * kept}") from unwritten
        if path is not None:
            print(f"Report      {path}")
        if following := next_steps(report, path):
            print(following)
