"""How far devices are that measure themselves: each reports it, and the one that has most left is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.methods.base import TIMED, Event, Notify
from workbench.runtime.context import RankContext

TELL_EVERY_S = 0.5


def publishing(context: RankContext, clock: Callable[[], float] = time.monotonic) -> Notify:
    """Return what publishes the counts of a device's own measurement, at most one in TELL_EVERY_S."""
    told_s = float("-inf")

    def report(event: Event) -> None:
        nonlocal told_s
        if event.kind == "count" and clock() - told_s >= TELL_EVERY_S:
            told_s = clock()
            context.publish({"samples": event.step, "num_steps": event.num_steps})

    return report


def of_slowest(notify: Notify, names: Sequence[str]) -> Callable[[int, Any], None]:
    """Return a callback for the devices' counts (see publishing).  It reports those of the device that has most left.

    names: the devices' names, by rank.
    """
    counts: dict[int, tuple[int, int]] = {}

    def report(rank: int, published: Any) -> None:
        counts[rank] = (published.get("samples", 0), published.get("num_steps", 0))
        slowest = max(counts, key=lambda rank: counts[rank][1] - counts[rank][0])
        done, count = counts[slowest]
        notify(Event("count", rank=slowest, message=f"{TIMED} on {names[slowest]}", step=done, num_steps=count))

    return report
