"""The division of a step's queries among devices, by the planner or by hand, and its time (our extension of P-RGE, Algorithm 1, line 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.base import ignore
from workbench.methods.p_rge.method import PRGE
from workbench.planners.queries import plan_queries
from workbench.planners.query_costs import StepSize, whole
from workbench.plots.breakdown import stacked_bars
from workbench.plots.style import time_unit
from workbench.widgets.controls import BIG_FIRST, button, slider
from workbench.widgets.explorer import Explorer


@dataclass(frozen=True, kw_only=True)
class QueryProblem:
    """One step on a cluster: its size, and the cost of its parts on that cluster."""

    profile: Profile
    cluster: Cluster
    size: StepSize

    def planned(self) -> Plan:
        """Return the planner's division.  Raises PlanError, naming device and bytes, if nothing fits."""
        return plan_queries(self.profile, self.cluster, self.size)

    def counts(self, made: Plan) -> tuple[int, ...]:
        """Return every device's queries in a plan; in a chain of stages each stage has all queries."""
        found = [0] * self.cluster.world_size
        for stage in made.stages:
            for share in stage.shares:
                found[share.rank] = share.queries or self.size.queries
        return tuple(found)

    def divided(self, counts: Sequence[int]) -> Plan:
        """Return the plan with these numbers of queries.  Raises ConfigError unless they add up to the step's queries."""
        if len(counts) != self.cluster.world_size or min(counts) < 0 or sum(counts) != self.size.queries:
            raise ConfigError(
                f"Queries {'-'.join(map(str, counts))} were asked for.",
                f"There are {self.cluster.world_size} devices and {self.size.queries} queries.",
                "Give each device a number from 0 on; together they must be all queries.",
            )
        shares = tuple(Share(rank=rank, queries=count) for rank, count in enumerate(counts) if count)
        stage = Stage(start=0, stop=self.profile.num_layers, shares=shares)
        return Plan(method="p_rge", stages=(stage,), micro_batch_size=self.size.batch_size, num_micro_batches=1)

    def device_seconds(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds until each device has sent its losses (all wait for the slowest); infinity if its memory is too small."""
        costs = whole(self.profile, self.cluster, self.size)
        ranks = [rank for rank, count in enumerate(counts) if count]
        found = []
        for rank, count in enumerate(counts):
            seconds, passing = costs[rank].best(count) if count else (0.0, None)
            found.append(seconds + (costs[rank].told_s(ranks, 2 * passing.queries) if passing else 0.0))
        return tuple(found)

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the seconds of a step with such a division, the update included."""
        costs = whole(self.profile, self.cluster, self.size)
        update = [costs[rank].noise_s(self.size.queries) for rank, count in enumerate(counts) if count]
        return max(self.device_seconds(counts)) + max(update, default=math.inf)


def query_problem(job: Job, cluster: Cluster) -> QueryProblem:
    """Return the problem of a job of the method p_rge; its costs are measured on this machine once, kept, and scaled to the devices."""
    method = PRGE()
    prepared = method.prepare(job, ignore)
    profile = method.profile(prepared, cluster, ignore, emulated=not cluster.is_real)
    return QueryProblem(profile=profile, cluster=cluster, size=prepared.size(prepared.setting))


class QueryDivider(Explorer):
    """A slider for each device's queries; shows the computing and the waiting time of each device.

    counts: the sliders' values.  planned: the planner's division, None if the planner takes a chain of stages instead.
    """

    def __init__(self, problem: QueryProblem, counts: Sequence[int] | None = None) -> None:
        self.problem = problem
        made = problem.planned()
        self.planned = problem.counts(made) if len(made.stages) == 1 else None
        self._planned_s = made.total_s if self.planned is None else problem.seconds(self.planned)
        queries, size = problem.size.queries, problem.cluster.world_size
        equal = [queries // size + (rank < queries % size) for rank in range(size)]
        self.sliders = tuple(
            slider(device.name, f"{device.name}: queries of each step", count, 0, queries, width="30em")
            for device, count in zip(problem.cluster.devices, counts or equal, strict=True)
        )
        self.take_plan = button(
            "Planner's division", "Set the sliders as the planner has it", "magic", self._take_plan, layout=widgets.Layout(width="14em")
        )
        self.take_plan.disabled = self.planned is None
        super().__init__([*self.sliders, self.take_plan], self.sliders, lambda: self.counts, self._divide, refused="Not a step yet.")

    @property
    def counts(self) -> tuple[int, ...]:
        """Return every device's queries, whether or not they add up to the step's."""
        return tuple(one.value for one in self.sliders)

    def _take_plan(self) -> None:
        assert self.planned is not None
        with self.setting():
            for one, count in zip(self.sliders, self.planned, strict=True):
                one.value = count

    def _divide(self, counts: tuple[int, ...]) -> None:
        problem = self.problem
        problem.divided(counts)  # refuses an invalid division
        seconds = problem.device_seconds(counts)
        names = [device.name for device in problem.cluster.devices]
        lacking = [name for name, taken in zip(names, seconds, strict=True) if math.isinf(taken)]
        if lacking:
            return self.refuse("Out of memory.", f"{', '.join(lacking)}: not enough memory for the model.")
        whole_s = problem.seconds(counts)
        unit = time_unit(whole_s)
        waits = [max(seconds) - one for one in seconds]
        against = f" ({whole_s / self._planned_s - 1:+.1%} against the planner)"
        divided = f"queries {'-'.join(map(str, counts))} on {sum(map(bool, counts))} devices (simulated)"
        self.headline.value = BIG_FIRST.format(f"{unit.text(whole_s)} a step{against}", divided)
        parts = {"its queries": [one * unit.factor for one in seconds], "waiting": [one * unit.factor for one in waits]}
        subtitle = f"{problem.profile.model}, q = {problem.size.queries}, E = {problem.size.batch_size}"
        title = "Until all losses are known"
        self.show(lambda: stacked_bars(names, parts, title=title, label="simulated", x_title=unit.name, subtitle=subtitle))
