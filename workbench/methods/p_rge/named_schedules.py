"""P-RGE's schedules by name, each built from a few integers (see schedules.published)."""

from __future__ import annotations

from workbench.core.plan import Share, Stage
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Schedule
from workbench.methods.p_rge.schedule import query_groups, query_step
from workbench.schedules.published import Published


def _divided(ranks: int = 4, queries: int = 8) -> Schedule:
    counts = proportional_parts(queries, (1,) * ranks)
    shares = tuple(Share(rank=rank, queries=count) for rank, count in enumerate(counts) if count)
    return query_step((Stage(start=0, stop=1, shares=shares),), [(part,) for part in range(2 * queries)])


def _chain(ranks: int = 4, queries: int = 8, queries_per_group: int = 1) -> Schedule:
    stages = tuple(
        Stage(start=number, stop=number + 1, shares=(Share(rank=number, queries=queries),)) for number in range(ranks)
    )
    return query_step(stages, query_groups(0, queries, queries_per_group))


SCHEDULES = {
    "query_step": Published("P-RGE: a step's queries divided among the devices (Algorithm 1)", _divided),
    "query_chain": Published("P-RGE: a step's queries one after the other through a chain of stages", _chain),
}
