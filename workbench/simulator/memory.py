"""Return the memory that a schedule takes over time, from the lifetimes of its values.

It is the sum of the resident bytes, plus each value from the start of its write to the end of its
last read.
A value counts from the start of the operation that writes it, because its buffer must exist while it is written; a
received value counts from the start of its transfer.  Inputs count from time 0, outputs to the end, a value that is
never read until it is written.
The output of a STEP (or another of UPDATES) counts from its end, because it updates in place; if the old weights are
still needed, both count from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from workbench.core.costs import Costs
from workbench.core.schedule import UPDATES, Schedule, Value
from workbench.core.timeline import MemorySample, Span


def memory_over_time(schedule: Schedule, costs: Costs, spans: Sequence[Span]) -> tuple[tuple[MemorySample, ...], ...]:
    """Return each rank's bytes in use: samples at the times when they change.  The spans may be simulated
    or measured.
    """
    steps = _steps(schedule, spans, lambda value: costs.spec(value).nbytes)
    return tuple(_accumulate(steps[rank], costs.resident_bytes(rank)) for rank in range(schedule.world_size))


def live_counts(schedule: Schedule, spans: Sequence[Span], name: str) -> tuple[int, ...]:
    """Return for each rank the peak number of live values of that name: contexts in flight, weight versions, tiles."""
    steps = _steps(schedule, spans, lambda value: int(value.name == name))
    return tuple(max(sample.nbytes for sample in _accumulate(steps[rank], 0)) for rank in range(schedule.world_size))


def _steps(schedule: Schedule, spans: Iterable[Span], nbytes: Callable[[Value], int]) -> list[list[tuple[float, int]]]:
    """Return for each rank (time_s, bytes allocated or freed), unordered."""
    slots: list[dict[Value, int]] = [{} for _ in range(schedule.world_size)]  # of each value that has bytes
    sizes: list[int] = []
    births_s: list[float] = []
    deaths_s: list[float] = []
    for rank, inputs in enumerate(schedule.inputs):
        for value in inputs:
            size = nbytes(value)
            if size:
                slots[rank][value] = len(sizes)
                sizes.append(size)
                births_s.append(0.0)
                deaths_s.append(0.0)
    for span in spans:
        for value in span.op.writes:
            size = nbytes(value)
            if size:
                slots[span.rank][value] = len(sizes)
                sizes.append(size)
                births_s.append(span.end_s if span.op.kind in UPDATES else span.start_s)
                deaths_s.append(span.end_s)
    for span in spans:
        of_rank = slots[span.rank]
        for value in span.op.reads:
            slot = of_rank.get(value)
            if slot is not None and deaths_s[slot] < span.end_s:
                deaths_s[slot] = span.end_s
    steps: list[list[tuple[float, int]]] = []
    for rank, of_rank in enumerate(slots):
        output_slots = {of_rank[value] for value in schedule.outputs[rank] if value in of_rank}
        changes = [(births_s[slot], sizes[slot]) for slot in of_rank.values()]
        changes += [(deaths_s[slot], -sizes[slot]) for slot in of_rank.values() if slot not in output_slots]
        steps.append(changes)
    return steps


def _accumulate(changes: list[tuple[float, int]], resident_bytes: int) -> tuple[MemorySample, ...]:
    """Return the running sum, one sample per time; frees at a time come before allocations at the same time."""
    samples = []
    changes.sort()
    at_s, total = 0.0, resident_bytes
    for time_s, change in changes:
        if time_s != at_s:
            samples.append(MemorySample(at_s, total))
            at_s = time_s
        total += change
    samples.append(MemorySample(at_s, total))
    return tuple(samples)
