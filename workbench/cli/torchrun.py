"""Run a job on real devices under torchrun: `torchrun ... -m workbench.cli.torchrun`, the same command on every
machine.

Rank 0 reads the command line, lets every device measure itself, plans, directs the other ranks, evaluates and writes
the Report.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from workbench.assets.fetch import cache_folder
from workbench.cli.job import ALL_FIELDS, CLUSTER, ClusterName, ReportFile, takes_job
from workbench.cli.output import USER_ERROR, Commands, Json, report_error
from workbench.cli.run import run_and_show
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.files import make_folder
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.serial import read_json
from workbench.experiment import run_name
from workbench.methods.calls import CALLS
from workbench.runtime.torchrun import TorchrunEngines, remove_own_files, sees_file

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)

JobFile = Annotated[
    Path | None, typer.Option("--job", help="The whole job as JSON.  Then the job's other options are ignored.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="Run this plan (JSON of `workbench plan --json`) instead of the planner's."),
]
SharedFolder = Annotated[
    Path | None,
    typer.Option("--workdir", help="Folder that every machine sees: snapshots, the adapter.", show_default="chosen"),
]
LocalFolder = Annotated[
    Path | None,
    typer.Option("--local-folder", help="Folder on each machine's own disk, for its part of the activation cache."),
]


@app.callback(invoke_without_command=True)
@takes_job(*(name for name in ALL_FIELDS if name not in ("faults", "snapshot_to")))
def command(
    job: Job,
    context: typer.Context,
    cluster: ClusterName = CLUSTER,
    job_file: JobFile = None,
    plan_file: PlanFile = None,
    workdir: SharedFolder = None,
    local_folder: LocalFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same job.")] = False,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on the processes that torchrun started, one for each device of the cluster, at their own
    speed.
    """
    if job_file is not None:
        job = read_json(job_file, Job, "the job")
    plan = None if plan_file is None else read_json(plan_file, Plan, "the plan")
    described = load_cluster(cluster)
    own_folder = "" if local_folder is None else str(local_folder / run_name(job, described))
    engines: TorchrunEngines = context.obj
    engines.lead(described, own_folder)
    folder = workdir or cache_folder() / "runs" / run_name(job, described)
    _require_shared(engines, described, folder)
    settings: dict[str, Any] = {"workdir": folder, "resume": resume, "chosen_plan": plan, "engines": engines}
    run_and_show(job, described, "execute", report, as_json, **settings)
    if own_folder:
        engines.run(remove_own_files, [None] * engines.world_size)


def _require_shared(engines: TorchrunEngines, cluster: Cluster, folder: Path) -> None:
    """Check that every rank sees the folder.  Raises ConfigError naming the ranks that do not."""
    make_folder(folder.parent)
    mark = (
        folder.parent / f"{folder.name}-{uuid.uuid4().hex[:8]}.shared"
    )  # next to the folder: the run decides what lies inside it
    try:
        mark.touch()
        is_visible = engines.run(sees_file, [mark] * engines.world_size)
    except OSError as error:
        raise ConfigError(
            f"The shared folder '{folder}' was asked for.", f"{error.strerror}.", "Choose another with --workdir."
        ) from error
    finally:
        mark.unlink(missing_ok=True)
    blind = [device.name for device, sees in zip(cluster.devices, is_visible, strict=True) if not sees]
    if blind:
        raise ConfigError(
            f"The shared folder '{folder}' was asked for.",
            f"{', '.join(blind)} cannot see what rank 0 wrote beside it.",
            "Give --workdir a folder of a network file system that every machine mounts at the same path.",
        )


def main() -> None:
    """Lead if this is rank 0, otherwise serve."""
    os.environ["WORKBENCH_THREADS"] = str(torch.get_num_threads())  # a device is measured as it runs
    try:
        engines = TorchrunEngines.join(CALLS)
        if engines.rank:
            engines.serve()
            return
    except WorkbenchError as error:
        report_error(error, as_json=False)
        sys.exit(USER_ERROR)
    try:
        app(obj=engines)
    finally:
        engines.end()


if __name__ == "__main__":
    main()
