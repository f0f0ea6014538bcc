"""Who computes how many queries of a step: what widgets and exercises ask of planner and prices (our extension of P-RGE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.base import ignore
from workbench.methods.p_rge.method import PRGE
from workbench.planners.queries import plan_queries
from workbench.planners.query_costs import StepSize, whole


@dataclass(frozen=True, kw_only=True)
class QueryProblem:
    """One step on a cluster: what its parts cost there, and how large it is."""

    profile: Profile
    cluster: Cluster
    size: StepSize

    def planned(self) -> Plan:
        """Return the planner's division.  Raises PlanError, naming device and bytes, if nothing fits."""
        return plan_queries(self.profile, self.cluster, self.size)

    def counts(self, made: Plan) -> tuple[int, ...]:
        """Return every device's queries in a plan; along a chain of stages each stage has all."""
        found = [0] * self.cluster.world_size
        for stage in made.stages:
            for share in stage.shares:
                found[share.rank] = share.queries or self.size.queries
        return tuple(found)

    def divided(self, counts: Sequence[int]) -> Plan:
        """Return the plan in which each device takes so many queries.  Raises ConfigError unless they are all of the step's."""
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
        """Return the seconds until each device has told its losses, the slowest of which all wait for; infinity where memory lacks."""
        costs = whole(self.profile, self.cluster, self.size)
        ranks = [rank for rank, count in enumerate(counts) if count]
        found = []
        for rank, count in enumerate(counts):
            seconds, passing = costs[rank].best(count) if count else (0.0, None)
            found.append(seconds + (costs[rank].told_s(ranks, 2 * passing.queries) if passing else 0.0))
        return tuple(found)

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the seconds of a step under such a division, the update included."""
        costs = whole(self.profile, self.cluster, self.size)
        update = [costs[rank].noise_s(self.size.queries) for rank, count in enumerate(counts) if count]
        return max(self.device_seconds(counts)) + max(update, default=math.inf)


def query_problem(job: Job, cluster: Cluster) -> QueryProblem:
    """Return the problem of a job of the method p_rge on emulated devices, with costs that this machine measures once and keeps."""
    method = PRGE()
    prepared = method.prepare(job, ignore)
    profile = method.profile(prepared, cluster, ignore, emulated=True)
    return QueryProblem(profile=profile, cluster=cluster, size=prepared.size(prepared.setting))
