"""Build the dependency graph of a schedule, which the checks and the simulator share.

An activity is one unit of work: a compute operation on its rank, a transfer (its SEND and RECV), or a collective on all
its members.
An edge is a dependency, as core/schedule.py defines it: a read waits for the write on its rank, an operation for the
previous one on its stream, a transfer for the previous one in its channel.  A schedule can run if and only if this
graph has no cycle.  Faulty schedules get the errors of core.schedule_errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from workbench.core.schedule import COLLECTIVES, SEND, TRANSFERS, Op, Place, Schedule, Value, paused_collector
from workbench.core.schedule_errors import (
    lonely_collective,
    malformed_collective,
    malformed_transfer,
    mismatched_channel,
    never_written,
    output_never_written,
    stuck,
    written_twice,
)


class Way(NamedTuple):
    """A transfer's way.  place: that of its SEND in the source's list."""

    source: int
    place: int
    destination: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Activities:
    """The dependency graph.  members[a]: the places of the activity's operations.

    ops[a]: the operation whose costs are the activity's, and priced_on[a] its rank: a transfer's SEND, a collective's
    operation on the first of its ranks.  ways[a]: the way of a transfer, None for others.
    successors(a): the activities that wait for it.

    num_waits[a]: how many edges lead to it; a dependency with several reasons counts several times.
    targets: the successors of activity 0, then those of activity 1, and so on.  firsts[a]: index in `targets` of
    activity a's first successor.  (One list per activity would take twice as long, mostly in the garbage collector.)
    """

    members: tuple[tuple[Place, ...], ...]
    ops: tuple[Op, ...]
    priced_on: tuple[int, ...]
    ways: tuple[Way | None, ...]
    num_waits: tuple[int, ...]
    targets: list[int]
    firsts: list[int]

    def successors(self, activity: int) -> list[int]:
        """Return the activities that wait for this one."""
        return self.targets[self.firsts[activity] : self.firsts[activity + 1]]


def activities(schedule: Schedule) -> Activities:
    """Return the schedule's activities, in O(operations + values) at the first call.

    Raises ScheduleError naming the fault, with the grid: an unmatched or malformed transfer, a channel whose sides
    disagree on the order, a collective whose members disagree, a value never written, a value written twice.
    `require_progress` finds cycles.
    """
    if not schedule.graphs:
        schedule.graphs.append(_activities(schedule))
    return cast(Activities, schedule.graphs[0])


@paused_collector()
def _activities(schedule: Schedule) -> Activities:
    members: list[tuple[Place, ...]] = []
    of_op: list[list[int]] = []
    sends: dict[Place, list[Place]] = {}
    receives: dict[Place, list[Place]] = {}
    collectives: dict[tuple, list[Place]] = {}
    writers: list[dict[Value, int]] = []

    for rank, ops in enumerate(schedule.ops):
        numbers: list[int] = []
        occurrences: dict[tuple, int] = {}
        written: dict[Value, int] = dict.fromkeys(schedule.inputs[rank], -1)
        for index, op in enumerate(ops):
            kind = op.kind
            if kind in TRANSFERS:
                if not _is_well_formed(op, rank, schedule.world_size):
                    raise malformed_transfer(schedule, rank, index)
                (sends if kind == SEND else receives).setdefault((op.ranks[0], op.ranks[1]), []).append((rank, index))
                numbers.append(-1)
            elif kind in COLLECTIVES:
                members_of_op = op.ranks
                if rank not in members_of_op or len(set(members_of_op)) < len(members_of_op):
                    raise malformed_collective(schedule, rank, index)
                label = (kind, op.stage, op.microbatch, op.part, members_of_op)
                occurrence = occurrences.get(label, 0)
                occurrences[label] = occurrence + 1
                collectives.setdefault((*label, occurrence), []).append((rank, index))
                numbers.append(-1)
            else:
                numbers.append(len(members))
                members.append(((rank, index),))
            for value in op.writes:
                if value in written:
                    raise written_twice(schedule, rank, index, value)
                written[value] = index
        of_op.append(numbers)
        writers.append(written)

    channels = _match_transfers(schedule, sends, receives, members, of_op)
    for key, places in collectives.items():
        if len(places) != len(key[4]):
            raise lonely_collective(schedule, places)
        for rank, index in places:
            of_op[rank][index] = len(members)
        members.append(tuple(places))

    sources: list[int] = []
    targets: list[int] = []
    for channel in channels:
        sources += channel[:-1]
        targets += channel[1:]
    for rank, ops in enumerate(schedule.ops):
        numbers, written = of_op[rank], writers[rank]
        last: dict[str, int] = {}
        for index, op in enumerate(ops):
            activity = numbers[index]
            for value in op.reads:
                writer = written.get(value)
                if writer is None:
                    raise never_written(schedule, rank, index, value)
                if writer >= 0:
                    sources.append(numbers[writer])
                    targets.append(activity)
            if op.kind not in TRANSFERS:
                if op.stream in last:
                    sources.append(last[op.stream])
                    targets.append(activity)
                last[op.stream] = activity
        for value in schedule.outputs[rank]:
            if value not in written:
                raise output_never_written(schedule, rank, value)
    return _graph(schedule, members, sources, targets)


def _graph(schedule: Schedule, members: list[tuple[Place, ...]], sources: list[int], targets: list[int]) -> Activities:
    """Sort the edges by source (counting sort)."""
    priced = [places[0] for places in members]
    for activity, (rank, index) in enumerate(priced):
        op = schedule.ops[rank][index]
        if op.kind in COLLECTIVES and op.ranks[0] != rank:
            priced[activity] = next(place for place in members[activity] if place[0] == op.ranks[0])
    num_waits = [0] * len(members)
    firsts = [0] * (len(members) + 1)
    for source, target in zip(sources, targets, strict=True):
        firsts[source + 1] += 1
        num_waits[target] += 1
    for activity in range(len(members)):
        firsts[activity + 1] += firsts[activity]
    places = list(firsts)
    ordered = [0] * len(targets)
    for source, target in zip(sources, targets, strict=True):
        ordered[places[source]] = target
        places[source] += 1
    ops = tuple([schedule.ops[rank][index] for rank, index in priced])
    return Activities(
        members=tuple(members),
        ops=ops,
        priced_on=tuple([rank for rank, _ in priced]),
        ways=tuple(
            [Way(*place, op.ranks[1]) if op.kind == SEND else None for place, op in zip(priced, ops, strict=True)]
        ),
        num_waits=tuple(num_waits),
        targets=ordered,
        firsts=firsts,
    )


def require_progress(schedule: Schedule, graph: Activities) -> None:
    """Check without running it that the schedule ends, in O(operations).  Raises ScheduleError naming who waits for
    what from whom.
    """
    waits = list(graph.num_waits)
    ready = [activity for activity, count in enumerate(waits) if count == 0]
    num_done = len(ready)
    while ready:
        for successor in graph.successors(ready.pop()):
            waits[successor] -= 1
            if waits[successor] == 0:
                ready.append(successor)
                num_done += 1
    if num_done < len(waits):
        raise stuck(schedule, graph.members, graph.successors, {a for a, count in enumerate(waits) if count > 0})


def _is_well_formed(op: Op, rank: int, world_size: int) -> bool:
    if len(op.ranks) != 2:
        return False
    source, destination = op.ranks
    if source == destination or not 0 <= source < world_size or not 0 <= destination < world_size:
        return False
    if op.kind == SEND:
        return source == rank and len(op.reads) == 1 and not op.writes
    return destination == rank and len(op.writes) == 1 and not op.reads


def _match_transfers(
    schedule: Schedule,
    sends: dict[Place, list[Place]],
    receives: dict[Place, list[Place]],
    members: list[tuple[Place, ...]],
    of_op: list[list[int]],
) -> list[range]:
    """Add an activity for each transfer; return each channel's activities in order."""
    channels = []
    for channel in sends | receives:
        sent, received = sends.get(channel, []), receives.get(channel, [])
        first = len(members)
        for (source, i), (destination, j) in zip(sent, received, strict=False):
            if schedule.ops[source][i].reads != schedule.ops[destination][j].writes:
                raise mismatched_channel(schedule, channel, sent, received)
            of_op[source][i] = of_op[destination][j] = len(members)
            members.append(((source, i), (destination, j)))
        if len(sent) != len(received):
            raise mismatched_channel(schedule, channel, sent, received)
        channels.append(range(first, len(members)))
    return channels
