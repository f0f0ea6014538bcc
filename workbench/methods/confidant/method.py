"""Confidant as a Method: its partition of the layers (section 3.2); model, operations and training are those of fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.methods.confidant.prepare import ConfidantOptions, prepare, require_known
from workbench.methods.fine_tuning.method import FineTuning, stage_costs
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.planners.confidant import (
    StageCosts,
    asynchronous_plan,
    compatibilities,
    even_partition,
    partition_in_order,
    plan_asynchronous,
    printed_need,
)
from workbench.planners.memory import readable


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan.  Raises PlanError, naming what does not fit where and by how much."""
    assert isinstance(prepared.options, ConfidantOptions)
    train = range(min(prepared.options.devices or cluster.world_size, cluster.world_size))
    profile, cluster = profile.part(train), cluster.part(train)
    costs, partition = stage_costs(prepared, profile, cluster), prepared.options.partition
    if partition in ("memory_aware", "any_order"):
        plan = plan_asynchronous(costs, searches=partition == "any_order", method="confidant")
    else:
        order = tuple(range(cluster.world_size))[: profile.num_layers]
        found = even_partition(costs, order) if partition == "even" else partition_in_order(costs, order, in_memory=False)
        plan = asynchronous_plan(costs, found, method="confidant")
    return replace(plan, notes=(*plan.notes, *memory_notes(prepared, costs, plan)))


def memory_notes(prepared: PreparedJob, costs: StageCosts, plan: Plan) -> Iterator[str]:
    """Yield what each device needs by the measured model, and by Eq. 1 and 2 as printed."""
    facts, last = prepared.facts, len(plan.stages) - 1
    for number, stage in enumerate(plan.stages):
        [rank] = stage.ranks
        behind = last - number
        need = costs.need(rank, behind, stage.start, stage.stop)
        printed = printed_need(
            need,
            num_layers=stage.num_layers,
            behind=behind,
            heads=facts.num_heads,
            batch=costs.batch_size,
            tokens=costs.memory_length,
            hidden=facts.hidden_size,
            feed_forward=facts.feed_forward_size,
        )
        device, off = costs.cluster.devices[rank], printed / need.total_bytes - 1
        yield (
            f"Memory of {device.name} (stashed versions of its weights: {behind}):"
            f" {readable(need.total_bytes)} by the measured model,"
            f" {readable(printed)} by Eq. 1 and 2 as printed ({off:+.0%})."
        )


def stand_in(
    prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, rank: int, idle: Sequence[int], left: float
) -> int | None:
    """Return the idle device that is most compatible by Eq. 4 of those in whose memory the stage of `rank` fits; None if there is none."""
    index = plan.stage_of(rank)
    assert index is not None
    costs, stage, behind = stage_costs(prepared, profile, cluster), plan.stages[index], len(plan.stages) - 1 - index
    fitting = [one for one in idle if costs.stage(one, behind)[stage.start, stage.stop] < math.inf]
    capacities = [costs.stage(one, 0, in_memory=False)[0, 1:] for one in fitting]
    scores = compatibilities(capacities, [cluster.devices[one].battery for one in fitting], left)
    return max(zip(scores, fitting, strict=True), key=lambda pair: pair[0])[1] if fitting else None


class Confidant(FineTuning):
    """Fine-tuning in an asynchronous pipeline over unlike devices."""

    name = "confidant"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    stand_in = staticmethod(stand_in)

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Refuse what does not exist, and a single device (see Method)."""
        self.known(job)
        if cluster.world_size < 2:
            raise ConfigError(
                f"Confidant on cluster '{cluster.name}' was asked for.",
                "It has one device, and a pipeline needs two or more.",
                "Add a device, or use --method fine_tuning --option paradigm=standalone.",
            )
