"""RingAda: forward round the ring to the initiator, who holds the labels; backward only as deep as is unfrozen (sections III and IV).

Stage s of p is the s-th client's blocks; stage p is the head, which the initiator holds.  Operations: EMB embedding and HEAD (head
forward, loss, head backward) on the initiator, F on every stage, B and STEP only from the terminator (the stage with the lowest unfrozen
adapter) upwards, and a STEP of the head.
Values: samples:_.g and labels:_.g never leave the initiator of batch g; embedding:_.g; act:s.g; grad:s.g the gradient with respect to
stage s's input; ctx:s.g; gacc:s.g; loss:_.g; adapter:s._.g the adapters after g updates.  F of batch g reads version g, so no weight is
ever stale; frozen stages run ahead with the forwards of later batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.schedules.pieces import world_size_of


def terminator(plan: Plan, unfrozen_layers: int) -> int:
    """Return the stage that holds the lowest unfrozen adapter.  Raises ScheduleError if that many layers do not exist."""
    if not 1 <= unfrozen_layers <= plan.num_layers:
        asked = f"An unfreezing depth of {unfrozen_layers} was asked for."
        raise ScheduleError(asked, f"The plan has {plan.num_layers} layers.", "Unfreeze 1 to all of them.")
    lowest = plan.num_layers - unfrozen_layers
    return next(number for number, stage in enumerate(plan.stages) if stage.start <= lowest < stage.stop)


def ring(
    plan: Plan, *, unfrozen_layers: int, initiators: Sequence[int], batches_per_initiator: int, world_size: int | None = None
) -> Schedule:
    """Return a training round at one unfreezing depth, without its transfers (Algorithm 1, lines 4-11).

    initiators: the ranks in the order in which they take their turn, each with its own batches; the head's weights pass from one to the
    next.  The order on a rank is greedy, an older batch first, with a backward priced at two forwards.
    """
    for stage in plan.stages:
        if len(stage.shares) != 1:
            raise ScheduleError("A ring was asked for.", f"A stage has {len(stage.shares)} ranks.", "Give each stage one.")
    num_batches = len(initiators) * batches_per_initiator
    size = world_size_of(plan, world_size, (1,) * num_batches)
    lowest = terminator(plan, unfrozen_layers)
    ranks = [stage.ranks[0] for stage in plan.stages]
    outside = [rank for rank in initiators if rank not in ranks]
    if outside:
        raise ScheduleError(f"Rank {outside[0]} was asked to be an initiator.", f"The ring is {ranks}.", "Name a rank of the ring.")
    head = len(plan.stages)
    tasks: list[tuple[int, Op]] = []
    inputs: list[list[Value]] = [[] for _ in range(size)]
    outputs: list[list[Value]] = [[] for _ in range(size)]
    for batch in range(num_batches):
        initiator = initiators[batch // batches_per_initiator]
        inputs[initiator] += [Value("samples", NONE, batch), Value("labels", NONE, batch)]
        outputs[initiator].append(Value("loss", NONE, batch))
        tasks += _batch(batch, initiator, ranks, lowest)
    for number in range(lowest, head):
        inputs[ranks[number]].append(Value("adapter", number, NONE, 0))
        outputs[ranks[number]].append(Value("adapter", number, NONE, num_batches))
    inputs[initiators[0]].append(Value("adapter", head, NONE, 0))
    outputs[initiators[-1]].append(Value("adapter", head, NONE, num_batches))
    prices = {"F": 1.0, "B": 2.0}
    return greedy_order(tasks, inputs=inputs, outputs=outputs, seconds=lambda op: prices.get(op.kind, 0.0))


def _batch(batch: int, initiator: int, ranks: Sequence[int], lowest: int) -> list[tuple[int, Op]]:
    head = len(ranks)
    tasks = [(initiator, Op("EMB", NONE, batch, NONE, (Value("samples", NONE, batch),), (Value("embedding", NONE, batch),)))]
    for stage, rank in enumerate(ranks):
        source = Value("act", stage - 1, batch) if stage else Value("embedding", NONE, batch)
        adapter = (Value("adapter", stage, NONE, batch),) if stage >= lowest else ()
        context = (Value("ctx", stage, batch),) if stage >= lowest else ()
        tasks.append((rank, Op("F", stage, batch, NONE, (source, *adapter), (Value("act", stage, batch), *context))))
    reads = (Value("act", head - 1, batch), Value("labels", NONE, batch), Value("adapter", head, NONE, batch))
    writes = (Value("loss", NONE, batch), Value("grad", head, batch), Value("gacc", head, batch))
    tasks += [(initiator, Op("HEAD", head, batch, NONE, reads, writes)), (initiator, _step(head, batch))]
    for stage in range(head - 1, lowest - 1, -1):
        context, adapter = (Value("ctx", stage, batch),), (Value("adapter", stage, NONE, batch),)
        onward = (Value("grad", stage, batch),) if stage > lowest else ()
        reads = (*context, *adapter, Value("grad", stage + 1, batch))
        writes = (*onward, Value("gacc", stage, batch))
        tasks += [(ranks[stage], Op("B", stage, batch, NONE, reads, writes)), (ranks[stage], _step(stage, batch))]
    return tasks


def _step(stage: int, batch: int) -> Op:
    reads = (Value("gacc", stage, batch), Value("adapter", stage, NONE, batch))
    return Op("STEP", stage, batch, NONE, reads, (Value("adapter", stage, NONE, batch + 1),))


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
