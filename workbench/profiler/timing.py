"""Time layers robustly on one thread of a machine with other users (PAC+, section V-A, 'Profiling').

All calls to be compared are timed in turn, round after round, so that a drift of the clock or other load affects all of
them equally.
Each result is a low quantile of its rounds, because disturbances only add time.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from workbench.core.errors import ConfigError
from workbench.core.profile import Grid
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
LONG_S = 2.0
FEWEST_ROUNDS, STABLE = 4, 0.005
"""Rounds end early when one of them, at least the fourth, changes the calls' seconds by less than this share."""


def tiny() -> bool:
    """Return whether the environment asks for the smallest settings (WORKBENCH_TINY=1), so that tests run every
    notebook cell fast.

    Papermill's own parameters come after the parameters cell and override it.
    """
    return os.environ.get(TINY_VARIABLE, "") not in ("", "0")


class _Counter:
    """Counts the calls that have been timed.  ahead: those still to come of the present group."""

    def __init__(self, told: Callable[[int, int], None]) -> None:
        self.told, self.done, self.ahead = told, 0, 0

    def add(self) -> None:
        """Count one call."""
        self.done, self.ahead = self.done + 1, max(0, self.ahead - 1)
        self.told(self.done, self.done + self.ahead)


_COUNTER: ContextVar[_Counter | None] = ContextVar("counter", default=None)


@contextmanager
def counted_timings(told: Callable[[int, int], None]) -> Iterator[None]:
    """Inside the context, report every timing: told(done, known so far).  The sum falls where rounds end early, and
    grows with each further group of calls.
    """
    token = _COUNTER.set(_Counter(told))
    try:
        yield
    finally:
        _COUNTER.reset(token)


def _expect(count: int) -> None:
    if (counter := _COUNTER.get()) is not None:
        counter.ahead = count


def _num_rounds(repeats: int | None) -> int:
    return (3 if tiny() else 9) if repeats is None else repeats


def time_calls(
    calls: Mapping[K, Call],
    *,
    repeats: int | None = None,
    budget_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """Return the seconds of each call, all timed in turn: the lower quartile of the rounds.

    repeats: number of rounds.  None for up to 9, or 3 with the smallest settings (see tiny); they end early when a
    round no longer changes the results (STABLE), as on a quiet machine.  budget_s: no round begins after it, but one
    is always done.  A call shorter than 0.2 ms runs several times per round.
    """
    may_end_early = repeats is None
    repeats = _num_rounds(repeats)
    if not calls or repeats < 1:
        raise ConfigError(
            f"Timing {len(calls)} calls {repeats} times was asked for.", "Both must be at least 1.", "Raise them."
        )
    _expect(len(calls) * (1 + repeats))
    began = clock()
    seconds: dict[K, float] = {}
    with torch_threads(measuring_threads()):
        loops = {key: _warm_up(call, clock) for key, call in calls.items()}
        samples: dict[K, list[float]] = {key: [] for key in calls}
        for round_number in range(repeats):
            if round_number and clock() - began > budget_s:
                break
            # Every other round runs backwards, because the cache warmed for a call depends on the call before it.
            keys = list(calls) if round_number % 2 == 0 else list(calls)[::-1]
            for key in keys:
                samples[key].append(_counted(calls[key], loops[key], clock))
            before, seconds = seconds, {key: Spread.of(values).low for key, values in samples.items()}
            if may_end_early and round_number + 1 >= FEWEST_ROUNDS and _change(before, seconds) < STABLE:
                break
    _expect(0)
    return seconds


def _change(before: Mapping[K, float], after: Mapping[K, float]) -> float:
    """Return by which share the calls' seconds changed, in the mean over the calls."""
    return fmean(abs(after[key] - before[key]) / max(before[key], 1e-9) for key in after)


def time_grids(
    make_calls: Mapping[str, Maker],
    batch_sizes: Sequence[int],
    sequence_lengths: Sequence[int],
    **settings: Any,
) -> dict[str, Grid]:
    """Return a Grid of each kind; make_calls[kind](batch, sequence_length) returns the call to time, with time_calls'
    settings.

    All kinds and sizes are timed in turn.  Small dents are smoothed: more samples or tokens never cost less.  After a
    size that takes longer than LONG_S, larger batches are not timed: their time grows with their samples.
    """
    calls: dict[tuple[str, int, int], Call] = {}
    largest: dict[tuple[str, int], int] = {}  # batch that is timed
    _expect(len(make_calls) * len(sequence_lengths) * len(batch_sizes) * (2 + _num_rounds(settings.get("repeats"))))
    with torch_threads(measuring_threads()):
        for kind, length in itertools.product(make_calls, sequence_lengths):
            for batch in sorted(batch_sizes):
                largest[kind, length] = batch
                call = calls[kind, batch, length] = make_calls[kind](batch, length)
                if _counted(call, 1, settings.get("clock", time.perf_counter)) > LONG_S:
                    break
    measured = time_calls(calls, **settings)

    def seconds(kind: str, batch: int, length: int) -> float:
        timed = min(batch, largest[kind, length])
        return measured[kind, timed, length] * batch / timed

    return {
        kind: Grid(
            batch_sizes=tuple(batch_sizes),
            sequence_lengths=tuple(sequence_lengths),
            seconds=monotone([[seconds(kind, batch, length) for length in sequence_lengths] for batch in batch_sizes]),
        )
        for kind in make_calls
    }


def monotone(cells: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Return cells that fall neither along rows nor along columns: each falling run becomes its mean.

    The pass over columns does not undo the pass over rows, because it keeps the order of columns that are in order.
    """
    from scipy.optimize import isotonic_regression  # slow to import, and only measurements need it

    rows = np.array([isotonic_regression(row).x for row in cells])
    both = np.array([isotonic_regression(column).x for column in rows.T])
    # Rounding may leave a difference of a few units in the last place.
    exact = np.maximum.accumulate(np.maximum.accumulate(both, axis=0), axis=1)
    return tuple(map(tuple, exact.T.tolist()))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads and restore the old number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _counted(call: Call, loops: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a call, and count it."""
    seconds = _measure(call, loops, clock)
    if (counter := _COUNTER.get()) is not None:
        counter.add()
    return seconds


def _measure(call: Call, loops: int, clock: Callable[[], float]) -> float:
    if isinstance(call, tuple):
        prepare, run = call
        total = 0.0
        for _ in range(loops):
            argument = prepare()
            began = clock()
            run(argument)
            total += clock() - began
        return total / loops
    began = clock()
    for _ in range(loops):
        call()
    return (clock() - began) / loops


def _warm_up(call: Call, clock: Callable[[], float]) -> int:
    """Run a call twice and return how often a round should run it."""
    _measure(call, 1, clock)
    once = _counted(call, 1, clock)
    return max(1, min(MOST_LOOPS, math.ceil(SHORTEST_S / max(once, 1e-9))))
