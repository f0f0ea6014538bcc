"""The errors of faulty schedules: each names the fault and shows the grid with the wrong operation marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from workbench.core.errors import ScheduleError
from workbench.core.schedule import COLLECTIVES, RECV, SEND, Place, Schedule, Value

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


def never_written(schedule: Schedule, rank: int, index: int, value: Value) -> ScheduleError:
    """A value that an operation reads and its rank never gets."""
    return _fault(schedule, rank, index, *_missing(schedule, rank, value))


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
