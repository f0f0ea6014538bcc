"""Seconds over batch size and sequence length from a few timed sizes (PAC+, section V-A, 'Profiling').

All of a layer's matrix products, norms and activations depend on the number of tokens alone, and only the attention's
two products on how the tokens are divided into samples.  So a call's seconds are fitted by

    g(batch x length) + h batch length^2,

with a rising, piecewise linear g and an h of at least 0.  The shortest length shows g, the longest h.  Some calls, such
as a head's, cost by the sample: then h batch takes the place of h batch length^2, if it fits better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from workbench.core.profile import Grid
from workbench.profiler.cache import measuring_threads
from workbench.profiler.timing import Call, Maker, core_clock, time_calls, timed_once, tiny, torch_threads

Size = tuple[int, int]
"""(samples, tokens of each)."""
V = TypeVar("V")

MOST_TOKENS = 1024
"""With more tokens in a call its time is proportional to them."""
CLEARLY = 0.5
"""The share by which the residual with a cost by the sample must be smaller."""
TOO_LONG_S = 0.2
"""After a call that takes so long, no larger one is timed."""


def time_grids(
    make_calls: Mapping[str, Maker],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    *,
    like: Mapping[str, str] | None = None,
    prepared: Mapping[str, str] | None = None,
    budget_s: float = 5.0,
    clock: Callable[[], float] | None = None,
) -> dict[str, Grid]:
    """Return a Grid of each kind; make_calls[kind](batch, length) returns the call to time.

    All kinds and sizes are timed in turn (see time_calls).  like: kinds that differ little from another one, such as a
    layer with the embedding from one without: they are timed at fewer sizes, and the difference is fitted.
    prepared: kinds whose preparation is of another kind, which is timed with them (see time_calls).
    clock: the default is this core's (see core_clock).
    """
    like, prepared, clock = like or {}, prepared or {}, clock or core_clock()
    calls: dict[tuple[str, Size], Call] = {}
    first_s: dict[tuple[str, Size], float] = {}
    with torch_threads(measuring_threads()):
        for kind, maker in make_calls.items():
            sizes = _few_sizes(batch_sizes, lengths) if kind in like else sizes_to_time(batch_sizes, lengths)
            for size in sizes:
                call = calls[kind, size] = maker(*size)
                first = timed_once(call, clock)
                first_s[kind, size] = first.run
                if sum(first) > TOO_LONG_S and len(_of(kind, calls)) > 1:
                    break
    preparations = {(kind, size): (prepared[kind], size) for kind, size in calls if kind in prepared}
    seconds = time_calls(calls, budget_s=budget_s, clock=clock, first_s=first_s, prepared=preparations)
    fits: dict[str, Callable[[Size], float]] = {}
    for kind in sorted((*make_calls, *prepared.values()), key=lambda kind: kind in like):
        timed = _of(kind, seconds)
        fits[kind] = _difference(timed, fits[like[kind]]) if kind in like else _fit(timed)
    return {
        kind: Grid(
            batch_sizes=tuple(batch_sizes),
            sequence_lengths=tuple(lengths),
            seconds=_rising([[fit((batch, length)) for length in lengths] for batch in batch_sizes]),
        )
        for kind, fit in fits.items()
    }


def sizes_to_time(batch_sizes: Sequence[int], lengths: Sequence[int]) -> tuple[Size, ...]:
    """Return the sizes to time, the smallest first: of the shortest length many, of the longest every second.

    With the smallest settings they are few.
    """
    if tiny():
        return _few_sizes(batch_sizes, lengths)
    shortest, longest = min(lengths), max(lengths)
    batches = sorted(batch_sizes)
    first = [(batch, shortest) for batch in batches]
    while shortest > 1 and len(lengths) > 1 and first[-1][0] * shortest < min(longest, MOST_TOKENS):
        first.append((2 * first[-1][0], shortest))  # g is known where the longest length begins
    return _ascending(first, [(batch, longest) for batch in batches[:: 2 if len(batches) > 3 else 1]])


def _few_sizes(batch_sizes: Sequence[int], lengths: Sequence[int]) -> tuple[Size, ...]:
    shortest, longest, batches = min(lengths), max(lengths), sorted(batch_sizes)
    some = dict.fromkeys((batches[0], batches[len(batches) // 2], batches[-1]))
    return _ascending([(batch, shortest) for batch in some], [(batches[0], longest)])


def _ascending(*groups: Iterable[Size]) -> tuple[Size, ...]:
    """Return different sizes by their tokens, without those that are too large, but at least two of each group."""
    sizes = [
        size for group in groups for index, size in enumerate(group) if index < 2 or size[0] * size[1] <= MOST_TOKENS
    ]
    return tuple(sorted(dict.fromkeys(sizes), key=lambda size: size[0] * size[1]))


def _of(kind: str, values: Mapping[tuple[str, Size], V]) -> dict[Size, V]:
    return {size: value for (of_kind, size), value in values.items() if of_kind == kind}


def _fit(timed: Mapping[Size, float]) -> Callable[[Size], float]:
    """Return the seconds of any size from those of some, with the least squares of relative errors."""
    from scipy.optimize import nnls  # slow to import, and only measurements need it

    lengths = {length for _, length in timed}
    shortest = {batch * length for batch, length in timed if length == min(lengths)}
    others = {batch * length for batch, length in timed if length != min(lengths)}
    # A larger number of tokens has its own knot only where h follows from other sizes.
    beyond = {max(others)} if others and min(others) <= max(shortest) < max(others) else set[int]()
    knots = sorted(shortest | beyond)

    def rises(tokens: int) -> list[float]:
        return [
            max(0.0, (tokens if upper == knots[-1] else min(tokens, upper)) - lower) / (upper - lower)
            for lower, upper in pairwise(knots)
        ]

    def fitted(power: int) -> tuple[float, Callable[[Size], float]]:
        """Return the residual and the fit with h batch length^power."""

        def terms(size: Size) -> list[float]:
            batch, length = size
            return [1.0, *rises(batch * length), *([float(batch * length**power)] if len(lengths) > 1 else [])]

        rows = _relative(timed, terms)
        scale = rows.max(axis=0)
        solution, residual = nnls(rows / scale, np.ones(len(rows)))
        factors = solution / scale
        return residual, lambda size: float(np.dot(factors, terms(size)))

    by_token_pair, by_sample = fitted(2), fitted(0)
    return by_sample[1] if by_sample[0] < by_token_pair[0] * (1 - CLEARLY) else by_token_pair[1]


def _difference(timed: Mapping[Size, float], base: Callable[[Size], float]) -> Callable[[Size], float]:
    """Return the seconds of any size: those of another kind, plus a difference that is linear in samples and tokens."""

    def terms(size: Size) -> list[float]:
        return [1.0, size[0], size[0] * size[1]]

    shares = np.array([1 - base(size) / max(seconds, 1e-12) for size, seconds in timed.items()])
    factors = np.linalg.lstsq(_relative(timed, terms), shares, rcond=None)[0]
    return lambda size: max(0.0, base(size) + float(np.dot(factors, terms(size))))


def _relative(timed: Mapping[Size, float], terms: Callable[[Size], list[float]]) -> np.ndarray:
    """Return the terms of each timed size in proportion to its seconds."""
    return np.array([[term / max(seconds, 1e-12) for term in terms(size)] for size, seconds in timed.items()])


def _rising(cells: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Return cells that fall neither along rows nor along columns."""
    rising = np.maximum.accumulate(np.maximum.accumulate(np.array(cells), axis=0), axis=1)
    return tuple(map(tuple, rising.tolist()))
