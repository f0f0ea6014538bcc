"""Schedules simulated at given costs."""

from __future__ import annotations

from typing import Any

from workbench.core.costs import Costs
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.simulator import simulate


def program_of(schedule: Schedule, costs: Costs) -> Program:
    """Return the program on devices d0, d1 and so on, without limits of memory."""
    return Program(schedule=schedule, costs=costs, devices=tuple(f"d{rank}" for rank in range(schedule.world_size)))


def simulated(schedule: Schedule | str, costs: Costs, **settings: Any) -> Timeline:
    """Return the timeline on such devices.  schedule: or its text.  settings: of `simulate`."""
    return simulate(
        program_of(Schedule.from_text(schedule) if isinstance(schedule, str) else schedule, costs), **settings
    )
