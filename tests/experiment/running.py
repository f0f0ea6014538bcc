"""Runs of the tiny job, whole and stopped in their middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_job import two_devices

from workbench import experiment
from workbench.core import Job, Plan, Report
from workbench.methods.base import Event
from workbench.models.evaluation import predict
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.saving import load_adapter
from workbench.runtime.context import RankContext
from workbench.tasks import load_task
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import evaluation_batches, tokenize

KEPT_AFTER_A_RUN = {
    "adapter",
    "snapshots",
    "steps",
    "initial.safetensors",
    "fingerprint.txt",
    "plan.json",
    "report.json",
}


SLOW = 0.1
"""A slow device's share of this machine's speed."""


def run(
    job: Job,
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[Event], None] | None = None,
    chosen_plan: Plan | None = None,
    share: float | None = None,
) -> Report:
    """Run a job on two devices, slow ones if they are lost, leave or become slower: so that steps are left when that
    happens, and what a busy host adds to a step is little.  share: of this machine's speed, if it is to be another."""
    kinds = {fault.split(":")[0].strip() for fault in job.faults.split(";")}
    cluster = two_devices(share=share or (SLOW if kinds & {"kill", "freeze", "leave", "slow"} else 1.0))
    return experiment.run(
        job, cluster, workdir=folder, fidelity="paced", resume=resume, progress=progress, chosen_plan=chosen_plan
    )


def losses(report: Report) -> list[tuple[int, int, float | None]]:
    return [(step.epoch, step.step, step.loss) for step in report.steps]


def at(epoch: int, act: Callable[[], None]) -> Callable[[Event], None]:
    """Return a progress function that acts once, at the second step of an epoch (counted from 0)."""
    done: list[Event] = []

    def progress(event: Event) -> None:
        if not done and event.kind == "step" and event.epoch == epoch and event.step == 1:
            done.append(event)
            act()

    return progress


def interrupt() -> None:
    raise KeyboardInterrupt


def stop_in(job: Job, folder: Path, epoch: int) -> bool:
    """Interrupt a run in an epoch; return whether it ended in the epoch's middle."""
    with pytest.raises(KeyboardInterrupt):
        run(job, folder, progress=at(epoch, interrupt))
    # So short an epoch may have ended before the devices heard of it.
    ended = list((folder / "snapshots").glob(f"*-epoch-{epoch + 1}-step-0-*"))
    for path in ended:
        path.unlink()
    return not ended


def predicted(context: RankContext, payload: tuple[Path, str, str, int]) -> dict[str, float]:
    """Return the test metrics of a saved adapter on a task's data, with so many tokens a sample."""
    folder, task_name, data, max_length = payload
    adapter, about = load_adapter(folder)
    task = load_task(task_name, data=data)
    samples = tokenize(task.test, load_tokenizer(about.model), max_length=max_length)
    [result] = predict(load_stack(about.model), [adapter], evaluation_batches(samples))
    return compute(task.metrics, result.answers(task.kind), result.references())
