"""Small plans, simulation with table costs, and golden files, for the tests of schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from tests.plans import staged_plan
from tests.simulated import simulated
from workbench.core.costs import TableCosts
from workbench.core.plan import Plan
from workbench.core.schedule import Op, Schedule
from workbench.core.timeline import Timeline
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules import check

GOLDEN = Path(__file__).parents[1] / "golden"


def plan_of(*groups: Sequence[int], layers: Sequence[int] = (), first_rank: int = 0) -> Plan:
    """Return a plan with one stage per group; a group lists its ranks' samples, ranks are numbered on."""
    rank = count(first_rank)
    parts = zip(layers or [1] * len(groups), groups, strict=True)
    return staged_plan(*((num_layers, {next(rank): samples for samples in group}) for num_layers, group in parts))


def recomputing(plan: Plan, *stages: int) -> Plan:
    """Return the plan whose given stages (default: all) recompute their activations."""
    chosen = stages or range(len(plan.stages))
    return replace(
        plan,
        stages=tuple(
            replace(stage, activations="recompute" if number in chosen else "memory")
            for number, stage in enumerate(plan.stages)
        ),
    )


def equal_plan(num_stages: int, samples: int = 1) -> Plan:
    """Return a pipeline of single ranks."""
    return plan_of(*[(samples,)] * num_stages)


def workers_of(*layers: Sequence[int], in_flight: int = 2) -> VirtualWorkers:
    """Return one virtual worker for each list of its stages' layers; ranks are numbered on."""
    rank = count()
    pipelines = (
        staged_plan(*((number, {next(rank): 2}) for number in numbers), micro_batches=in_flight) for numbers in layers
    )
    return VirtualWorkers(pipelines=tuple(pipelines), in_flight=in_flight)


def timed(
    schedule: Schedule, nbytes: dict[str, int] | None = None, **seconds: float | Callable[[int, Op], float]
) -> Timeline:
    """Return the timeline at the given seconds by kind; what is not given is free."""
    return simulated(schedule, TableCosts(seconds_by_kind=seconds, bytes_by_name=nbytes or {}))


def peaks(schedule: Schedule, name: str, **seconds: float | Callable[[int, Op], float]) -> tuple[int, ...]:
    """Return for each rank the most values of one name alive at once."""
    timeline = timed(schedule, {name: 1}, **seconds)
    return tuple(timeline.peak_bytes(rank) for rank in range(schedule.world_size))


def labels(schedule: Schedule, rank: int) -> list[str]:
    """Return a rank's operations by label."""
    return [op.label for op in schedule.ops[rank]]


def assert_golden(name: str, schedule: Schedule) -> None:
    """Compare with tests/golden/NAME.txt, after a check and a round trip.  UPDATE_GOLDEN=1 writes the file again."""
    check(schedule)
    text = schedule.to_text()
    assert Schedule.from_text(text) == schedule
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
