"""Build the dependency graph of a schedule, which the checks and the simulator share.

An activity is one unit of work: a compute operation on its rank, a transfer (its SEND and RECV), or a collective on all
its members.
An edge is a dependency, as core/schedule.py defines it: a read waits for the write on its rank, an operation for the
previous one on its stream, a transfer for the previous one in its channel.  A schedule can run if and only if this
graph has no cycle.

Each error for a faulty schedule names the fault and shows the grid with the wrong operation marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from workbench.core.errors import ScheduleError
from workbench.core.schedule import COLLECTIVES, RECV, SEND, TRANSFERS, Op, Schedule, Value, paused_collector

Place = tuple[int, int]  # (rank, index in that rank's list)


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
                    raise _fault(schedule, rank, index, *_missing(schedule, rank, value))
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


_MOST_EDGES = 12  # the longest cycle that a message prints in full


def malformed_transfer(schedule: Schedule, rank: int, index: int) -> ScheduleError:
    """A SEND or RECV that is not one value between two ranks of the schedule."""
    form = (
        "one value read, from this rank to another"
        if schedule.ops[rank][index].kind == SEND
        else "one value written, to this rank"
    )
    return _fault(
        schedule,
        rank,
        index,
        "It is malformed.",
        f"Write it with {form} (two different ranks below {schedule.world_size}).",
    )


def malformed_collective(schedule: Schedule, rank: int, index: int) -> ScheduleError:
    """A collective that its rank does not belong to, or that names a rank twice."""
    ranks = schedule.ops[rank][index].ranks
    return _fault(schedule, rank, index, f"Its members are {ranks}.", f"Name rank {rank} and every other member once.")


def written_twice(schedule: Schedule, rank: int, index: int, value: Value) -> ScheduleError:
    """A value that a rank writes a second time."""
    earlier = next((op.label for op in schedule.ops[rank][:index] if value in op.writes), None)
    if earlier is None:
        earlier = schedule.ops[rank][index].label if schedule.ops[rank][index].writes.count(value) > 1 else "an input"
    return _fault(
        schedule, rank, index, f"{value} is written twice on rank {rank}: {earlier} has it already.", "Write it once."
    )


def output_never_written(schedule: Schedule, rank: int, value: Value) -> ScheduleError:
    """A value that a rank should have at the end and never gets."""
    problem, todo = _missing(schedule, rank, value)
    grid = schedule.grid((rank, len(schedule.ops[rank]) - 1))
    return ScheduleError(f"The output {value} was asked for on rank {rank}.", problem, f"{todo}\n{grid}")


def lonely_collective(schedule: Schedule, places: Sequence[Place]) -> ScheduleError:
    """A collective that some of its members do not list."""
    rank, index = places[0]
    op = schedule.ops[rank][index]
    present = {place[0] for place in places}
    absent = [member for member in op.ranks if member not in present]
    member = absent[0]
    others: list[str] = []
    if member < schedule.world_size:
        others = [
            f"{o.label} {'+'.join(map(str, o.ranks))}"
            for o in schedule.ops[member]
            if o.kind in COLLECTIVES and o.label == op.label
        ]
    has = f"has {others[0]} instead" if others else f"has no such {op.kind}"
    todo = "Give every member the same operation with the same ranks."
    return _fault(schedule, rank, index, f"Its members disagree: rank {member} {has}.", todo)


def mismatched_channel(
    schedule: Schedule, channel: Place, sent: Sequence[Place], received: Sequence[Place]
) -> ScheduleError:
    """A channel whose two sides do not name the same values in the same order."""
    source, destination = channel
    out = [schedule.ops[rank][index].reads[0] for rank, index in sent]
    into = [schedule.ops[rank][index].writes[0] for rank, index in received]
    surplus_sends, surplus_receives = Counter(out) - Counter(into), Counter(into) - Counter(out)
    for value, place in zip(out, sent, strict=True):
        if value in surplus_sends:
            problem = f"The send of {value} is unmatched: rank {destination} has no RECV of it from rank {source}."
            return _fault(schedule, *place, problem, "Add the RECV.")
    for value, place in zip(into, received, strict=True):
        if value in surplus_receives:
            problem = f"The receive of {value} is unmatched: rank {source} has no SEND of it to rank {destination}."
            return _fault(schedule, *place, problem, "Add the SEND.")
    transfer = next(i for i in range(len(out)) if out[i] != into[i])
    problem = (
        f"Wrong order in channel {source}>{destination}: its transfer {transfer} is sent as {out[transfer]} and "
        f"received as {into[transfer]}."
    )
    return _fault(schedule, *received[transfer], problem, "Use one order on both sides.")


def stuck(
    schedule: Schedule,
    members: Sequence[tuple[Place, ...]],
    successors: Callable[[int], Sequence[int]],
    unfinished: set[int],
) -> ScheduleError:
    """A schedule that cannot end: activities that wait for each other in a cycle."""
    before: dict[int, int] = {}
    for activity in sorted(unfinished):
        for successor in successors(activity):
            if successor in unfinished:
                before.setdefault(successor, activity)
    # Every unfinished activity waits for another unfinished one, so walking backwards finds a cycle.
    order_of: dict[int, int] = {}
    current = min(unfinished, key=lambda activity: members[activity][0])
    while current not in order_of:
        order_of[current] = len(order_of)
        current = before[current]
    circle = [activity for activity, order in order_of.items() if order >= order_of[current]]
    first = min(range(len(circle)), key=lambda i: (len(members[circle[i]]) == 2, members[circle[i]][0]))
    circle = circle[first:] + circle[:first]
    edges = [_edge(schedule, members[a], members[b]) for a, b in zip(circle, circle[1:] + circle[:1], strict=True)]
    if len(edges) > _MOST_EDGES:
        edges = [*edges[:_MOST_EDGES], f"and so on, {len(edges)} in all"]
    ranks = {rank for activity in circle for rank, _ in members[activity]}
    problem = "It is a cycle within one rank" if len(ranks) == 1 else "It deadlocks"
    rank, index = members[circle[0]][0]
    return ScheduleError(
        f"A schedule of {schedule.world_size} ranks was asked to run.",
        f"{problem}: {'; '.join(edges)}.",
        f"Reorder one of them (the first is marked).\n{schedule.grid((rank, index))}",
    )


def _edge(schedule: Schedule, waiting: tuple[Place, ...], awaited: tuple[Place, ...]) -> str:
    """Return 'rank 0's 0F1 waits for act:1.0 from rank 1' or the like."""
    who = _name(schedule, waiting)
    for rank, index in waiting:
        op = schedule.ops[rank][index]
        for other_rank, other_index in awaited:
            other = schedule.ops[other_rank][other_index]
            if other_rank != rank:
                continue
            shared = [value for value in op.reads if value in other.writes]
            if shared and other.kind == RECV:
                return f"{who} waits for {shared[0]} from rank {other.ranks[0]}"
            if shared:
                return f"{who} waits for {shared[0]}, which {_name(schedule, awaited)} writes"
            if other_index >= index:
                continue
            if op.kind in (SEND, RECV):
                return (
                    f"{who} waits for {_name(schedule, awaited)}, which comes before it in the channel "
                    f"{op.ranks[0]}>{op.ranks[1]}"
                )
            return (
                f"{who} waits for {_name(schedule, awaited)}, which comes before it on rank {rank}'s stream {op.stream}"
            )
    raise AssertionError("an edge joins two operations of one rank")


def _name(schedule: Schedule, places: tuple[Place, ...]) -> str:
    rank, index = places[0]
    op = schedule.ops[rank][index]
    if op.kind == SEND:
        return f"the transfer of {op.reads[0]} from rank {op.ranks[0]} to rank {op.ranks[1]}"
    if op.kind in COLLECTIVES:
        return f"the {op.label} of ranks {', '.join(map(str, op.ranks))}"
    return f"rank {rank}'s {op.label}"


def _missing(schedule: Schedule, rank: int, value: Value) -> tuple[str, str]:
    for other, ops in enumerate(schedule.ops):
        writer = next((op for op in ops if value in op.writes), None)
        if writer is not None or value in schedule.inputs[other]:
            origin = (
                f"rank {other}'s {writer.label} writes it" if writer is not None else f"it is an input of rank {other}"
            )
            return f"{value} is never written on rank {rank}, but {origin}.", "Send it; insert_transfers does that."
    return f"{value} is never written, on no rank.", "Write it, or name it among the inputs."


def _fault(schedule: Schedule, rank: int, index: int, problem: str, todo: str) -> ScheduleError:
    op = schedule.ops[rank][index]
    words = op.label
    if op.kind in (SEND, RECV):
        words = f"{op.kind} of {' '.join(map(str, op.reads + op.writes))} {'>'.join(map(str, op.ranks))}"
    elif op.ranks:
        words = f"{op.label} {'+'.join(map(str, op.ranks))}"
    return ScheduleError(
        f"Rank {rank} was asked to run {words} (operation {index}).", problem, f"{todo}\n{schedule.grid((rank, index))}"
    )
