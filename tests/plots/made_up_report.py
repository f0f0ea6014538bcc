"""A small report made up by hand: two devices, three epochs of two steps, one timeline of each kind."""

from __future__ import annotations

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench.core import (
    Cluster,
    EpochRecord,
    Job,
    MemorySample,
    Op,
    Report,
    Span,
    StepRecord,
    SweepPoint,
    Timeline,
)
from workbench.core.schedule import Value, recv, send

NAMES = ("fast", "slow")


def timeline(source: str = "simulated", fidelity: str = "", title: str = "a step") -> Timeline:
    """fast: F0 0-1, SF0 1-2, SEND 2-3, STEP 8-10; slow: RECV 2-3, F0 3-6, SB0 6-8, and nothing to the end at 10."""
    value = Value("act", 0, 0, 0)
    return Timeline(
        source=source,
        fidelity=fidelity,
        device_names=NAMES,
        spans=(
            Span(0, Op("F", 0, 0), 0.0, 1.0),
            Span(0, Op("SF", 0, 0), 1.0, 2.0),
            Span(0, send(value, 0, 1), 2.0, 3.0, 4_000_000),
            Span(0, Op("STEP", 0), 8.0, 10.0, 0, 0.5),
            Span(1, recv(value, 0, 1), 2.0, 3.0, 4_000_000),
            Span(1, Op("F", 1, 0), 3.0, 6.0),
            Span(1, Op("SB", 1, 0), 6.0, 8.0),
        ),
        memory=(
            (MemorySample(0.0, 100_000_000), MemorySample(2.0, 180_000_000)),
            (MemorySample(3.0, 90_000_000), MemorySample(8.0, 50_000_000)),
        ),
        budget_bytes=(150_000_000, 200_000_000),
        title=title,
    )


def cluster() -> Cluster:
    settings = {"flops_per_s": [5e9, 2.5e9], "host_share": [0.5, 0.25], "memory_bytes": 400_000_000}
    return cluster_of(NAMES, name="pair", bytes_per_s=125e6, latency_s=1e-4, **settings)


def report(*, executed: bool = True, valid: bool = True) -> Report:
    plan = staged_plan((3, {0: 8}), (3, {1: 8}), method="pac_plus", micro_batches=4)
    steps = tuple(
        StepRecord(
            epoch=epoch,
            step=step,
            samples=32,
            cached=epoch > 0,
            predicted_s=0.8 if epoch == 0 else 0.1,
            measured_s=(1.0 if epoch == 0 else 0.125) if executed else None,
            loss=0.7 - 0.1 * epoch if executed else None,
        )
        for epoch in range(3)
        for step in range(2)
    )
    epochs = tuple(
        EpochRecord(
            epoch=epoch,
            cached=epoch > 0,
            seconds=2.0 if epoch == 0 else 0.25,
            metrics={"accuracy": 0.7 + 0.05 * epoch} if executed else {},
        )
        for epoch in range(3)
    )
    timelines = {"first epoch, predicted": timeline()}
    if executed:
        timelines["first epoch, measured"] = timeline("emulated", "kernel")
    points = (("[6]", 1.0, 1.0), ("[3, 3]", 0.95, 1.0), ("[2, 4]", 0.8, 1.0))
    return Report(
        mode="execute" if executed else "simulate",
        source="emulated" if executed else "simulated",
        fidelity="kernel" if executed else "",
        job=Job(),
        cluster=cluster(),
        plan=plan,
        steps=steps,
        epochs=epochs,
        timelines=timelines,
        sweep=tuple(SweepPoint(name=name, plan=plan, predicted_s=p, measured_s=m) for name, p, m in points)
        if executed
        else (),
        metrics={"accuracy": 0.8} if executed else {},
        overrun_share=0.01 if valid else 0.23,
        valid=valid,
    )
