"""RingAda's round: forward around the ring, backward up to the terminator, the head passed on (RingAda, section IV-B,
Algorithm 1).

Operations.  E embeds a micro-batch at the initiator.  P runs a stage's frozen layers.  F runs its unfrozen layers and
keeps their context for the backward pass.  H computes loss and gradient of the micro-batch at the initiator.  B is the
backward pass of the unfrozen layers.
LOAD reads the frozen layers' output for a micro-batch from the terminator's cache; the micro-batch then has neither E
nor P.  With a side network each stage reads what its trained layers take from the model, and the initiator the last
hidden state.
R: see schedules.recomputation.  A stage that recomputes keeps the inputs of its unfrozen layers only; frozen ones have
no backward pass.
STEP updates a stage's adapters and HSTEP the head.  TAKE returns the head to the device where the round began.  If a
policy depends on the results of a round, then at its end ALLREDUCE sums those of all stages and HEAR takes the sum.
In a round of federated averaging each device is a separate ring; then ALLREDUCE sums all trained weights and MEAN makes
them the average.
Values.  Micro-batches are numbered through the round, mini-batches (iterations) too.  emb:_.m; act:s.m the output of
stage s; mid:s.m between P and F of one stage; ctx:s.m; grad:s.m the gradient with respect to the input of stage s (of
the head for s = number of stages); gacc:s.m and hacc:_.m tokens of accumulated gradients; weight:s.i the adapters of
stage s after iteration i; head:_.i the head after iteration i; free:_.i lets a later mini-batch start; loss:_.m;
told:_._.r, on rank r, the sum of all stages' loss and squared gradients; mean:_._ the average of the devices' trained
weights.

With a side network (Parallel Adapters) the model itself is frozen.  P runs all its layers, and the side network's
frozen ones; F, B and STEP belong to the side network's trained layers.  side:s.m is its output, act:s.m the model's,
and both below the terminator.

F reads the weights of the previous iteration, so no weight is stale and only one version exists.  P reads no trained
weights: frozen layers take new mini-batches at once.  This is one layer finer than the paper, whose terminator waits
with its frozen layers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan, Share
from workbench.core.schedule import ALLREDUCE, NONE, STEP, Op, Schedule, Value, paused_collector, send
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pieces import world_size_of
from workbench.schedules.recomputation import recompute

EMBED, LOAD, PREFIX, FORWARD, HEAD, BACKWARD, HEAD_STEP, TAKE = "E", "LOAD", "P", "F", "H", "B", "HSTEP", "TAKE"
HEAR, MEAN = "HEAR", "MEAN"
LOWEST = "A"
"""In a profile, the backward pass of the lowest unfrozen layer: only of its adapter, because no layer below is
trained."""

Seconds = Callable[[int, Op], float]
"""Seconds of an operation on a rank, or of a SEND (see core.costs.Costs)."""


class Iteration(NamedTuple):
    """One mini-batch.  initiator: the rank that has its data.  first_unfrozen: the lowest layer that it trains, L -
    Dep^r from 0.
    """

    initiator: int
    first_unfrozen: int
    num_micro_batches: int


def terminator(plan: Plan, first_unfrozen: int) -> int:
    """Return the stage at which the backward pass ends: the stage of the lowest unfrozen adapter.

    Section IV-B: the device u with 1(beta(u) <= N_TM - Dep^r + 1 <= epsilon(u)) > 0, blocks counted from 1.
    """
    return next(number for number, stage in enumerate(plan.stages) if stage.start <= first_unfrozen < stage.stop)


class _Task(NamedTuple):
    rank: int
    op: Op
    priority: tuple[int, int, int]


def ring_round(
    plan: Plan,
    iterations: Sequence[Iteration],
    seconds: Seconds,
    *,
    in_flight: int,
    world_size: int | None = None,
    is_noted: bool = False,
    cached: Collection[int] = (),
    has_side: bool = False,
) -> Schedule:
    """Return the mini-batches of a round with their transfers; every stage has one rank.

    in_flight: a mini-batch is embedded after the mini-batch in_flight places before it has updated the head.  seconds:
    approximate times of the operations.  Each rank lists its operations in the order in which a device that always
    prefers the oldest mini-batch would run them.
    is_noted: whether each device receives the results of the round at its end.  cached: micro-batches whose frozen
    layers are skipped.
    has_side: the trained layers are a side network: P computes the frozen model alone and waits for no update; F, B and
    STEP do the rest.
    Raises ScheduleError for a round without mini-batches, none in flight, or a stage of several ranks.
    """
    tasks = _tasks(plan, iterations, in_flight, cached, has_side)
    size = world_size_of(plan, world_size, (1,) * len(tasks))
    first, last = iterations[0].initiator, iterations[-1].initiator
    if first != last:
        head, taken_head = Value("head", NONE, len(iterations) - 1), Value("taken", NONE, len(iterations))
        tasks.append(_Task(first, Op(TAKE, NONE, NONE, NONE, (head,), (taken_head,)), (len(iterations), 0, 0)))
    ordered = recompute(_in_order(tasks, size, seconds), plan, _lowest(iterations))
    return insert_transfers(_with_notes(plan, ordered) if is_noted else ordered)


def federated_round(
    plan: Plan, iterations: Sequence[Iteration], seconds: Seconds, *, in_flight: int, world_size: int | None = None
) -> Schedule:
    """Return a round of federated averaging: each rank of the only stage trains its own mini-batches, then all take the
    average.

    iterations: those of one rank are consecutive.  Other arguments: see ring_round.
    """
    [stage] = plan.stages
    tasks: list[_Task] = []
    first = micro_batches = 0
    for rank, group in groupby(iterations, key=lambda iteration: iteration.initiator):
        group_iterations = list(group)
        alone = replace(plan, stages=(replace(stage, shares=(Share(rank=rank, samples=plan.micro_batch_size),)),))
        tasks += _tasks(alone, group_iterations, in_flight, (), False, first, micro_batches)
        first += len(group_iterations)
        micro_batches += sum(iteration.num_micro_batches for iteration in group_iterations)
        trained, mean = (Value("head", NONE, first - 1), Value("weight", 0, first - 1)), Value("mean", NONE, NONE, rank)
        tasks.append(
            _Task(rank, Op(ALLREDUCE, 0, NONE, NONE, trained, (mean,), stage.ranks, "collective"), (first, 4, 0))
        )
        tasks.append(
            _Task(rank, Op(MEAN, NONE, NONE, NONE, (mean,), (Value("taken", NONE, NONE, rank),)), (first, 5, 0))
        )
    size = world_size_of(plan, world_size, (1,) * len(tasks))
    return recompute(_in_order(tasks, size, seconds), plan, _lowest(iterations))


def _lowest(iterations: Sequence[Iteration]) -> Callable[[int], int]:
    """Return a function of a micro-batch: the lowest layer that it trains."""
    return [
        iteration.first_unfrozen for iteration in iterations for _ in range(iteration.num_micro_batches)
    ].__getitem__


def _tasks(
    plan: Plan,
    iterations: Sequence[Iteration],
    in_flight: int,
    cached: Collection[int],
    has_side: bool,
    first: int = 0,
    number: int = 0,
) -> list[_Task]:
    """Return a round's operations.  first, number: the numbers of its first mini-batch and micro-batch."""
    if not iterations or in_flight < 1 or any(len(stage.shares) != 1 for stage in plan.stages):
        raise ScheduleError(
            f"A round of {len(iterations)} mini-batches, {in_flight} of them in flight, was asked for.",
            f"The stages have {', '.join(str(len(stage.shares)) for stage in plan.stages)} ranks.",
            "Give the round a mini-batch, let one or more be in flight, and give each stage one rank.",
        )
    tasks: list[_Task] = []
    updated: dict[int, Value] = {}  # the last weights of each stage
    for index, iteration in enumerate(iterations, first):
        micro_batches = range(number, number + iteration.num_micro_batches)
        number = micro_batches.stop
        head_before = (Value("head", NONE, index - 1),) if index > first else ()
        let_in = (Value("free", NONE, index - in_flight),) if index - first >= in_flight else ()
        end = terminator(plan, iteration.first_unfrozen)
        home = iteration.initiator

        def add(
            rank: int,
            kind: str,
            stage: int,
            m: int,
            urgency: int,
            reads: tuple[Value, ...],
            *writes: Value,
            at: int = index,
        ) -> None:
            tasks.append(_Task(rank, Op(kind, stage, m, NONE, reads, writes), (at, urgency, m)))

        for m in micro_batches:
            is_cached = m in cached
            hidden = Value("mid", end, m) if is_cached else Value("emb", NONE, m)
            if is_cached and has_side:
                add(home, LOAD, NONE, m, 3, let_in, Value("act", len(plan.stages) - 1, m))
            elif is_cached:
                add(plan.stages[end].ranks[0], LOAD, end, m, 3, let_in, hidden)
            else:
                add(home, EMBED, NONE, m, 3, let_in, hidden)
            for s in range(end if is_cached else 0, len(plan.stages)):
                stage = plan.stages[s]
                [rank] = stage.ranks
                after, source = Value("act", s, m), hidden
                if has_side and is_cached:
                    source = Value("mid", s, m)
                    add(rank, LOAD, s, m, 3, let_in, source)
                elif has_side:
                    source = Value("mid", s, m)
                    add(rank, PREFIX, s, m, 3, (hidden,), after, *((source,) if s >= end else ()))
                elif stage.start < iteration.first_unfrozen and not is_cached:
                    source = Value("mid", s, m) if s == end else after
                    add(rank, PREFIX, s, m, 3, (hidden,), source)
                if s >= end:
                    below = (Value("side", s - 1, m),) if has_side and s > end else ()
                    weights = (updated[s],) if s in updated else ()
                    trained = Value("side" if has_side else "act", s, m)
                    add(rank, FORWARD, s, m, 1, (source, *below, *weights), trained, Value("ctx", s, m))
                hidden = after
            stages = len(plan.stages)
            scored = (hidden, *((Value("side", stages - 1, m),) if has_side else ()), *head_before)
            add(
                home, HEAD, NONE, m, 1, scored, Value("loss", NONE, m), Value("grad", stages, m), Value("hacc", NONE, m)
            )
            for s in reversed(range(end, stages)):
                passed = (Value("grad", s, m),) if s > end else ()
                reads = (Value("ctx", s, m), Value("grad", s + 1, m))
                add(plan.stages[s].ranks[0], BACKWARD, s, m, 2, reads, *passed, Value("gacc", s, m))
        gradients = tuple(Value("hacc", NONE, m) for m in micro_batches)
        add(home, HEAD_STEP, NONE, index, 0, gradients, Value("head", NONE, index), Value("free", NONE, index))
        for s in range(end, len(plan.stages)):
            updated[s] = Value("weight", s, index)
            sums = tuple(Value("gacc", s, m) for m in micro_batches)
            add(plan.stages[s].ranks[0], STEP, s, index, 0, sums, updated[s])
    return tasks


def _with_notes(plan: Plan, schedule: Schedule) -> Schedule:
    """Return a round after which every device gets its results."""
    ops, ranks = list(schedule.ops), tuple(stage.ranks[0] for stage in plan.stages)
    for rank in ranks:
        written = tuple(value for op in ops[rank] for value in op.writes if value.name in ("loss", "weight"))
        notes = (Value("told", NONE, NONE, rank),)
        ops[rank] += (Op(ALLREDUCE, NONE, NONE, NONE, written, notes, ranks), Op(HEAR, NONE, NONE, NONE, notes))
    return replace(schedule, ops=tuple(ops))


@paused_collector()
def _in_order(tasks: Sequence[_Task], world_size: int, seconds: Seconds) -> Schedule:
    """Return each rank's operations as in a simulation in which a free rank takes the most urgent one that is ready; no
    transfers yet.
    """
    writer = {value: number for number, task in enumerate(tasks) for value in task.op.writes}
    waits = [len(task.op.reads) for task in tasks]
    readers: dict[Value, list[int]] = {}
    for number, task in enumerate(tasks):
        for value in task.op.reads:
            readers.setdefault(value, []).append(number)
    assert all(value in writer for value in readers)
    ready: list[list[tuple[tuple[int, int, int], int]]] = [[] for _ in range(world_size)]
    is_free = [True] * world_size
    listed: list[list[Op]] = [[] for _ in range(world_size)]
    events: list[tuple[float, int, int]] = []  # (time, 0 an operation becomes ready or 1 it ends, task)
    for number, count in enumerate(waits):
        if not count:
            heappush(events, (0.0, 0, number))
    known_s = [0.0] * len(tasks)
    while events:
        now_s = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now_s:
            _, is_done, number = heappop(events)
            task = tasks[number]
            touched.add(task.rank)
            if not is_done:
                heappush(ready[task.rank], (task.priority, number))
                continue
            is_free[task.rank] = True
            for value in task.op.writes:
                for reader in readers.get(value, ()):
                    reader_rank = tasks[reader].rank
                    arrives_s = (
                        now_s
                        if reader_rank == task.rank
                        else now_s + seconds(task.rank, send(value, task.rank, reader_rank))
                    )
                    known_s[reader] = max(known_s[reader], arrives_s)
                    waits[reader] -= 1
                    if not waits[reader]:
                        heappush(events, (known_s[reader], 0, reader))
        for rank in touched:
            if is_free[rank] and ready[rank]:
                number = heappop(ready[rank])[1]
                listed[rank].append(tasks[number].op)
                is_free[rank] = False
                heappush(events, (now_s + seconds(rank, tasks[number].op), 1, number))
    outputs = tuple(
        tuple(value for op in rank_ops for value in op.writes if value.name == "loss") for rank_ops in listed
    )
    return Schedule(ops=tuple(map(tuple, listed)), outputs=outputs)
