"""Time layers robustly on one thread of a machine with other users (PAC+, section V-A, 'Profiling').

All calls to be compared are timed in turn, round after round, so that a drift of the clock or other load affects all of
them equally.
Each result is a low quantile of its rounds, because disturbances only add time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from workbench.core.errors import ConfigError
from workbench.core.spread import Spread
from workbench.profiler.cache import measuring_threads

K = TypeVar("K", bound=Hashable)
Call = Callable[[], Any] | tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function to time, or (prepare, run), of which only run(prepare()) is timed."""
Maker = Callable[[int, int], Call]
"""Returns the call to time for (samples, tokens)."""

TINY_VARIABLE = "WORKBENCH_TINY"
SHORTEST_S = 2e-4
MOST_LOOPS = 64
LONG_S = 0.01
"""A call that takes so long is warm after one run."""
SETTLED, SETTLED_SHORT = 2, 4
"""Rounds after which a call, a long or a short one, is settled if the two shortest differ by less than SPREAD."""
SPREAD = 0.05


def tiny() -> bool:
    """Return whether the environment asks for the smallest settings (WORKBENCH_TINY=1), so that tests run every
    notebook cell fast.

    Papermill's own parameters come after the parameters cell and override it.
    """
    return os.environ.get(TINY_VARIABLE, "") not in ("", "0")


class _Counter:
    """Counts the calls that have been timed.  ahead: those still to come of the present group."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report, self.done, self.ahead = report, 0, 0

    def add(self) -> None:
        """Count one call."""
        self.done, self.ahead = self.done + 1, max(0, self.ahead - 1)
        self.report(self.done, self.done + self.ahead)


_COUNTER: ContextVar[_Counter | None] = ContextVar("counter", default=None)


@contextmanager
def counted_timings(report: Callable[[int, int], None]) -> Iterator[None]:
    """Inside the context, call report(done, known so far) after every timing.  The sum falls where rounds end early,
    and grows with each further group of calls.
    """
    token = _COUNTER.set(_Counter(report))
    try:
        yield
    finally:
        _COUNTER.reset(token)


class CoreShare:
    """The share of the timed calls' seconds in which they had a core; the rest they waited for one.

    wall, core: clocks of all seconds, and of those on a core; the default is this thread's, or this process's where
    several threads compute.
    """

    def __init__(self, wall: Callable[[], float] = time.perf_counter, core: Callable[[], float] | None = None) -> None:
        self._wall, self._core = wall, core or (time.thread_time if measuring_threads() == 1 else time.process_time)
        self._wall_s = self._core_s = 0.0

    @property
    def value(self) -> float:
        """Return the share so far: 1 before the first call, and at most 1."""
        return min(1.0, self._core_s / self._wall_s) if self._wall_s else 1.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the seconds of what runs inside the context."""
        wall_s, core_s = self._wall(), self._core()
        yield
        self._wall_s, self._core_s = self._wall_s + self._wall() - wall_s, self._core_s + self._core() - core_s


_CORE_SHARE: ContextVar[CoreShare | None] = ContextVar("core_share", default=None)


@contextmanager
def core_share(share: CoreShare) -> Iterator[CoreShare]:
    """Inside the context, count in `share` the seconds of all timed calls."""
    token = _CORE_SHARE.set(share)
    try:
        yield share
    finally:
        _CORE_SHARE.reset(token)


def _expect(count: int) -> None:
    if (counter := _COUNTER.get()) is not None:
        counter.ahead = count


def time_calls(
    calls: Mapping[K, Call],
    *,
    repeats: int | None = None,
    budget_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
    first_s: Mapping[K, float] | None = None,
    prepared: Mapping[K, K] | None = None,
) -> dict[K, float]:
    """Return the seconds of each call, all timed in turn: the lower quartile of the rounds.

    repeats: number of rounds.  None for up to 9, or 1 with the smallest settings (see tiny), in which a settled call
    takes no further part.  budget_s: no round begins after it, but one is always done.  A call shorter than
    0.2 ms runs several times per round.  first_s: seconds of the first run of calls that are warm because of it.
    prepared: calls whose preparation is timed, too, and the keys of its seconds: a backward pass needs a forward pass.
    """
    may_end_early, prepared = repeats is None, prepared or {}
    if repeats is None:
        repeats = 1 if tiny() else 9
    if not calls or repeats < 1:
        raise ConfigError(
            f"Timing {len(calls)} calls {repeats} times was asked for.", "Both must be at least 1.", "Raise them."
        )
    first_s = first_s or {}
    _expect(len(calls) * (1 + repeats) - len(first_s))
    began = clock()
    with torch_threads(measuring_threads()):
        loops = {key: _warm_up(call, clock, first_s.get(key)) for key, call in calls.items()}
        samples: dict[K, list[float]] = {key: [] for key in (*calls, *prepared.values())}

        def is_settled(key: K) -> bool:
            return all(_is_settled(samples[timed]) for timed in (key, prepared.get(key, key)))

        for round_number in range(repeats):
            if round_number and clock() - began > budget_s:
                break
            keys = [key for key in calls if not (may_end_early and is_settled(key))]
            _expect(len(keys) * (repeats - round_number))
            # Every other round runs backwards, because the cache warmed for a call depends on the call before it.
            for key in keys if round_number % 2 == 0 else keys[::-1]:
                seconds = _counted(calls[key], loops[key], clock)
                samples[key].append(seconds.run)
                if key in prepared:
                    samples[prepared[key]].append(seconds.prepare)
    _expect(0)
    return {key: Spread.of(values).low for key, values in samples.items()}


def _is_settled(seconds: Sequence[float]) -> bool:
    shortest = sorted(seconds)[:2]
    if len(seconds) < (SETTLED_SHORT if shortest and shortest[0] < LONG_S else SETTLED):
        return False
    return shortest[1] <= shortest[0] * (1 + SPREAD)


def core_clock() -> Callable[[], float]:
    """Return a clock of this thread's seconds on its core, which others' load does not move; of all seconds where
    several threads compute.
    """
    is_fine = time.get_clock_info("thread_time").resolution < SHORTEST_S / 100
    return time.thread_time if is_fine and measuring_threads() == 1 else time.perf_counter


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads and restore the old number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CallSeconds(NamedTuple):
    """Seconds of a call.  prepare: those of its preparation, 0 without one."""

    run: float
    prepare: float = 0.0


def timed_once(call: Call, clock: Callable[[], float]) -> CallSeconds:
    """Return the seconds of a call's first run, which is counted."""
    return _counted(call, 1, clock)


def _counted(call: Call, loops: int, clock: Callable[[], float]) -> CallSeconds:
    """Return the seconds of a call, and count it."""
    share = _CORE_SHARE.get()
    with nullcontext() if share is None else share.counted():
        seconds = _measure(call, loops, clock)
    if (counter := _COUNTER.get()) is not None:
        counter.add()
    return seconds


def _measure(call: Call, loops: int, clock: Callable[[], float]) -> CallSeconds:
    if isinstance(call, tuple):
        prepare, run = call
        prepare_s = run_s = 0.0
        for _ in range(loops):
            began = clock()
            argument = prepare()
            is_prepared = clock()
            run(argument)
            prepare_s, run_s = prepare_s + is_prepared - began, run_s + clock() - is_prepared
        return CallSeconds(run_s / loops, prepare_s / loops)
    began = clock()
    for _ in range(loops):
        call()
    return CallSeconds((clock() - began) / loops)


def _warm_up(call: Call, clock: Callable[[], float], first_s: float | None) -> int:
    """Run a call once, a short one twice, and return how often a round should run it.  first_s: seconds of its first
    run.
    """
    once = _counted(call, 1, clock).run if first_s is None else first_s
    if once < LONG_S:
        once = _measure(call, 1, clock).run
    return max(1, min(MOST_LOOPS, math.ceil(SHORTEST_S / max(once, 1e-9))))
