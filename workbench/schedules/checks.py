"""Checks of a schedule before anything runs: a dry run that names the fault and shows the grid."""

from __future__ import annotations

from workbench.core.activities import activities, require_progress
from workbench.core.schedule import Schedule


def check(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run, in O(operations + values).

    Raises ScheduleError naming the fault and showing the grid with the wrong operation marked: an unmatched send or receive, a channel
    whose sides disagree on the order, a collective whose members disagree, a value never written or written twice, a cycle, a deadlock
    (who waits for what from whom).  A schedule that passes cannot hang: network interfaces add waiting, but no circular waiting.
    """
    require_progress(schedule, activities(schedule))
    return schedule
