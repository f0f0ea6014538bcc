"""PAC+'s later epochs: redistribute activation cache and adapters, then train data-parallel from the cache (section V-B, Fig. 11)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.core.errors import ScheduleError
from workbench.core.plan import Stage
from workbench.core.schedule import BROADCAST, NONE, Op, Schedule, Value, recv, send
from workbench.schedules.lowering import insert_allreduce
from workbench.schedules.pieces import enclosing_world


def cached_step(stage: Stage, batch_sizes: Sequence[int], *, world_size: int | None = None) -> Schedule:
    """Return one step from the cache: LOAD, SF, SB on each rank that has samples; ALLREDUCE (if several ranks) and STEP on all.

    batch_sizes: each share's samples, in the order of stage.shares.  LOAD writes the same tap as the backbone's forward pass.
    """
    if len(batch_sizes) != len(stage.shares) or min(batch_sizes) < 0 or sum(batch_sizes) == 0:
        raise ScheduleError(
            f"A cached step of {tuple(batch_sizes)} samples was asked for.",
            f"The plan's cached stage has ranks {stage.ranks}.",
            "Give each of them 0 or more samples, and one of them some.",
        )
    world_size = enclosing_world(stage.ranks, world_size)
    ops: list[tuple[Op, ...]] = [()] * world_size
    inputs: list[tuple[Value, ...]] = [()] * world_size
    outputs: list[tuple[Value, ...]] = [()] * world_size
    for rank, size in zip(stage.ranks, batch_sizes, strict=True):
        tokens, tap, context = Value("tokens", NONE, 0), Value("tap", 0, 0, rank), Value("ctx", 0, 0, rank)
        loss, gradient, adapter = Value("loss", 0, 0, rank), Value("gacc", 0, 0, rank), Value("adapter", 0, NONE, rank)
        trained = (
            Op("LOAD", 0, 0, NONE, (), (tap,)),
            Op("SF", 0, 0, NONE, (tokens, tap), (loss, context)),
            Op("SB", 0, 0, NONE, (context, tap), (gradient,)),
        )
        step = Op("STEP", 0, NONE, NONE, (gradient,) if size else (), (adapter,))
        ops[rank] = (*trained, step) if size else (step,)
        inputs[rank] = (tokens,) if size else ()
        outputs[rank] = (loss, adapter) if size else (adapter,)
    return insert_allreduce(Schedule(ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs)))


def redistribution(transfers: Iterable[tuple[int, int, int]], world_size: int) -> Schedule:
    """Return the SENDs and RECVs that move items of the cache: (source, destination, index) moves the value cache:_.index.

    index: the number of an item, such as one stage's taps of some samples; a destination gets an index once.
    Each rank goes through the destinations in turn, starting with the rank after it.  At any time all senders have different receivers,
    and every link is busy.  A rank receives in the mirrored order.  A transfer from a rank to itself is left out.
    """
    queues: dict[tuple[int, int], list[Value]] = {}
    for source, destination, index in transfers:
        enclosing_world((source, destination), world_size)
        if source != destination:
            queues.setdefault((source, destination), []).append(Value("cache", NONE, index))
    ops: list[list[Op]] = [[] for _ in range(world_size)]
    inputs: list[dict[Value, None]] = [{} for _ in range(world_size)]
    outputs: list[list[Value]] = [[] for _ in range(world_size)]
    rounds = max(map(len, queues.values()), default=0)
    # In turn t of a round, rank r sends to r + t and receives from r - t.
    turns = sorted(queues, key=lambda channel: (channel[1] - channel[0]) % world_size)
    for number in range(rounds):
        for source, destination in turns:
            queue = queues[source, destination]
            if number < len(queue):
                ops[source].append(send(queue[number], source, destination))
                ops[destination].append(recv(queue[number], source, destination))
                inputs[source][queue[number]] = None
                outputs[destination].append(queue[number])
    return Schedule(ops=tuple(map(tuple, ops)), inputs=tuple(map(tuple, inputs)), outputs=tuple(map(tuple, outputs)))


def adapter_broadcast(stages: Sequence[Stage], ranks: Sequence[int], *, world_size: int | None = None) -> Schedule:
    """Return the BROADCASTs that send every stage's adapters to all of `ranks`, one per stage, in the stages' order.

    The root is the first rank of the stage's group; the others of the group have its replica and take no part.  The root reads
    adapter:s._.root; member r writes adapter:s._.r.  Afterwards each of `ranks` has every stage's adapter.
    """
    world_size = enclosing_world((*ranks, *(rank for stage in stages for rank in stage.ranks)), world_size)
    ops: list[list[Op]] = [[] for _ in range(world_size)]
    inputs: list[list[Value]] = [[] for _ in range(world_size)]
    outputs: list[list[Value]] = [[] for _ in range(world_size)]
    for number, stage in enumerate(stages):
        root = stage.ranks[0]
        others = tuple(rank for rank in sorted(ranks) if rank not in stage.ranks)
        for rank in stage.ranks:
            inputs[rank].append(Value("adapter", number, NONE, rank))
        for rank in ranks:
            outputs[rank].append(Value("adapter", number, NONE, rank))
        if not others:
            continue
        for rank in (root, *others):
            own = (Value("adapter", number, NONE, rank),)
            reads, writes = (own, ()) if rank == root else ((), own)
            ops[rank].append(Op(BROADCAST, number, NONE, NONE, reads, writes, (root, *others), "collective"))
    return Schedule(ops=tuple(map(tuple, ops)), inputs=tuple(map(tuple, inputs)), outputs=tuple(map(tuple, outputs)))
