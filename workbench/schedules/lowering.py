"""Lowering passes, which complete a compute-only schedule by one generic rule each, and a dry run that names faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from workbench.core.activities import activities, require_progress
from workbench.core.schedule import ALLREDUCE, RECV, SEND, STEP, Op, Schedule, Value, paused_collector, recv, send

GRADIENT = "gacc"
SUMMED = "gsum"


@paused_collector()
def insert_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a SEND and RECV for each value that a rank reads (or has as an output) and another rank
    has.

    The SEND comes right after the write on the rank that computes the value: the lowest rank, if several do; at the
    very start, if it is an input there.  The RECV: see insert_receives.  A value that no rank has is left for `check`
    to report.
    """
    missing: list[tuple[Value, int]] = []  # (value, destination)
    for rank, ops in enumerate(schedule.ops):
        present = {*schedule.inputs[rank], *chain.from_iterable([op.writes for op in ops])}
        values = chain(chain.from_iterable([op.reads for op in ops]), schedule.outputs[rank])
        missing += [(value, rank) for value in dict.fromkeys([value for value in values if value not in present])]
    homes = _homes(schedule, {value for value, _ in missing})
    sends: list[dict[int, deque[Op]]] = [{} for _ in schedule.ops]
    for source, index, value, destination in sorted(
        (*homes[value], value, rank) for value, rank in missing if value in homes
    ):
        sends[source].setdefault(index + 1, deque()).append(send(value, source, destination))
    return insert_receives(_inserted(schedule, sends))


def _inserted(schedule: Schedule, added: Sequence[Mapping[int, Iterable[Op]]]) -> Schedule:
    """Return the schedule with more operations on each rank, by the index of the operation before which they come."""
    complete = []
    for ops, by_index in zip(schedule.ops, added, strict=True):
        merged: list[Op] = []
        first = 0
        for index in sorted(by_index):
            merged += ops[first:index]
            merged += by_index[index]
            first = index
        complete.append((*merged, *ops[first:]))
    return replace(schedule, ops=tuple(complete))


@paused_collector()
def insert_receives(schedule: Schedule) -> Schedule:
    """Return the schedule with the RECV of every SEND that has none.

    It comes right before the first operation that reads the value, or earlier if a value sent later on the same channel
    is read earlier: both sides of a channel have the same order.
    """
    first_reads: list[dict[Value, int]] = [{} for _ in schedule.ops]
    for reads, ops in zip(first_reads, schedule.ops, strict=True):
        for index, op in enumerate(ops):
            for value in op.reads:
                reads.setdefault(value, index)
    received = [{op.writes[0] for op in ops if op.kind == RECV} for ops in schedule.ops]
    receives: list[dict[int, deque[Op]]] = [{} for _ in schedule.ops]
    for rank, ops in reversed(list(enumerate(schedule.ops))):
        earliest: dict[int, int] = {}  # by destination: the position of the channel's next RECV
        for op in reversed(ops):
            if op.kind == SEND and op.reads[0] not in received[op.ranks[1]]:
                destination, value = op.ranks[1], op.reads[0]
                end = len(schedule.ops[destination])
                place = min(first_reads[destination].get(value, end), earliest.get(destination, end))
                earliest[destination] = place
                receives[destination].setdefault(place, deque()).appendleft(recv(value, rank, destination))
    return _inserted(schedule, receives)


def insert_allreduce(schedule: Schedule) -> Schedule:
    """Return the schedule with an ALLREDUCE before each STEP that several ranks have in common (same stage, micro-batch
    and part).

    Those ranks are replicas if any of them accumulates a gradient.  The ALLREDUCE reads the tokens `gacc` that the STEP
    would have read (none on a rank without samples), and the STEP reads the sum `gsum` instead.
    """
    groups: dict[Op, list[int]] = {}
    accumulating: set[Op] = set()
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if op.kind == STEP:
                groups.setdefault(_label(op), []).append(rank)
                if any(value.name == GRADIENT for value in op.reads):
                    accumulating.add(_label(op))
    complete = []
    for rank, ops in enumerate(schedule.ops):
        merged: list[Op] = []
        for op in ops:
            ranks = groups[_label(op)] if op.kind == STEP and _label(op) in accumulating else []
            if len(ranks) > 1:
                gradients = tuple(value for value in op.reads if value.name == GRADIENT)
                others = tuple(value for value in op.reads if value.name != GRADIENT)
                total = Value(SUMMED, op.stage, op.microbatch, rank)
                merged.append(
                    Op(ALLREDUCE, op.stage, op.microbatch, op.part, gradients, (total,), tuple(ranks), "collective")
                )
                op = op._replace(reads=(total, *others))
            merged.append(op)
        complete.append(tuple(merged))
    return replace(schedule, ops=tuple(complete))


def _label(op: Op) -> Op:
    return Op(op.kind, op.stage, op.microbatch, op.part)


def _homes(schedule: Schedule, values_to_send: set[Value]) -> dict[Value, tuple[int, int]]:
    """Return the (rank, index of the write) that sends a value: the lowest rank that computes it, or else has it as an
    input (-1).
    """
    homes: dict[Value, tuple[int, int]] = {}
    for rank, ops in enumerate(schedule.ops):
        for index, op in enumerate(ops):
            for value in op.writes:
                if value in values_to_send and op.kind != RECV:
                    homes.setdefault(value, (rank, index))
    for rank, values in enumerate(schedule.inputs):
        for value in values:
            if value in values_to_send:
                homes.setdefault(value, (rank, -1))
    return homes


def check(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run, in O(operations + values).

    Raises ScheduleError naming the fault and showing the grid with the wrong operation marked: an unmatched send or
    receive, a channel whose sides disagree on the order, a collective whose members disagree, a value never written or
    written twice, a cycle, a deadlock (who waits for what from whom).  A schedule that passes cannot hang: network
    interfaces add waiting, but no circular waiting.
    """
    require_progress(schedule, activities(schedule))
    return schedule
