"""Lowering passes, which complete a compute-only schedule by one generic rule each, and a dry run that names faults."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.activities import activities, require_progress
from workbench.core.schedule import ALLREDUCE, RECV, STEP, Op, Schedule, Value, paused_collector, recv, send

GRADIENT = "gacc"
SUMMED = "gsum"


@paused_collector()
def insert_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a SEND and RECV for each value that a rank reads (or has as an output) and another rank has.

    The SEND comes right after the write on the rank that computes the value: the lowest rank, if several do; at the very start, if it is
    an input there.  The RECV comes right before the first read, or earlier if a value sent later on the same channel is read earlier:
    both sides of a channel have the same order.  A value that no rank has is left for `check` to report.
    """
    missing: list[tuple[Value, int, int]] = []  # (value, destination, index of the first read)
    for rank, ops in enumerate(schedule.ops):
        present = set(schedule.inputs[rank])
        for op in ops:
            present.update(op.writes)
        for index, op in enumerate(ops):
            for value in op.reads:
                if value not in present:
                    present.add(value)
                    missing.append((value, rank, index))
        for value in schedule.outputs[rank]:
            if value not in present:
                present.add(value)
                missing.append((value, rank, len(ops)))
    homes = _homes(schedule, {value for value, _, _ in missing})
    # (source, index of the write, value, destination, index of the first read)
    transfers = [(*homes[value], value, rank, index) for value, rank, index in missing if value in homes]
    transfers.sort()

    sends: list[dict[int, list[Op]]] = [{} for _ in schedule.ops]
    for source, index, value, destination, _ in transfers:
        sends[source].setdefault(index, []).append(send(value, source, destination))
    receives: list[dict[int, list[Op]]] = [{} for _ in schedule.ops]
    earliest: dict[tuple[int, int], int] = {}  # for each channel: the position of its next RECV
    for source, _, value, destination, first_read in reversed(transfers):
        place = min(first_read, earliest.get((source, destination), first_read))
        earliest[source, destination] = place
        receives[destination].setdefault(place, []).append(recv(value, source, destination))

    complete = []
    for rank, ops in enumerate(schedule.ops):
        sent, received = sends[rank], receives[rank]
        merged = list(sent.get(-1, ()))
        for index, op in enumerate(ops):
            merged += reversed(received.get(index, ()))
            merged.append(op)
            merged += sent.get(index, ())
        merged += reversed(received.get(len(ops), ()))
        complete.append(tuple(merged))
    return replace(schedule, ops=tuple(complete))


def insert_allreduce(schedule: Schedule) -> Schedule:
    """Return the schedule with an ALLREDUCE before each STEP that several ranks have in common (same stage, micro-batch and part).

    Those ranks are replicas if any of them accumulates a gradient.  The ALLREDUCE reads the tokens `gacc` that the STEP would have read
    (none on a rank without samples), and the STEP reads the sum `gsum` instead.
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
                merged.append(Op(ALLREDUCE, op.stage, op.microbatch, op.part, gradients, (total,), tuple(ranks), "collective"))
                op = op._replace(reads=(total, *others))
            merged.append(op)
        complete.append(tuple(merged))
    return replace(schedule, ops=tuple(complete))


def _label(op: Op) -> Op:
    return Op(op.kind, op.stage, op.microbatch, op.part)


def _homes(schedule: Schedule, wanted: set[Value]) -> dict[Value, tuple[int, int]]:
    """Return the (rank, index of the write) that sends a value: the lowest rank that computes it, or else has it as an input (-1)."""
    homes: dict[Value, tuple[int, int]] = {}
    for rank, ops in enumerate(schedule.ops):
        for index, op in enumerate(ops):
            for value in op.writes:
                if value in wanted and op.kind != RECV:
                    homes.setdefault(value, (rank, index))
    for rank, values in enumerate(schedule.inputs):
        for value in values:
            if value in wanted:
                homes.setdefault(value, (rank, -1))
    return homes


def check(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run, in O(operations + values).

    Raises ScheduleError naming the fault and showing the grid with the wrong operation marked: an unmatched send or receive, a channel
    whose sides disagree on the order, a collective whose members disagree, a value never written or written twice, a cycle, a deadlock
    (who waits for what from whom).  A schedule that passes cannot hang: network interfaces add waiting, but no circular waiting.
    """
    require_progress(schedule, activities(schedule))
    return schedule
