"""A served stream made up by hand: three devices, one of them slow from 4 s to 8 s, left out from 5 s to 9 s."""

from __future__ import annotations

from tests.clusters import cluster_of
from tests.plans import inference_plan
from workbench.core.device_faults import Fault
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.serving.records import (
    DeviceSample,
    ReschedulingSettings,
    ServedRequest,
    ServingEvent,
    ServingReport,
    StreamSettings,
)

NAMES = ("alpha", "beta", "gamma")
END_S = 12.0


def plan(*ranks: int) -> InferencePlan:
    each = (4,) * len(ranks)
    parts = {"units": each, "columns": each, "shares": (1.0,) * len(ranks), "schemes": (1, 2)}
    return inference_plan(method="galaxy_plus", ranks=ranks, **parts)


def seconds_at(time_s: float, *, rescheduled: bool) -> float:
    """A request takes 100 ms; 400 ms while the slow device is waited for; 150 ms without it."""
    if rescheduled and 5 <= time_s < 9:
        return 0.15
    return 0.4 if 4 <= time_s < 8 else 0.1


def report(*, rescheduled: bool = True, valid: bool = True) -> ServingReport:
    requests, at = [], 0.0
    while at < END_S:
        took = seconds_at(at, rescheduled=rescheduled)
        without = rescheduled and 5 <= at < 9
        requests.append(
            ServedRequest(
                number=len(requests),
                arrival_s=at,
                start_s=at,
                end_s=at + took,
                tokens=32,
                plan=int(without),
                attempts=1 + (len(requests) == 7),
            )
        )
        at += took
    samples = []
    for second in range(int(END_S)):
        for rank in range(3):
            slow = rank == 1 and 4 <= second < 8
            out = rescheduled and rank == 1 and 5 <= second < 9
            busy = 0.0 if out else 0.3 if not rescheduled and 4 <= second < 8 else 0.8
            samples.append(
                DeviceSample(rank=rank, start_s=second, end_s=second + 1, busy_s=busy, load=0.75 if slow else 0.0)
            )
    events = (
        ServingEvent(time_s=4.0, kind="slowed", rank=1, value=4.0),
        ServingEvent(time_s=4.9, kind="straggler", rank=1, value=3.9),
        ServingEvent(time_s=4.9, kind="excluded", rank=1, plan_before=0, plan_after=1),
        ServingEvent(time_s=5.0, kind="switched", plan_before=0, plan_after=1),
        ServingEvent(time_s=8.0, kind="restored", rank=1),
        ServingEvent(time_s=8.9, kind="readmitted", rank=1, plan_before=1, plan_after=0),
        ServingEvent(time_s=9.0, kind="switched", plan_before=1, plan_after=0, detail="2 MB read"),
    )
    link = {"bytes_per_s": 125e6, "latency_s": 1e-4}
    return ServingReport(
        source="emulated",
        fidelity="kernel",
        model="tiny-bert",
        cluster=cluster_of(NAMES, name="trio", flops_per_s=1e10, host_share=0.3, **link),
        stream=StreamSettings(num_requests=len(requests), length=32),
        rescheduling=ReschedulingSettings(reaction="exclude" if rescheduled else "none"),
        faults=(Fault(kind="slow", rank=1, start=4.0, end=8.0, factor=4.0),),
        plans=(plan(0, 1, 2), plan(0, 2)),
        requests=tuple(requests),
        events=events if rescheduled else (events[0], events[4]),
        samples=tuple(samples),
        overrun_share=0.01 if valid else 0.3,
        valid=valid,
    )
