"""P-RGE: forward-only fine-tuning with q queries, that is 2q forward parts and as many scalars (section 3, Algorithm 1 and 2).

Part 2i is query i with its noise added, part 2i + 1 with its noise subtracted.  Operations: F of one part, STEP.
Values: tokens:_.0; adapter:_._.r the trainable matrix on rank r before the step; loss:_.0.j the loss of part j, a scalar;
update:_._.r the matrix after it.  Noise is no value: both F and STEP make it from the query's seed.
There is no context, and between ranks travel only scalars: every rank makes the same step from all 2q of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import ScheduleError
from workbench.core.plan import Share
from workbench.core.schedule import NONE, STEP, Op, Schedule, Value
from workbench.schedules.pieces import enclosing_world


def query_step(shares: Sequence[Share], *, world_size: int | None = None) -> Schedule:
    """Return one step of sum(share.queries) queries divided among the shares' ranks, without its transfers.

    A rank takes consecutive queries, both parts of each.  Raises ScheduleError if there is no query.
    """
    num_queries = sum(share.queries for share in shares)
    if num_queries == 0:
        raise ScheduleError("A step of queries was asked for.", "The shares have none.", "Give a rank at least one query.")
    world_size = enclosing_world((share.rank for share in shares), world_size)
    ops: list[tuple[Op, ...]] = [()] * world_size
    inputs: list[tuple[Value, ...]] = [()] * world_size
    outputs: list[tuple[Value, ...]] = [()] * world_size
    losses = tuple(Value("loss", NONE, 0, part) for part in range(2 * num_queries))
    first = 0
    for share in shares:
        adapter, updated = Value("adapter", NONE, NONE, share.rank), Value("update", NONE, NONE, share.rank)
        tokens = Value("tokens", NONE, 0)
        parts = range(2 * first, 2 * (first + share.queries))
        forwards = tuple(Op("F", NONE, 0, part, (tokens, adapter), (losses[part],)) for part in parts)
        ops[share.rank] = (*forwards, Op(STEP, NONE, NONE, NONE, (adapter, *losses), (updated,)))
        inputs[share.rank] = (tokens, adapter)
        outputs[share.rank] = (*(losses[part] for part in parts), updated)
        first += share.queries
    return Schedule(ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs))
