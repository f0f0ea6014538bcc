"""Planning problems that can be changed and solved again, for the planner widgets (PAC+, section V-A, Algorithm 1).

And the division of a step's queries among devices, by the planner or by hand (our extension of P-RGE, Algorithm 1, line
4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.proportions import proportional_parts
from workbench.methods.base import ignore
from workbench.methods.p_rge.method import PRGE
from workbench.methods.p_rge.queries import plan_queries
from workbench.methods.p_rge.query_costs import full_model_costs
from workbench.planners import (
    Problem,
    TrainingProblem,
    candidates,
    data_parallel,
    fixed_plan,
    homogeneous,
    pipeline_parallel,
    plan,
    refine,
    standalone,
)
from workbench.planners.fixed import Dispatch
from workbench.planners.memory import Need, plan_needs, stage_demand, too_small
from workbench.plots.breakdown import stacked_bars
from workbench.plots.style import time_unit
from workbench.profiler.analytic import analytic_profile
from workbench.simulator.steps import step_s
from workbench.widgets.controls import button, slider
from workbench.widgets.explorer import Explorer

MAX_SIMULATIONS = 60
"""Steps that `simulated and refined` may simulate: a slider's answer must not take longer than a moment."""
TOKENS = 128
"""Tokens of a sample at the paper's scale."""


def costs_on(profiled: Cluster, cluster: Cluster, costs: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Return the costs on each device of a cluster: those of the profiled device of its name, scaled if it is slower or
    faster now.

    Raises ConfigError for a device that was not profiled.
    """
    before = {device.name: rank for rank, device in enumerate(profiled.devices)}
    unknown = [device.name for device in cluster.devices if device.name not in before]
    if unknown:
        raise ConfigError(
            f"The problem on cluster '{cluster.name}' was asked for.",
            f"There are no layer times for {', '.join(unknown)}, only for {', '.join(before)}.",
            "Profile that cluster.",
        )
    layers = []
    for device in cluster.devices:
        rank = before[device.name]
        factor = profiled.devices[rank].flops_per_s / device.flops_per_s
        layers.append(costs[rank] if factor == 1.0 else tuple(layer.scaled(factor) for layer in costs[rank]))
    return tuple(layers)


def on(problem: Problem[Any], cluster: Cluster) -> Problem[Any]:
    """Return the problem on the same devices with other speeds, memory or links; a profile's times scale with the
    speed.

    Raises ConfigError for a cluster of other devices.
    """
    rows = "layers" if isinstance(problem.profile, Profile) else "costs"
    costs = costs_on(problem.cluster, cluster, getattr(problem.profile, rows))
    return replace(problem, cluster=cluster, profile=replace(problem.profile, **{rows: costs}))


def by_hand(
    problem: TrainingProblem, layers: Sequence[int], groups: Sequence[Sequence[int]], *, dispatch: Dispatch = "speed"
) -> Plan:
    """Return the plan of layers[i] layers on the ranks groups[i], whether it fits or not.  Raises ConfigError for an
    invalid plan.
    """
    return fixed_plan(problem, layers=layers, groups=groups, dispatch=dispatch, check_memory=False)


def needs_of(problem: TrainingProblem, plan: Plan) -> dict[int, Need]:
    """Return the bytes that each rank of a plan needs."""
    return plan_needs(problem.profile, plan, sequence_length=problem.longest)


def refusals(problem: TrainingProblem, plan: Plan) -> tuple[PlanError, ...]:
    """Return an error for each device whose budget a plan exceeds, worst first, naming device, stage and bytes."""
    needs = needs_of(problem, plan)
    over = {rank: need.total_bytes - problem.cluster.devices[rank].memory_bytes for rank, need in needs.items()}
    errors = []
    for rank in sorted((rank for rank, excess in over.items() if excess > 0), key=lambda rank: -over[rank]):
        index = plan.stage_of(rank)
        assert index is not None
        errors.append(too_small(problem.cluster, stage_demand(rank, f"stage {index}", plan.stages[index], needs[rank])))
    return tuple(errors)


def with_bandwidth(cluster: Cluster, megabit_per_s: float) -> Cluster:
    """Return the cluster with every link at megabit_per_s; the same object if its links already are."""
    if not cluster.pairs and all(device.link.mbit_per_s == megabit_per_s for device in cluster.devices):
        return cluster
    return replace(cluster.with_bandwidth(megabit_per_s), name=f"{cluster.name}-{megabit_per_s:g}-mbit")


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """Return the cluster with memory_bytes on every device."""
    return replace(cluster, name=f"{cluster.name}-other-memory").with_devices(memory_bytes=memory_bytes)


def as_described(cluster: Cluster) -> Cluster:
    """Return the cluster with devices that are only simulated, so that their speed comes from the catalogue."""
    return cluster.with_devices(host_share=None)


def on_this_computer(cluster: Cluster) -> Cluster:
    """Return a cluster whose devices are emulated: itself, or for real devices as many with the same links."""
    return cluster.emulated(round(1 / cluster.world_size, 2)) if cluster.is_real else cluster


def paper_problem(model: str, cluster: Cluster) -> TrainingProblem:
    """Return a problem at the paper's scale: a model of profiler.descriptions on catalogue devices, with computed, not
    measured, costs.
    """
    described = as_described(cluster)
    profile = analytic_profile(model, described, sequence_lengths=(TOKENS,))
    return Problem(profile, described, batch_size=16, micro_batches=4, sequence_length=TOKENS)


def problem_of(job: Job, cluster: Cluster, profile: Profile) -> TrainingProblem:
    """Return the problem of a job's mini-batches."""
    return Problem(
        profile,
        cluster,
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        sequence_length=job.max_length,
    )


PLANNERS: dict[str, Callable[[TrainingProblem], Plan]] = {
    "Algorithm 1": partial(plan, cached=False),
    "Algorithm 1, any order": partial(plan, cached=False, order="all", objective="bottleneck"),
    "simulated and refined": lambda problem: refine(
        candidates(problem), problem, partial(step_s, problem), max_prices=MAX_SIMULATIONS
    ),
    "as if all were equal": partial(homogeneous, cached=False),
    "pipeline": pipeline_parallel,
    "data parallel": data_parallel,
    "one device": standalone,
}
"""The planner's variants and the paradigms that are special cases of it (Fig. 9), by the name that the widgets show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One planner's plan, of mini-batches or of a sequence, and the simulated seconds of one; if nothing fits, `why`
    gives the reason.
    """

    planner: str
    plan: Any = None
    seconds: float = 0.0
    why: str = ""

    @property
    def fitting(self) -> Any:
        """Return the plan.  Raises PlanError with the reason if nothing fits."""
        if self.plan is None:
            raise PlanError(self.why)
        return self.plan

    @property
    def samples_per_s(self) -> float:
        """Return the throughput of a plan of mini-batches; 0 if nothing fits."""
        return 0.0 if self.plan is None else self.plan.mini_batch_size / self.seconds


def compare(problem: TrainingProblem, planners: Sequence[str] = tuple(PLANNERS)) -> tuple[Comparison, ...]:
    """Return each planner's result for a problem; a plan that does not fit has a reason."""
    return compared(problem, {name: PLANNERS[name] for name in planners}, partial(step_s, problem))


def compared(
    problem: Any, planners: Mapping[str, Callable[[Any], Any]], seconds: Callable[[Any], float]
) -> tuple[Comparison, ...]:
    """Return what some planners make of a problem.  seconds: returns the time of a plan."""
    comparisons = []
    for name, planner in planners.items():
        try:
            plan = planner(problem)
            comparisons.append(Comparison(planner=name, plan=plan, seconds=seconds(plan)))
        except PlanError as error:
            comparisons.append(Comparison(planner=name, why=str(error)))
    return tuple(comparisons)


def query_counts(problem: TrainingProblem, plan: Plan) -> tuple[int, ...]:
    """Return every device's queries in a plan; in a chain of stages each stage has all queries."""
    counts = [0] * problem.cluster.world_size
    for stage in plan.stages:
        for share in stage.shares:
            counts[share.rank] = share.queries or problem.queries
    return tuple(counts)


def query_seconds(problem: TrainingProblem, counts: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds until each device has sent its losses (all wait for the slowest); infinity if its memory is
    too small.

    Raises ConfigError unless the counts are the step's queries, divided among the devices.
    """
    if len(counts) != problem.cluster.world_size or min(counts) < 0 or sum(counts) != problem.queries:
        raise ConfigError(
            f"Queries {'-'.join(map(str, counts))} were asked for.",
            f"There are {problem.cluster.world_size} devices and {problem.queries} queries.",
            "Give each device a number from 0 on; together they must be all queries.",
        )
    costs = full_model_costs(problem)
    ranks = [rank for rank, count in enumerate(counts) if count]
    seconds = []
    for rank, count in enumerate(counts):
        own_s, passing = costs[rank].best(count) if count else (0.0, None)
        seconds.append(own_s + (costs[rank].told_s(ranks, 2 * passing.queries) if passing else 0.0))
    return tuple(seconds)


def query_step_s(problem: TrainingProblem, counts: Sequence[int]) -> float:
    """Return the seconds of a step with such a division, the update included."""
    costs = full_model_costs(problem)
    update = [costs[rank].noise_s(problem.queries) for rank, count in enumerate(counts) if count]
    return max(query_seconds(problem, counts)) + max(update, default=math.inf)


def query_problem(job: Job, cluster: Cluster) -> TrainingProblem:
    """Return the problem of a job of the method p_rge.  Its costs are measured once on this machine, stored, and scaled
    to the devices.
    """
    method = PRGE()
    prepared = method.prepare(job, ignore)
    profile = method.profile(prepared, cluster, ignore, emulated=not cluster.is_real)
    return prepared.problem(profile, cluster, prepared.setting)


class QueryDivider(Explorer):
    """A slider for each device's queries; shows the computing and the waiting time of each device.

    counts: the sliders' values.  planned: the planner's division, None if the planner takes a chain of stages instead.
    """

    def __init__(self, problem: TrainingProblem, counts: Sequence[int] | None = None) -> None:
        self.problem = problem
        plan = plan_queries(problem)
        self.planned = query_counts(problem, plan) if len(plan.stages) == 1 else None
        self._planned_s = plan.total_s if self.planned is None else query_step_s(problem, self.planned)
        queries, size = problem.queries, problem.cluster.world_size
        equal = proportional_parts(queries, (1,) * size)
        self.sliders = tuple(
            slider(device.name, f"{device.name}: queries of each step", count, 0, queries, width="30em")
            for device, count in zip(problem.cluster.devices, counts or equal, strict=True)
        )
        self.take_plan = button(
            "Planner's division",
            "Set the sliders as the planner has it",
            "magic",
            self._take_plan,
            layout=widgets.Layout(width="14em"),
        )
        self.take_plan.disabled = self.planned is None
        super().__init__(
            [*self.sliders, self.take_plan], self.sliders, lambda: self.counts, self._divide, refused="Not a step yet."
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """Return every device's queries, whether or not they add up to the step's."""
        return tuple(control.value for control in self.sliders)

    def _take_plan(self) -> None:
        assert self.planned is not None
        with self.setting():
            for control, count in zip(self.sliders, self.planned, strict=True):
                control.value = count

    def _divide(self, counts: tuple[int, ...]) -> None:
        problem = self.problem
        seconds = query_seconds(problem, counts)
        names = problem.cluster.names
        too_small = [name for name, taken in zip(names, seconds, strict=True) if math.isinf(taken)]
        if too_small:
            return self.refuse("Out of memory.", f"{', '.join(too_small)}: not enough memory for the model.")
        whole_s = query_step_s(problem, counts)
        unit = time_unit(whole_s)
        waits = [max(seconds) - device_s for device_s in seconds]
        against = f" ({whole_s / self._planned_s - 1:+.1%} against the planner)"
        divided = f"queries {'-'.join(map(str, counts))} on {sum(map(bool, counts))} devices (simulated)"
        self.headline.say(f"{unit.text(whole_s)} a step{against}", divided)
        parts = {
            "its queries": [device_s * unit.factor for device_s in seconds],
            "idle": [device_s * unit.factor for device_s in waits],
        }
        subtitle = f"{problem.profile.model}, q = {problem.queries}, E = {problem.batch_size}"
        title = "Until all losses are known"
        self.show(
            lambda: stacked_bars(names, parts, title=title, label="simulated", x_title=unit.name, subtitle=subtitle)
        )
