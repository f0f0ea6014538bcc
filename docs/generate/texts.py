"""Schedules and faults as text: what the modules that parse them say, and an example that they write."""

from __future__ import annotations

import re
from collections.abc import Callable

from generate.words import cell, meanings, table
from workbench.core import schedule
from workbench.core.costs import WrittenCosts
from workbench.core.device_faults import Fault
from workbench.core.program import Program
from workbench.schedules.published import SECONDS, build_published
from workbench.schedules.published import published_schedules as schedules_by_name


def example_schedule() -> str:
    """Return the program that `workbench schedule 1f1b --ranks 2 --micro-batches 2 --save` writes."""
    built = build_published("1f1b", {"ranks": 2, "micro_batches": 2})
    seconds = {(rank, op): SECONDS.get(op.kind, 0.0) for rank, ops in enumerate(built.ops) for op in ops}
    costs = WrittenCosts(seconds_of=seconds, specs={}, resident=(0, 0))
    program = Program(schedule=built, costs=costs, devices=("device-0", "device-1"))
    return f"```\n{program.to_text()}```\n"


def schedule_semantics() -> str:
    """Return the rules that simulator, executor and checks share."""
    return (schedule.__doc__ or "").partition("\n\n")[2] + "\n"


def published_schedules() -> str:
    """Return the schedules that a name stands for."""
    rows = (
        (
            f"`{name}`",
            cell(published.paper),
            ", ".join(f"`{size}` {default}" for size, default in published.sizes.items()),
        )
        for name, published in schedules_by_name().items()
    )
    return table(("name", "of", "sizes, with their defaults"), rows)


def faults() -> str:
    """Return the kinds of faults."""
    kinds = re.findall(r"'(\w+)' \((.*?)\)[,.]", meanings(Fault)["kind"])
    return table(("kind", "what happens"), ((f"`{kind}`", cell(says)) for kind, says in kinds))


TEXTS: dict[str, Callable[..., str]] = {
    "example-schedule": example_schedule,
    "faults": faults,
    "published-schedules": published_schedules,
    "schedule-semantics": schedule_semantics,
}
