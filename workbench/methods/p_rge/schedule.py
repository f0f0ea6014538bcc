"""P-RGE: forward-only fine-tuning with q queries, that is 2q forward parts and 2q scalars (section 3, Algorithm 1 and
2).

Part 2i is query i with its noise added, part 2i + 1 with its noise subtracted.  With query_parts = p, an estimator's
number of parts for each query, query i has the parts from p i on.  Operations: F of one part, STEP.
Values: tokens:_.0; adapter:_._.r the trainable matrix on rank r before the step; loss:_.0.j the loss of part j, a
scalar; update:_._.r the matrix after the step.  Noise is not a value: both F and STEP generate it from the query's
seed.
There is no context.  Ranks exchange only scalars: every rank takes the same step from all of them.
Parts may share a pass (outer and inner loop).  A group of parts has the number of its first part, and so has the vector
of its losses.
In a chain of stages, stage s sends act:s.0.j, its hidden states of group j, to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from workbench.core.errors import ScheduleError
from workbench.core.plan import Stage
from workbench.core.schedule import NONE, STEP, Op, RankList, Schedule, Value
from workbench.schedules.pieces import enclosing_world

Group = tuple[int, ...]


def query_groups(first: int, queries: int, group_queries: int, query_parts: int = 2) -> tuple[Group, ...]:
    """Return all parts of queries [first, first + queries) in groups of `group_queries`; the last has the rest."""
    cuts = [*range(first, first + queries, group_queries), first + queries]
    return tuple(tuple(range(query_parts * start, query_parts * stop)) for start, stop in pairwise(cuts))


def query_step(
    stages: Sequence[Stage], groups: Sequence[Group], *, world_size: int | None = None, query_parts: int = 2
) -> Schedule:
    """Return one step whose parts pass through the stages in groups, without its transfers.

    groups: disjoint, covering all parts.  Each lies within one share of every stage; a stage's shares have consecutive
    queries.
    Raises ScheduleError for groups that do not fit the shares, and if there is no query.
    """
    world_size = enclosing_world((rank for stage in stages for rank in stage.ranks), world_size)
    lists = [RankList() for _ in range(world_size)]
    losses = tuple(Value("loss", NONE, 0, group[0]) for group in groups)
    last = len(stages) - 1
    for number, stage in enumerate(stages):
        label = NONE if last == 0 else number
        owners = _owners(stage, groups, query_parts)
        for share in stage.shares:
            adapter, tokens = Value("adapter", NONE, NONE, share.rank), Value("tokens", NONE, 0)
            listed = lists[share.rank]
            listed.inputs = [tokens, adapter]
            for group, owner, loss in zip(groups, owners, losses, strict=True):
                if owner != share.rank:
                    continue
                arriving = () if number == 0 else (Value("act", number - 1, 0, group[0]),)
                leaving = loss if number == last else Value("act", number, 0, group[0])
                listed.ops.append(Op("F", label, 0, group[0], (tokens, adapter, *arriving), (leaving,)))
                if number == last:
                    listed.outputs.append(loss)
            updated = Value("update", NONE, NONE, share.rank)
            listed.ops.append(Op(STEP, NONE, NONE, NONE, (adapter, *losses), (updated,)))
            listed.outputs.append(updated)
    return Schedule.of(lists)


def _owners(stage: Stage, groups: Sequence[Group], query_parts: int) -> list[int]:
    """Return the rank of a stage that computes each group."""
    rank_of: list[int] = []
    for share in stage.shares:
        rank_of += [share.rank] * (query_parts * share.queries)
    if not rank_of:
        raise ScheduleError(
            "A step of queries was asked for.", "The shares have none.", "Give a rank at least one query."
        )
    if sorted(part for group in groups for part in group) != list(range(len(rank_of))):
        raise ScheduleError(
            f"A step of {len(rank_of)} parts was asked for.",
            f"Its groups are {list(groups)}.",
            "Let the groups hold every part once.",
        )
    for group in groups:
        if len({rank_of[part] for part in group}) > 1:
            raise ScheduleError(
                f"The parts {group} were asked for in one pass.",
                f"They belong to ranks {sorted({rank_of[part] for part in group})} of one stage.",
                "Cut the group where the shares are cut.",
            )
    return [rank_of[group[0]] for group in groups]
