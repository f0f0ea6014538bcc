"""A small made-up report and timeline for the widgets' tests."""

from __future__ import annotations

from tests.plans import stage, staged_plan
from workbench.core.catalogue import load_cluster
from workbench.core.job import Job
from workbench.core.report import EpochRecord, Report, StepRecord
from workbench.core.schedule import NONE, Op, Value, recv, send
from workbench.core.timeline import MemorySample, Span, Timeline

CLUSTER = load_cluster("laptop")
PLAN = staged_plan((4, {0: 8}), (2, {1: 8}), method="pac_plus", micro_batches=4, cached=stage(0, 6, {0: 8}))
PREDICTED = tuple(
    StepRecord(epoch=epoch, step=step, samples=32, cached=epoch > 0, predicted_s=1.0)
    for epoch in range(2)
    for step in range(5)
)
ACT = Value("act", 0, 0, 0)
TIMELINE = Timeline(
    source="simulated",
    device_names=tuple(device.name for device in CLUSTER.devices),
    spans=(
        Span(0, Op("F", 0, 0, NONE), 0.0, 0.4),
        Span(0, send(ACT, 0, 1), 0.4, 0.5, 1000),
        Span(1, recv(ACT, 0, 1), 0.4, 0.5, 1000),
        Span(1, Op("F", 1, 0, NONE), 0.5, 1.0),
        Span(2, Op("F", 1, 0, NONE), 0.0, 0.1),
    ),
    memory=((MemorySample(0.0, 100), MemorySample(0.4, 2_000_000)), (MemorySample(0.0, 50),), (), ()),
    budget_bytes=tuple(device.memory_bytes for device in CLUSTER.devices),
    title="A step",
)


def make_report(
    job: Job | None = None, *, first_s: float = 8.0, cached_s: float = 2.0, mode: str = "simulate"
) -> Report:
    job = job or Job()
    epochs = tuple(EpochRecord(epoch=n, cached=n > 0, seconds=cached_s if n else first_s) for n in range(job.epochs))
    steps = tuple(
        StepRecord(epoch=n, step=0, samples=32, cached=n > 0, predicted_s=0.1, measured_s=0.2)
        for n in range(job.epochs)
    )
    return Report(
        mode=mode,  # type: ignore[arg-type]
        source="simulated",
        job=job,
        cluster=CLUSTER,
        plan=PLAN,
        epochs=epochs,
        steps=steps,
        timelines={"first epoch, predicted": TIMELINE},
        metrics={"accuracy": 0.75},
    )
