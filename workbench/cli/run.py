"""`workbench plan`, `simulate` and `run`: a job on a cluster, planned, in virtual time, or executed."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.job import (
    CLUSTER,
    DEFAULTS,
    BackupEvery,
    BatchSize,
    ClusterName,
    Data,
    Epochs,
    Faults,
    Fidelity,
    LearningRate,
    MaxLength,
    Method,
    MicroBatches,
    Model,
    Options,
    ReportFile,
    Samples,
    Seed,
    TaskName,
    WorkFolder,
    parse_options,
)
from workbench.cli.output import INTERRUPTED, Json, print_json, say
from workbench.core.catalogue import load_cluster
from workbench.core.errors import WriteError
from workbench.core.files import require_writable
from workbench.core.job import Job
from workbench.core.report import Report


class Mode(StrEnum):
    """Replay in virtual time, or run with real tensors."""

    simulate = "simulate"
    execute = "execute"


def plan(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    max_length: MaxLength = DEFAULTS.max_length,
    data: Data = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Plan a job: which layers and samples each device gets."""
    job = Job(
        method=method,
        model=model,
        task=task,
        batch_size=batch_size,
        micro_batches=micro_batches,
        max_length=max_length,
        data=data,
        options=parse_options(option),
    )
    described = load_cluster(cluster)
    from workbench.cli.show import show_plan
    from workbench.experiment import plan as make_plan

    made = make_plan(job, described)
    if as_json:
        print_json(made)
    else:
        show_plan(made, described)


def simulate(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    epochs: Epochs = DEFAULTS.epochs,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    max_length: MaxLength = DEFAULTS.max_length,
    train_samples: Samples = None,
    data: Data = None,
    option: Options = None,
    fault: Faults = None,
    backup_every: BackupEvery = DEFAULTS.backup_every,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Run a job in virtual time: what would it take on these devices?"""
    job = Job(
        method=method,
        model=model,
        task=task,
        epochs=epochs,
        seed=seed,
        batch_size=batch_size,
        micro_batches=micro_batches,
        max_length=max_length,
        train_samples=train_samples,
        data=data,
        options=parse_options(option),
        faults="; ".join(fault or ()),
        backup_every=backup_every,
    )
    if report is not None:
        require_writable(report)
    _finish(_run(job, cluster, "simulate"), report, as_json)


def run(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    epochs: Epochs = DEFAULTS.epochs,
    seed: Seed = DEFAULTS.seed,
    mode: Annotated[Mode, typer.Option(help="Replay in virtual time, or run with real tensors.")] = Mode.execute,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    max_length: MaxLength = DEFAULTS.max_length,
    train_samples: Samples = None,
    validation_samples: Samples = None,
    test_samples: Samples = None,
    data: Data = None,
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = Fidelity.auto,
    workdir: WorkFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same job.")] = False,
    option: Options = None,
    fault: Faults = None,
    backup_every: BackupEvery = DEFAULTS.backup_every,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on a cluster, simulated or executed, and write the Report."""
    job = Job(
        method=method,
        model=model,
        task=task,
        epochs=epochs,
        seed=seed,
        batch_size=batch_size,
        micro_batches=micro_batches,
        learning_rate=learning_rate,
        max_length=max_length,
        train_samples=train_samples,
        validation_samples=validation_samples,
        test_samples=test_samples,
        data=data,
        options=parse_options(option),
        faults="; ".join(fault or ()),
        backup_every=backup_every,
    )
    if report is not None:
        require_writable(report)
    _finish(_run(job, cluster, mode.value, workdir=workdir, resume=resume, fidelity=fidelity.value), report, as_json)


def _run(job: Job, cluster: str, mode: Literal["simulate", "execute"], **settings: Any) -> Report:
    described = load_cluster(cluster)
    from workbench.cli.progress import RunProgress
    from workbench.experiment import run as run_job
    from workbench.methods import INFERRING

    try:
        with RunProgress(job, described) as progress:
            return run_job(job, described, mode, progress=progress.update, **settings)
    except KeyboardInterrupt:
        can_resume = mode == "execute" and job.method not in INFERRING
        say("Interrupted. To go on where it stopped, give the same command with --resume." if can_resume else "Interrupted.")
        raise typer.Exit(INTERRUPTED) from None


def _finish(report: Report, path: Path | None, as_json: bool) -> None:
    unwritten: WriteError | None = None
    if path is not None:
        try:
            report.write(path)
        except WriteError as error:  # the disk has filled up meanwhile: what came out is still worth telling
            unwritten = error
    if as_json and unwritten is None:
        print_json(report)
    else:
        from workbench.cli.show import summary

        print(summary(report), file=sys.stderr if unwritten is not None else sys.stdout)
        if unwritten is not None:
            kept = report.mode == "execute" and report.plan.inference is None
            raise WriteError(unwritten.asked, unwritten.found, f"{unwritten.todo}{' Repeat with --resume.' * kept}") from unwritten
        if path is not None:
            print(f"Report      {path}  (figures: workbench draw {path} --out FOLDER)")
