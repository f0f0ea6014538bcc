"""What the devices did over time, put together from their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.serving import DeviceSample


class Busy(NamedTuple):
    """A device computed busy_s seconds between start_s and end_s."""

    start_s: float
    end_s: float
    busy_s: float


class Samples:
    """Collects while the service runs; `over` cuts it into equal steps of time."""

    def __init__(self, world_size: int) -> None:
        self._busy: list[list[Busy]] = [[] for _ in range(world_size)]
        self._loads: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(world_size)]
        self._slowness: list[list[tuple[float, float]]] = [[] for _ in range(world_size)]

    def busy(self, rank: int, busy: Busy) -> None:
        """Take what a device computed for one request."""
        self._busy[rank].append(busy)

    def load(self, rank: int, time_s: float, share: float) -> None:
        """Note that something else has taken a share of the device from time_s on."""
        self._loads[rank].append((time_s, share))

    def slowness(self, rank: int, time_s: float, value: float) -> None:
        """Note how slow the portal found the device at time_s."""
        self._slowness[rank].append((time_s, value))

    def over(self, step_s: float, end_s: float) -> tuple[DeviceSample, ...]:
        """Return a sample of each device and step from 0 to end_s, in order of time."""
        num_steps = int(end_s / step_s) + 1
        busy = [_spread(own, step_s, num_steps) for own in self._busy]
        return tuple(
            DeviceSample(
                rank=rank,
                start_s=index * step_s,
                end_s=(index + 1) * step_s,
                busy_s=min(step_s, busy[rank][index]),
                slowness=_last(self._slowness[rank], index * step_s, (index + 1) * step_s),
                load=_mean(self._loads[rank], index * step_s, (index + 1) * step_s),
            )
            for index in range(num_steps)
            for rank in range(len(self._busy))
        )


def _spread(own: Sequence[Busy], step_s: float, num_steps: int) -> list[float]:
    """Return the busy seconds in each step; within its interval a device is taken to be busy evenly."""
    found = [0.0] * num_steps
    for start_s, end_s, busy_s in own:
        first, last = max(0, int(start_s / step_s)), min(num_steps - 1, int(end_s / step_s))
        for index in range(first, last + 1):
            inside = min(end_s, (index + 1) * step_s) - max(start_s, index * step_s)
            found[index] += busy_s * inside / (end_s - start_s) if end_s > start_s else 0.0
    return found


def _last(values: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the last value in [start_s, end_s), 0 if there is none."""
    return next((value for time_s, value in reversed(values) if start_s <= time_s < end_s), 0.0)


def _mean(values: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the mean over [start_s, end_s) of something that keeps its last value."""
    total = 0.0
    for index, (time_s, value) in enumerate(values):
        until_s = values[index + 1][0] if index + 1 < len(values) else end_s
        total += value * max(0.0, min(until_s, end_s) - max(time_s, start_s))
    return total / (end_s - start_s)
