"""Run a schedule in virtual time: an event-driven simulation of streams, channels, collectives and network interfaces.

An interface is full duplex.  A rank's transfers leave one after another: the one that is ready first goes first, ties
go by list order.  Those that reach a rank at the same time share its ingress equally (see core/capacity.py), as TCP's
connections do behind one port of a switch.  On Wi-Fi all transfers and collectives in flight share the air in the same
way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush

from workbench.core.activities import Activities, activities, require_progress
from workbench.core.costs import Costs, sent_bytes, tensor_bytes
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import COLLECTIVES, TRANSFERS, Op, paused_collector
from workbench.core.timeline import Span, Timeline
from workbench.simulator.memory import memory_over_time
from workbench.simulator.network import Progress, Wifi, Wires


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
    """Return the start and the end of each activity, as (activity, start_s, end_s).

    An activity that is ready starts at once; only a transfer waits for its sender.  Then the clock goes to the next
    event.
    """
    world_size, ways, targets, firsts = program.schedule.world_size, graph.ways, graph.targets, graph.firsts
    durations_s = _durations_s(program.costs, graph)
    progress = Progress(graph, durations_s)
    ready, times, events, release = progress.ready, progress.times, progress.events, progress.release
    wifi = Wifi(progress, world_size, air=program.air, costs=program.costs) if program.air is not None else None
    network = wifi or Wires(progress, world_size)
    now_s = 0.0
    while True:
        for activity in ready:
            way = ways[activity]
            if way is not None:
                network.enqueue(activity, way, now_s)
            elif wifi is None or not wifi.start_collective(activity, now_s):
                end_s = now_s + durations_s[activity]
                times.append((activity, now_s, end_s))
                heappush(events, (end_s, activity))
        ready.clear()
        # Handle all events of one instant before choosing a sender's next transfer.
        if network.free and not (events and events[0][0] == now_s):
            network.start_next(now_s)
        if not events:
            break
        now_s = events[0][0]
        while events and events[0][0] == now_s:
            event = heappop(events)[1]
            if event < 0:
                network.handle_capacity(~event, now_s)
            elif (way := ways[event]) is None or network.handle_transfer(event, way, now_s):
                release(targets[firsts[event] : firsts[event + 1]])
    if len(times) < len(graph.ops):
        require_progress(program.schedule, graph)
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


def _collective_bytes(costs: Costs, rank: int, op: Op) -> int:
    """Return the bytes that a rank sends in a collective."""
    return sent_bytes(op.kind, len(op.ranks), tensor_bytes(costs, rank, op), is_root=rank == op.ranks[0])
