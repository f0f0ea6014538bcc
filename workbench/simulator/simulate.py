"""Run a schedule in virtual time: an event-driven simulation of streams, channels, collectives and network interfaces.

An interface is full duplex.  A rank's transfers leave one after another: the one that is ready first goes first, ties
go by list order.  Those that reach a rank at the same time share its ingress equally (see core/capacity.py), as TCP's
connections do behind one port of a switch.  On Wi-Fi all transfers and collectives in flight share the air in the same
way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from workbench.core.activities import Activities, activities, require_progress
from workbench.core.capacity import Capacity
from workbench.core.costs import Costs, collective_air_s, num_senders, sent_bytes
from workbench.core.errors import ScheduleError
from workbench.core.medium import Air
from workbench.core.program import Program
from workbench.core.schedule import (
    BROADCAST,
    COLLECTIVES,
    REDUCESCATTER,
    SEND,
    TRANSFERS,
    Op,
    paused_collector,
)
from workbench.core.timeline import Span, Timeline
from workbench.simulator.memory import memory_over_time

_NONE, _SEVERAL = -1, -2
"""How many transfers are in flight to a receiver, where it is not one."""
_LEAVING, _LEFT = 1, 2
"""Whether a transfer that shares a capacity has left its sender."""


@paused_collector()
def simulate(program: Program, *, title: str = "", memory: bool = True) -> Timeline:
    """Simulate a program and return its timeline, in seconds from 0.

    Every operation starts as early as the semantics of core/schedule.py allow.  A transfer takes costs.seconds(source,
    its SEND), for which it occupies its sender's egress.  What its receiver cannot take meanwhile waits in the switch.
    It has arrived when the receiver's ingress has given it as many seconds.  Each sender with a transfer in flight to a
    receiver gets the same share of them.
    Of the transfers that wait for an egress, the one that was ready first goes first; of those ready at the same
    instant, the one whose SEND comes first in the list.  The next transfer of a channel is ready when the one before
    has left its sender, and arrives after it.
    A collective takes costs.seconds(first member, its operation there) on its stream, and does not occupy the
    interfaces.
    On shared air these are the seconds without other traffic.  The part that is time on air comes first, and takes
    longer while others send, whoever receives; a collective counts as all its members that send at once.  A transfer
    occupies its sender's egress while it is on air.  The rest, latency and overheads, follows, and differs from message
    to message by the jitter.  Meanwhile the next transfer of the channel may be on air; messages arrive in order.
    memory: whether to compute the bytes in use over time, too.
    Raises ScheduleError, the same as schedules.check, for a schedule that cannot run.
    """
    graph = activities(program.schedule)
    spans = _spans(program, graph, _times(program, graph))
    return Timeline(
        source="simulated",
        device_names=program.devices,
        spans=tuple(spans),
        memory=memory_over_time(program.schedule, program.costs, spans) if memory else (),
        budget_bytes=program.budget_bytes,
        title=title,
    )


@paused_collector()
def makespan_s(program: Program) -> float:
    """Return the end of the last operation of `simulate`'s timeline, without making the timeline."""
    return max((end_s for _, _, end_s in _times(program, activities(program.schedule))), default=0.0)


@paused_collector()
def ends_s(program: Program) -> list[tuple[Op, float]]:
    """Return when the operations of `simulate`'s timeline end: of transfers the SEND, of collectives one for all."""
    graph = activities(program.schedule)
    return [(graph.ops[activity], end_s) for activity, _, end_s in _times(program, graph)]


def _spans(program: Program, graph: Activities, times: Iterable[tuple[int, float, float]]) -> list[Span]:
    ops, costs = program.schedule.ops, program.costs
    spans: list[Span] = []
    for activity, start_s, end_s in times:
        for rank, index in graph.members[activity]:
            op = ops[rank][index]
            nbytes = 0
            if op.kind in TRANSFERS:
                nbytes = costs.spec((op.reads or op.writes)[0]).nbytes
            elif op.kind in COLLECTIVES:
                nbytes = _collective_bytes(costs, rank, op)
            spans.append(Span(rank, op, start_s, end_s, nbytes))
    return spans


def _times(program: Program, graph: Activities) -> list[tuple[int, float, float]]:
    """Return the start and the end of each activity, as (activity, start_s, end_s)."""
    schedule, costs, air = program.schedule, program.costs, program.air
    ops, ranks, targets, firsts, ways = graph.ops, graph.priced_on, graph.targets, graph.firsts, graph.ways
    waits, durations_s = list(graph.num_waits), _durations_s(costs, graph)
    waiting: list[list[tuple[float, int, int]]] = [[] for _ in schedule.ops]  # by sender: heap of (ready_s, place, it)
    is_sending = [False] * schedule.world_size
    free: list[int] = []  # senders that may have a transfer to start
    received = [_NONE] * schedule.world_size  # by receiver: the only transfer in flight to it, _NONE, or _SEVERAL
    capacities: dict[int, Capacity] = {}  # the air, as 0; on wires by receiver
    channels: dict[tuple[int, ...], deque[int]] = {}  # those in flight to a receiver of several, in order
    progress = bytearray(len(ops))  # of transfers that share a capacity: _LEAVING, then _LEFT
    started_s = [0.0] * len(ops)  # of transfers, and of what is on air
    rests_s: dict[int, float] = {}  # of what is on air: its seconds afterwards
    num_sent: dict[tuple[int, ...], int] = {}  # by channel
    arrived_s: dict[tuple[int, ...], float] = {}  # by channel: when its last message arrives
    times: list[tuple[int, float, float]] = []
    ending: list[tuple[float, int]] = []  # heap of (end_s, activity) and (next_s, ~rank) of a receiver's capacity
    released: list[int] = [activity for activity, count in enumerate(waits) if count == 0]
    now_s = 0.0
    num_done = 0

    def put_on_air(air: Air, activity: int) -> bool:
        """Start a transfer or collective on air; return False for an activity that takes no time there."""
        op, duration_s, senders = ops[activity], durations_s[activity], 1.0
        if op.kind == SEND:
            source, destination = op.ranks
            number = num_sent[op.ranks] = num_sent.get(op.ranks, -1) + 1
            air_s = min(duration_s, air.transfer_s(source, destination, costs.spec(op.reads[0]).nbytes))
            rest_s = max(0.0, duration_s - air_s - air.jitter_s) + air.delay_s(source, destination, number)
            progress[activity] = _LEAVING
        elif op.kind in COLLECTIVES and len(op.ranks) > 1:
            air_s = min(duration_s, collective_air_s(air, op.kind, op.ranks, _tensor_bytes(costs, ranks[activity], op)))
            rest_s, senders = duration_s - air_s, num_senders(op.kind, len(op.ranks))
        else:
            return False
        started_s[activity], rests_s[activity] = now_s, rest_s
        share(0, activity, air_s, senders)
        return True

    def send_over_wire(activity: int, receiver: int) -> None:
        """Start a transfer.  It leaves its sender after its own seconds, and has arrived then if no other is in flight
        to its receiver.
        """
        started_s[activity] = now_s
        heappush(ending, (now_s + durations_s[activity], activity))
        other = received[receiver]
        if other == _NONE:
            received[receiver] = activity
            return
        if other != _SEVERAL:
            join(receiver, other, started_s[other] + durations_s[other] - now_s)
            received[receiver] = _SEVERAL
        join(receiver, activity, durations_s[activity])

    def join(receiver: int, activity: int, left_s: float) -> None:
        """Let a transfer share its receiver's ingress, after those of its channel."""
        progress[activity] = _LEAVING
        channel = channels.setdefault(ops[activity].ranks, deque())
        channel.append(activity)
        if len(channel) == 1:
            share(receiver, activity, left_s)

    def share(receiver: int, activity: int, left_s: float, senders: float = 1.0) -> None:
        capacity = capacities.get(receiver)
        if capacity is None:
            capacity = capacities[receiver] = Capacity()
        capacity.start(activity, left_s, now_s, senders)
        heappush(ending, (capacity.next_s, ~receiver))

    def leave_sender(activity: int) -> None:
        """Let its sender's next transfer start, which is ready then if it goes the same way: messages arrive in
        order.
        """
        way = ways[activity]
        if way is None or progress[activity] == _LEFT:
            return
        progress[activity] = _LEFT
        is_sending[way.source] = False
        free.append(way.source)
        for successor in targets[firsts[activity] : firsts[activity + 1]]:
            if is_next(successor, ops[activity]):
                release(successor)

    def is_next(activity: int, op: Op) -> bool:
        """Return whether an activity is the transfer after `op` in its channel."""
        return ops[activity].kind == SEND and ops[activity].ranks == op.ranks

    def leave_capacity(receiver: int) -> None:
        """Let the transfers end that have had their share."""
        capacity = capacities[receiver]
        for activity in capacity.leave():
            leave_sender(activity)
            if air is not None:
                op, end_s = ops[activity], now_s + rests_s[activity]
                if op.kind == SEND:
                    end_s = arrived_s[op.ranks] = max(end_s, arrived_s.get(op.ranks, 0.0))
                end(activity, started_s[activity], end_s)
                continue
            times.append((activity, started_s[activity], now_s))
            release_all(activity)
            channel = channels[ops[activity].ranks]
            channel.popleft()
            if channel:
                capacity.start(channel[0], durations_s[channel[0]], now_s)
        if capacity.next_s < math.inf:
            heappush(ending, (capacity.next_s, ~receiver))
        else:
            received[receiver] = _NONE

    def end(activity: int, start_s: float, end_s: float) -> None:
        """Let an activity end at a time that is now certain."""
        times.append((activity, start_s, end_s))
        heappush(ending, (end_s, activity))

    def release(activity: int) -> None:
        waits[activity] -= 1
        if waits[activity] == 0:
            released.append(activity)

    def release_all(activity: int) -> None:
        """Release what waits for an activity that has ended, but what was released when it left its sender."""
        nonlocal num_done
        num_done += 1
        for successor in targets[firsts[activity] : firsts[activity + 1]]:
            if not (progress[activity] and is_next(successor, ops[activity])):
                release(successor)

    while True:
        for activity in released:
            way = ways[activity]
            if way is not None:
                heappush(waiting[way.source], (now_s, way.place, activity))
                free.append(way.source)
            elif air is None or not put_on_air(air, activity):
                end(activity, now_s, now_s + durations_s[activity])
        released.clear()
        # Handle all events of one instant before choosing a sender's next transfer.
        if free and not (ending and ending[0][0] == now_s):
            for sender in free:
                if waiting[sender] and not is_sending[sender]:
                    is_sending[sender] = True
                    activity = heappop(waiting[sender])[2]
                    if air is None:
                        send_over_wire(activity, ops[activity].ranks[1])
                    else:
                        put_on_air(air, activity)
            free.clear()
        if not ending:
            break
        now_s = ending[0][0]
        while ending and ending[0][0] == now_s:
            activity = heappop(ending)[1]
            if activity < 0:
                if capacities[~activity].next_s == now_s:  # else one that started later has changed it
                    leave_capacity(~activity)
                continue
            way = ways[activity]
            if way is not None and air is None:
                if progress[activity]:
                    leave_sender(activity)
                    continue
                times.append((activity, started_s[activity], now_s))
                is_sending[way.source], received[way.destination] = False, _NONE
                free.append(way.source)
            elif progress[activity]:
                release_all(activity)
                continue
            num_done += 1
            for successor in targets[firsts[activity] : firsts[activity + 1]]:
                waits[successor] -= 1
                if waits[successor] == 0:
                    released.append(successor)
    if num_done < len(ops):
        require_progress(schedule, graph)
        raise AssertionError("the dry run ended although the simulation did not")
    return times


def _durations_s(costs: Costs, graph: Activities) -> list[float]:
    """Return each activity's seconds without other traffic."""
    seconds = costs.seconds
    durations_s = [seconds(rank, op) for rank, op in zip(graph.priced_on, graph.ops, strict=True)]
    for rank, op, duration_s in zip(graph.priced_on, graph.ops, durations_s, strict=True):
        if not 0.0 <= duration_s < math.inf:
            problem = f"Its cost is {duration_s} s."
            raise ScheduleError(
                f"Rank {rank} was asked to run {op.label}.", problem, "Price it with 0 or more seconds."
            )
    return durations_s


def _tensor_bytes(costs: Costs, rank: int, op: Op) -> int:
    """Return the size of a collective's whole tensor.

    It is the operation's output (for a REDUCESCATTER and for a BROADCAST's root: its input).
    """
    transferred = op.reads if op.kind == REDUCESCATTER or (op.kind == BROADCAST and rank == op.ranks[0]) else op.writes
    return sum(costs.spec(value).nbytes for value in transferred)


def _collective_bytes(costs: Costs, rank: int, op: Op) -> int:
    """Return the bytes that a rank sends in a collective."""
    return sent_bytes(op.kind, len(op.ranks), _tensor_bytes(costs, rank, op), is_root=rank == op.ranks[0])
