"""Memory over time from liveness: resident bytes, plus each value from the start of its write to the end of its last read.

A value counts from the start of the operation that writes it, because its buffer must be there while it is being written; a received
one from the start of its transfer.  Inputs count from time 0, outputs to the end, a value that nobody reads until it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from workbench.core.costs import Costs
from workbench.core.schedule import Schedule, Value
from workbench.core.timeline import MemorySample, Span



def memory_over_time(schedule: Schedule, costs: Costs, spans: Sequence[Span]) -> tuple[tuple[MemorySample, ...], ...]:
    """Return each rank's bytes in use: samples at the times where they change.  The spans may be simulated or measured."""
    steps = _steps(schedule, spans, costs.nbytes)
    return tuple(_accumulate(steps[rank], costs.resident_bytes(rank)) for rank in range(schedule.world_size))


def live_counts(schedule: Schedule, spans: Sequence[Span], name: str) -> tuple[int, ...]:
    """Return for each rank the most values of that name alive at once: contexts in flight, weight versions, tiles."""
    steps = _steps(schedule, spans, lambda value: int(value.name == name))
    return tuple(max(sample.nbytes for sample in _accumulate(steps[rank], 0)) for rank in range(schedule.world_size))


def _steps(schedule: Schedule, spans: Iterable[Span], nbytes: Callable[[Value], int]) -> list[list[tuple[float, int]]]:
    """Return for each rank (time_s, bytes gained or lost), unordered."""
    births: list[dict[Value, tuple[float, int]]] = []
    deaths: list[dict[Value, float]] = []
    for rank in range(schedule.world_size):
        sizes = ((value, nbytes(value)) for value in schedule.inputs[rank])
        births.append({value: (0.0, size) for value, size in sizes if size})
        deaths.append(dict.fromkeys(births[rank], 0.0))
    for span in spans:
        born, last = births[span.rank], deaths[span.rank]
        for value in span.op.writes:
            size = nbytes(value)
            if size:
                born[value] = (span.start_s, size)
                last[value] = max(last.get(value, 0.0), span.end_s)
        for value in span.op.reads:
            last[value] = max(last.get(value, 0.0), span.end_s)
    steps: list[list[tuple[float, int]]] = []
    for rank, born in enumerate(births):
        last, kept = deaths[rank], frozenset(schedule.outputs[rank])
        changes = [(start_s, size) for start_s, size in born.values()]
        changes += [(last[value], -size) for value, (_, size) in born.items() if value not in kept]
        steps.append(changes)
    return steps


def _accumulate(changes: list[tuple[float, int]], resident_bytes: int) -> tuple[MemorySample, ...]:
    """Return the running sum, one sample per time; what ends at a time makes room for what begins then."""
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
