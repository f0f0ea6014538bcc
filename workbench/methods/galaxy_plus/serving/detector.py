"""Find a device that is repeatedly slower than the others in the same work, from its reports during computation (Galaxy+, III-E1)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from workbench.core.schedule import Op
from workbench.core.serving import ReschedulingSettings
from workbench.runtime.pacing import Paced, Pacer

BlockSeconds = Mapping[int, Mapping[int, float]]
"""Seconds of computation by rank and block number (blocks are counted through the whole model)."""


class Verdict(NamedTuple):
    """A device's report compared with the others.  slowness: median over blocks.  is_slow: most of its blocks were slow."""

    slowness: float
    is_slow: bool


def means(reports: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return each block's mean seconds over a device's reports of a period; a report may cover only some blocks."""
    found: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        for block, seconds in report.items():
            found[block].append(seconds)
    return {block: sum(seconds) / len(seconds) for block, seconds in found.items()}


def compare(measured: BlockSeconds, expected: BlockSeconds, slow_factor: float) -> dict[int, Verdict]:
    """Compare the devices block by block.

    Each block's seconds are divided by the plan's expectation for the device, which makes unequal devices with unequal shares comparable,
    then by the median of that quotient over the other devices in the same block.  So a slowdown of all devices, or a shared error
    of the cost model, makes no straggler.  A single device gets 1.
    """
    quotients: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, blocks in measured.items():
        for block, seconds in blocks.items():
            share = expected.get(rank, {}).get(block, 0.0)
            if share > 0:
                quotients[block][rank] = seconds / share
    relative: dict[int, list[float]] = {rank: [] for rank in measured}
    for by_rank in quotients.values():
        for rank, quotient in by_rank.items():
            others = [value for other, value in by_rank.items() if other != rank]
            if others and median(others) > 0:
                relative[rank].append(quotient / median(others))
    return {
        rank: Verdict(median(values), 2 * sum(value > slow_factor for value in values) > len(values)) if values else Verdict(1.0, False)
        for rank, values in relative.items()
    }


class StragglerDetector:
    """Remembers each device's last reports."""

    def __init__(self, settings: ReschedulingSettings) -> None:
        self._settings = settings
        self._last: dict[int, deque[Verdict]] = {}

    def add(self, verdicts: Mapping[int, Verdict]) -> None:
        """Add one report of every device."""
        for rank, verdict in verdicts.items():
            self._last.setdefault(rank, deque(maxlen=self._settings.window)).append(verdict)

    def slowness(self, rank: int) -> float:
        """Return the median of a device's last slow reports, of all reports if none was slow; 1 without any."""
        last = self._last.get(rank, ())
        values = [verdict.slowness for verdict in last if verdict.is_slow] or [verdict.slowness for verdict in last]
        return median(values) if values else 1.0

    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks that were slow in `repeats` of their last `window` reports, the slowest first."""
        found = [rank for rank, last in self._last.items() if sum(verdict.is_slow for verdict in last) >= self._settings.repeats]
        return tuple(sorted(found, key=lambda rank: -self.slowness(rank)))

    def has_been_below(self, rank: int, slowness: float) -> bool:
        """Return whether a device's last `repeats` reports all were at most `slowness`."""
        last = list(self._last.get(rank, ()))[-self._settings.repeats :]
        return len(last) == self._settings.repeats and all(verdict.slowness <= slowness for verdict in last)

    def forget(self) -> None:
        """Forget all reports, because they are invalid after a change of the plan."""
        self._last.clear()


class ReportingPacer(Pacer):
    """A pacer that adds up the seconds of every operation by block, and sends the sums after each period and on request.

    Operations arrive from the executor as partial(handler, operation, contents).  Delays of a busy host are excluded, because the
    emulated device does not cause them.
    """

    def __init__(
        self, factor: float, *, every_s: float, tell: Callable[[dict[int, float]], None], dilation: float = 1.0, **time: Any
    ) -> None:
        """time: clock and sleep (see Pacer)."""
        super().__init__(factor, dilation=dilation, **time)
        self._every_s, self._tell = every_s * dilation, tell
        self._blocks: dict[int, float] = {}
        self._told_s = self._clock()

    def run(self, function: Callable[[], Any], duration_s: float, begin_s: float | None = None) -> Paced[Any]:
        """See Pacer.run."""
        done = super().run(function, duration_s, begin_s)
        if isinstance(function, partial) and function.args and isinstance(function.args[0], Op):
            block = function.args[0].stage
            seconds = (done.end_s - done.start_s - done.late_s) / self._dilation
            self._blocks[block] = self._blocks.get(block, 0.0) + seconds
            if done.end_s - self._told_s > self._every_s:
                self.tell(before=block - 1)  # tiles of neighbouring blocks overlap: the blocks before are complete
        return done

    def tell(self, before: int | None = None) -> None:
        """Send the sums since the last call.  before: only blocks before this one; None: all."""
        ready = {block: seconds for block, seconds in self._blocks.items() if before is None or block < before}
        if ready:
            self._blocks = {block: seconds for block, seconds in self._blocks.items() if block not in ready}
            self._told_s = self._clock()
            self._tell(ready)

    def forget(self) -> None:
        """Discard the sums of a failed request."""
        self._blocks = {}
