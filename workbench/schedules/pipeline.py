"""Synchronous pipelines: GPipe (Huang et al., 2019), 1F1B (PipeDream-flush; Narayanan et al., 2021), and PAC+'s with
device groups.

Operations: F forward (on the last stage with the loss), B backward, STEP; ALLREDUCE where a stage has several ranks.
Values: act:s.m.p a piece of stage s's output; grad:s.m.p a piece of the gradient with respect to stage s's input;
ctx:s.m.r the autograd context on rank r; gacc:s.m.r the token of an accumulated gradient; loss:s.m.r; weight:s._.r the
new weights.

hybrid_1f1b, PAC+'s first epoch, is 1F1B of device groups with data parallelism inside (section V-A, Fig. 10): F
backbone forward, SF side-network forward (on the last stage with head and loss), SB side-network backward, ALLREDUCE of
the adapters' gradients inside a group, STEP.  The frozen backbone has no backward.  Other values: side:s.m.p side
output, sgrad:s.m.p the gradient with respect to the side input of stage s (p: the piece at the boundary); on rank r:
tap:s.m.r the backbone activations that the side network reads, ctx without the tap, gsum:s._.r the sum of gradients,
adapter:s._.r the new adapters.

backpropagation (PAC+, section VI-A) goes back through the backbone.  Where stages hold copies of one parameter (an
encoder-decoder's word embedding, T5's position tables) the first rank of each such stage SHAREs the gradient that its
group has summed with every other rank that holds a copy, and their STEP adds them up: shared:s._.p is stage s's
gradient of the shared parameter p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan, Stage
from workbench.core.schedule import NONE, STEP, Op, RankList, Schedule, Value, paused_collector
from workbench.schedules.lowering import insert_allreduce
from workbench.schedules.pieces import Portion, divide, world_size_of
from workbench.schedules.recomputation import recompute

FORWARD = "F"
BACKWARD = "B"
Slot = tuple[str, int]  # (FORWARD or BACKWARD, micro-batch)
Build = Callable[[int, int, Portion], tuple[Op, ...]]  # of (stage, micro-batch, portion)
Order = Callable[[int, int, int], list[Slot]]  # of (stages, stage, micro-batches)
OrderName = Literal["1f1b", "gpipe", "asynchronous_1f1b"]


def gpipe_order(num_stages: int, stage: int, num_micro_batches: int) -> list[Slot]:
    """Return all forwards, then all backwards."""
    micro_batches = range(num_micro_batches)
    return [(FORWARD, m) for m in micro_batches] + [(BACKWARD, m) for m in micro_batches]


def one_f_one_b_order(num_stages: int, stage: int, num_micro_batches: int) -> list[Slot]:
    """Return warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    return in_flight_order(num_stages - stage - 1, num_micro_batches)


def in_flight_order(delay: int, num_micro_batches: int, *, num_begun: int = 0, ahead: int = 0) -> list[Slot]:
    """Return 1F1B's order on a stage with at most `delay` + 1 micro-batches between forward and backward.

    num_begun: number of micro-batches whose forward passes are done.  ahead: number of following ones of which only the
    forward passes run.
    """
    slots: list[Slot] = []
    for m in range(num_micro_batches):
        stop = min(m + delay + 1, num_micro_batches + ahead)
        slots += [*((FORWARD, later) for later in range(num_begun, stop)), (BACKWARD, m)]
        num_begun = max(num_begun, stop)
    return slots


ORDERS: Mapping[str, Order] = {"1f1b": one_f_one_b_order, "gpipe": gpipe_order}
"""The orders in which a stage computes a mini-batch; GPipe's is what PAC+'s section VI-D calls 1F1B disabled.

'asynchronous_1f1b' has no order of micro-batches: see hetpipe.py.
"""


@paused_collector()
def assemble(
    plan: Plan,
    micro_batch_sizes: Sequence[int],
    order: Order,
    forward: Build,
    backward: Build,
    *,
    trained: str,
    world_size: int | None = None,
) -> Schedule:
    """Return a mini-batch: on each rank its slots' operations in order, then STEP, with ALLREDUCE in groups of several
    ranks.

    A rank that gets no samples of a micro-batch takes no part in it.  trained: the name of the value that STEP writes.
    Raises ScheduleError for a plan without stages, a rank with two shares, or an empty micro-batch.
    """
    sizes = tuple(micro_batch_sizes)
    world_size = world_size_of(plan, world_size, sizes)
    divisions = {size: divide(plan.stages, size) for size in set(sizes)}
    lists = [RankList() for _ in range(world_size)]
    last = len(plan.stages) - 1
    for number, stage in enumerate(plan.stages):
        portions: dict[int, list[Portion | None]] = {rank: [None] * len(sizes) for rank in stage.ranks}
        for m, size in enumerate(sizes):
            for portion in divisions[size][number]:
                portions[portion.rank][m] = portion
        slots = order(len(plan.stages), number, len(sizes))
        for rank in stage.ranks:
            listed = lists[rank]
            for phase, m in slots:
                rank_portion = portions[rank][m]
                if rank_portion is not None:
                    listed.ops += (forward if phase == FORWARD else backward)(number, m, rank_portion)
            present = [m for m, portion in enumerate(portions[rank]) if portion is not None]
            stepped = Value(trained, number, NONE, rank)
            listed.ops.append(
                Op("STEP", number, NONE, NONE, tuple(Value("gacc", number, m, rank) for m in present), (stepped,))
            )
            listed.inputs = [Value("tokens", NONE, m) for m in present]
            losses = [Value("loss", number, m, rank) for m in present] if number == last else []
            listed.outputs = [*losses, stepped]
    return insert_allreduce(Schedule.of(lists))


SHARE = "SHARE"


def backpropagation(
    plan: Plan,
    micro_batch_sizes: Sequence[int],
    *,
    shared: Sequence[Sequence[int]] = (),
    world_size: int | None = None,
    order: Order = one_f_one_b_order,
) -> Schedule:
    """Return one mini-batch without its transfers, by 1F1B if no other order is given.  Stages recompute their
    activations if the plan says so.

    shared[p]: the stages, two or more, that hold copies of parameter p.
    With 1F1B stage s of p keeps at most p - s contexts.  With GPipe's order every context lives until the backwards
    begin.
    Raises ScheduleError for a plan without stages, a rank with two shares, or an empty micro-batch.
    """
    last = len(plan.stages) - 1

    def forward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        reads = (Value("tokens", NONE, m), *(Value("act", stage - 1, m, p) for p in portion.pieces_in))
        ends = (
            (Value("loss", stage, m, portion.rank),)
            if stage == last
            else tuple(Value("act", stage, m, p) for p in portion.pieces_out)
        )
        return (Op("F", stage, m, NONE, reads, (*ends, Value("ctx", stage, m, portion.rank))),)

    def backward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        reads = (Value("ctx", stage, m, portion.rank), *(Value("grad", stage + 1, m, p) for p in portion.pieces_out))
        writes = (*(Value("grad", stage, m, p) for p in portion.pieces_in), Value("gacc", stage, m, portion.rank))
        return (Op("B", stage, m, NONE, reads, writes),)

    schedule = assemble(plan, micro_batch_sizes, order, forward, backward, trained="weight", world_size=world_size)
    schedule = recompute(schedule, plan)
    if not shared:
        return schedule
    complete = list(schedule.ops)
    for number, stage in enumerate(plan.stages):
        shared_here = [(parameter, stages) for parameter, stages in enumerate(shared) if number in stages]
        sent_values = [Value("shared", number, NONE, parameter) for parameter, _ in shared_here]
        received_values = tuple(
            Value("shared", other, NONE, parameter)
            for parameter, stages in shared_here
            for other in stages
            if other != number
        )
        for rank in stage.ranks:
            *before, step = complete[rank]
            assert step.kind == STEP, f"{step.label} ends rank {rank}"
            shares = (
                [Op(SHARE, number, NONE, value.part, step.reads, (value,)) for value in sent_values]
                if rank == stage.ranks[0]
                else []
            )
            complete[rank] = (*before, *shares, step._replace(reads=(*step.reads, *received_values)))
    return replace(schedule, ops=tuple(complete))


def hybrid_1f1b(
    plan: Plan,
    micro_batch_sizes: Sequence[int],
    *,
    world_size: int | None = None,
    order: Order = one_f_one_b_order,
) -> Schedule:
    """Return one mini-batch of the first epoch, without its transfers.

    A tap lives until SB, which needs it for the gradient of the down-projections.
    Raises ScheduleError for a plan without stages, a rank with two shares, or an empty micro-batch.
    """
    last = len(plan.stages) - 1

    def forward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        tokens, tap = Value("tokens", NONE, m), Value("tap", stage, m, portion.rank)
        backbone_in = (Value("act", stage - 1, m, p) for p in portion.pieces_in)
        backbone_out = (Value("act", stage, m, p) for p in portion.pieces_out)
        side_in = (Value("side", stage - 1, m, p) for p in portion.pieces_in)
        side_out = (Value("side", stage, m, p) for p in portion.pieces_out)
        loss = (Value("loss", stage, m, portion.rank),) if stage == last else ()
        return (
            Op("F", stage, m, NONE, (tokens, *backbone_in), (*backbone_out, tap)),
            Op("SF", stage, m, NONE, (tokens, tap, *side_in), (*side_out, *loss, Value("ctx", stage, m, portion.rank))),
        )

    def backward(stage: int, m: int, portion: Portion) -> tuple[Op, ...]:
        gradients_in = (Value("sgrad", stage + 1, m, p) for p in portion.pieces_out)
        gradients_out = (Value("sgrad", stage, m, p) for p in portion.pieces_in)
        reads = (Value("ctx", stage, m, portion.rank), Value("tap", stage, m, portion.rank), *gradients_in)
        return (Op("SB", stage, m, NONE, reads, (*gradients_out, Value("gacc", stage, m, portion.rank))),)

    return assemble(plan, micro_batch_sizes, order, forward, backward, trained="adapter", world_size=world_size)


def cached_step(stage: Stage, batch_sizes: Sequence[int], *, world_size: int | None = None) -> Schedule:
    """Return one step from the cache: LOAD, SF, SB on each rank that has samples; ALLREDUCE (if several ranks) and STEP
    on all.

    batch_sizes: each share's samples, in the order of stage.shares.  LOAD takes the place of the backbone's forward
    pass and writes the same tap.
    """
    if len(batch_sizes) != len(stage.shares) or min(batch_sizes) < 0 or sum(batch_sizes) == 0:
        raise ScheduleError(
            f"A cached step of {tuple(batch_sizes)} samples was asked for.",
            f"The plan's cached stage has ranks {stage.ranks}.",
            "Give each of them 0 or more samples, and one of them some.",
        )
    shares = tuple(replace(share, samples=size) for share, size in zip(stage.shares, batch_sizes, strict=True))
    size = sum(batch_sizes)
    plan = Plan(method="cached", stages=(replace(stage, shares=shares),), micro_batch_size=size, num_micro_batches=1)
    first_epoch = hybrid_1f1b(plan, (size,), world_size=world_size)
    ops = (
        tuple(op._replace(kind="LOAD", reads=()) if op.kind == FORWARD else op for op in listed)
        for listed in first_epoch.ops
    )
    return replace(first_epoch, ops=tuple(ops))
