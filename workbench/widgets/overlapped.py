"""What overlap is worth in one layer: its operations alone, its transfers alone, and both together, simulated (Galaxy+, section III-D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, PieceCost, StackCosts
from workbench.core.program import Program
from workbench.core.spread import Spread
from workbench.plots import OverlapCell
from workbench.schedules.inference import MESSAGE_S, InferenceCosts, InferenceLayout, inference_schedule
from workbench.simulator import simulate
from workbench.widgets.inference_problem import InferenceProblem
from workbench.widgets.variations import with_bandwidth

FEW, MORE = 3, 7
"""Layers of the two models whose difference is the time of a layer, without what only the first and the last one do."""


def overlap_cells(problem: InferenceProblem, plan: InferencePlan, megabits_per_s: Sequence[float]) -> tuple[OverlapCell, ...]:
    """Return a layer of the plan's first scheme at each bandwidth: computation alone (links that take no time), communication alone
    (operations that take none), and both.
    """
    found = []
    for megabit_per_s in megabits_per_s:
        cluster = with_bandwidth(problem.cluster, megabit_per_s)
        free = _without_latency(with_bandwidth(problem.cluster, 1e12))
        idle = replace(problem.profile, costs=tuple(tuple(_nothing(one) for one in row) for row in problem.profile.costs))
        found.append(
            OverlapCell(
                f"{megabit_per_s:g} Mbit/s",
                _layer(plan, problem.profile, free, problem.lengths, 0.0),
                _layer(plan, idle, cluster, problem.lengths, MESSAGE_S),
                _layer(plan, problem.profile, cluster, problem.lengths, MESSAGE_S),
            )
        )
    return tuple(found)


def _layer(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: tuple[int, ...], message_s: float) -> Spread:
    seconds = []
    for count in (FEW, MORE):
        stacks = tuple(replace(stack, num_layers=count) for stack in profile.stacks)
        made = replace(plan, schemes=plan.schemes[:1] * (count * len(stacks)))
        layout = InferenceLayout.build(made, stacks, lengths)
        costs = InferenceCosts(replace(profile, stacks=stacks), cluster, layout, message_s=message_s)
        program = Program.on(cluster, inference_schedule(layout, cluster.world_size), costs)
        seconds.append(simulate(program, memory=False).makespan_s)
    return Spread.exactly((seconds[1] - seconds[0]) / (MORE - FEW))


def _nothing(costs: StackCosts) -> StackCosts:
    return StackCosts(pieces={kind: PieceCost() for kind in costs.pieces})


def _without_latency(cluster: Cluster) -> Cluster:
    return replace(cluster, devices=tuple(replace(one, link=replace(one.link, latency_s=0.0)) for one in cluster.devices))
