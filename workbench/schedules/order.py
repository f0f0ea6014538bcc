"""List scheduling (Graham, 1966): a legal static order for operations whose dependencies are known and whose order is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from workbench.core.errors import ScheduleError
from workbench.core.schedule import Op, Schedule, Value


def greedy_order(
    tasks: Sequence[tuple[int, Op]],
    *,
    inputs: Sequence[Sequence[Value]],
    outputs: Sequence[Sequence[Value]],
    seconds: Callable[[Op], float],
) -> Schedule:
    """Return the tasks (rank, op), listed by falling priority, as each rank would run them if transfers took no time.

    A rank that is free takes its ready operation of highest priority.  The order is legal whatever the real times are, because it
    is one that has happened.  Raises ScheduleError if some operation never becomes ready.
    """
    writers: dict[Value, int] = {}
    for number, (_, op) in enumerate(tasks):
        for value in op.writes:
            writers[value] = number
    waits = [0] * len(tasks)
    readers: list[list[int]] = [[] for _ in tasks]
    for number, (_, op) in enumerate(tasks):
        for value in op.reads:
            if value in writers:
                readers[writers[value]].append(number)
                waits[number] += 1
    ready: list[list[int]] = [[] for _ in inputs]
    free = [True] * len(inputs)
    for number, (rank, _) in enumerate(tasks):
        if waits[number] == 0:
            heappush(ready[rank], number)
    listed: list[list[Op]] = [[] for _ in inputs]
    ending: list[tuple[float, int]] = []
    now_s = 0.0
    ranks = set(range(len(inputs)))  # those that may be able to start something
    while True:
        for rank in sorted(ranks):
            if free[rank] and ready[rank]:
                number = heappop(ready[rank])
                free[rank] = False
                listed[rank].append(tasks[number][1])
                heappush(ending, (now_s + seconds(tasks[number][1]), number))
        if not ending:
            break
        now_s = ending[0][0]
        ranks.clear()
        while ending and ending[0][0] == now_s:
            number = heappop(ending)[1]
            free[tasks[number][0]] = True
            ranks.add(tasks[number][0])
            for reader in readers[number]:
                waits[reader] -= 1
                if waits[reader] == 0:
                    heappush(ready[tasks[reader][0]], reader)
                    ranks.add(tasks[reader][0])
    blocked = next((number for number, count in enumerate(waits) if count > 0), None)
    if blocked is not None:
        rank, op = tasks[blocked]
        raise ScheduleError(f"Rank {rank} was asked to run {op.label}.", "What it reads waits for it in a cycle.", "Break the cycle.")
    return Schedule(ops=tuple(map(tuple, listed)), inputs=tuple(map(tuple, inputs)), outputs=tuple(map(tuple, outputs)))
