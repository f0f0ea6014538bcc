"""A student's division of queries over devices: what it is given, the plan that it makes, and its time next to others'
(our extension of P-RGE, Algorithm 1, line 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.core.catalogue import MB, load_cluster
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.methods.p_rge.options import METHOD
from workbench.planners import TrainingProblem
from workbench.widgets.tables import Table
from workbench_labs.planning import query_problem, query_seconds, query_step_s, with_memory


def problem_of(job: Job, cluster_name: str, device_mb: int) -> TrainingProblem:
    """Return a job's problem on a cluster whose devices have so much memory for the model; costs are measured."""
    return query_problem(job, with_memory(load_cluster(cluster_name), device_mb * MB))


def linear_costs(problem: TrainingProblem) -> tuple[list[float], list[float]]:
    """Return each device's fixed seconds, and its seconds for a query: a line through one and all queries."""
    size, queries = problem.cluster.world_size, problem.queries
    firsts, each = [], []
    for rank in range(size):
        alone = [queries if other == rank else 0 for other in range(size)]
        all_s = query_seconds(problem, alone)[rank]
        with_one = [1 if other == rank else 0 for other in range(size)]
        with_one[(rank + 1) % size] += queries - 1
        one_s = query_seconds(problem, with_one)[rank]
        query_s = (all_s - one_s) / max(1, queries - 1)
        firsts.append(max(0.0, one_s - query_s))
        each.append(query_s)
    return firsts, each


def divided(problem: TrainingProblem, spread: Callable[..., Any]) -> tuple[int, ...]:
    """Return the counts that a rule gives for a problem's devices."""
    return tuple(int(count) for count in spread(problem.queries, *linear_costs(problem)))


def equal_division(problem: TrainingProblem) -> tuple[int, ...]:
    """Return a division that gives each device as many queries as the others, or one more."""
    size = problem.cluster.world_size
    return tuple(problem.queries // size + (rank < problem.queries % size) for rank in range(size))


def division_plan(problem: TrainingProblem, counts: Sequence[int]) -> Plan:
    """Return the plan in which each device computes so many queries."""
    shares = tuple(Share(rank=rank, queries=count) for rank, count in enumerate(counts) if count)
    return Plan(
        method=METHOD,
        stages=(Stage(start=0, stop=problem.profile.num_layers, shares=shares),),
        micro_batch_size=problem.batch_size,
        num_micro_batches=1,
        predicted_s={"losses": max(query_seconds(problem, counts))},
    )


def division_table(problem: TrainingProblem, divisions: Mapping[str, Sequence[int]]) -> Table:
    """Return the simulated step of each division."""
    rows = [
        (name, "-".join(map(str, counts)), f"{1e3 * query_step_s(problem, counts):.0f}")
        for name, counts in divisions.items()
    ]
    return Table(("division", "queries", "step (ms)"), rows, title="A step of each division (simulated)")
