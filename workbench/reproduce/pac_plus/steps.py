"""Seconds of a sample in each paradigm: plan, schedule, simulate (PAC+, sections V and VI-A; Table V's rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.costs import broadcast_s
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Stage
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.planners import Problem, candidates, standalone
from workbench.planners.fixed import data_parallel
from workbench.planners.pac_plus import plan_cached
from workbench.profiler.analytic import Technique
from workbench.reproduce.pac_plus.testbed import Constants, nanos, profile
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import cached_step, full_pipeline, gpipe_order, hybrid_1f1b, one_f_one_b_order
from workbench.schedules.plan_costs import PlanCosts
from workbench.simulator import simulate

Paradigm = Literal["standalone", "data_parallel", "pipeline_parallel", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A method's step on a cluster: seconds per sample and its plan, or the reason why it runs out of memory."""

    seconds_per_sample: float | None
    plan: Plan | None = None
    reason: str = ""


def step_timeline(
    costs_of: Profile, cluster: Cluster, plan: Plan, technique: str, sequence_length: int, *, gpipe: bool = False
) -> Timeline:
    """Return one simulated mini-batch under 1F1B or with all forwards first."""
    sizes = (plan.micro_batch_size,) * plan.num_micro_batches
    order = gpipe_order if gpipe else one_f_one_b_order
    if technique == "parallel_adapters":
        schedule = hybrid_1f1b(plan, sizes, world_size=cluster.world_size, order=order)
    else:
        schedule = full_pipeline(plan, sizes, order, world_size=cluster.world_size)
    costs = PlanCosts(costs_of, cluster, plan, sizes=sizes, lengths=(sequence_length,) * len(sizes))
    return simulate(Program.on(cluster, insert_transfers(schedule), costs), memory=False)


def seconds_per_sample(costs_of: Profile, cluster: Cluster, plan: Plan, technique: str, sequence_length: int) -> float:
    """Return a mini-batch's simulated seconds over its samples."""
    return step_timeline(costs_of, cluster, plan, technique, sequence_length).makespan_s / plan.mini_batch_size


def fastest(costs_of: Profile, cluster: Cluster, plans: Sequence[Plan], technique: str, sequence_length: int) -> tuple[float, Plan]:
    """Return the minimum seconds per sample, and the first plan that achieves them."""
    priced = [(seconds_per_sample(costs_of, cluster, plan, technique, sequence_length), plan) for plan in plans]
    return min(priced, key=lambda one: one[0])


def step(constants: Constants, model: str, technique: Technique, paradigm: Paradigm, *, devices: int = 4, alone: int | None = None) -> Step:
    """Return a method's step on Nano-H devices.

    Our readings where the paper is silent: a single device takes `alone` samples at a time (default: its share of the cluster's
    mini-batch, like each device of data parallelism).  The pipelines split a mini-batch into 4 micro-batches; if they do not fit,
    2 or 1 of the same size are in flight, 'a reduction in the number of micro-batches simultaneously input into the pipeline'
    (section VI-B).  Of the plans of each number of stages, the one with the shortest simulated mini-batch is taken.
    """
    cluster = nanos(constants, 1 if paradigm == "standalone" else devices)
    costs_of = profile(constants, model, technique, cluster)
    length = constants.sequence_length
    try:
        if paradigm == "standalone":
            samples = constants.mini_batch // devices if alone is None else alone
            plans = [standalone(Problem(costs_of, cluster, batch_size=samples, sequence_length=length))]
        elif paradigm == "data_parallel":
            plans = [data_parallel(Problem(costs_of, cluster, batch_size=constants.mini_batch, sequence_length=length))]
        else:
            plans = pipelines(constants, costs_of, cluster, max_group=1 if paradigm == "pipeline_parallel" else None)
    except PlanError as error:
        return Step(seconds_per_sample=None, reason=str(error))
    seconds, plan = fastest(costs_of, cluster, plans, technique, length)
    return Step(seconds_per_sample=seconds, plan=plan)


def pipelines(constants: Constants, costs_of: Profile, cluster: Cluster, *, max_group: int | None) -> list[Plan]:
    """Return the plans that fit with as many micro-batches in flight as possible.  Raises the PlanError for one in flight."""
    in_flight, size, length = constants.micro_batches, constants.micro_batch_size, constants.sequence_length
    while True:
        problem = Problem(costs_of, cluster, batch_size=in_flight * size, micro_batches=in_flight, sequence_length=length)
        try:
            return candidates(problem, objective="bottleneck", max_group=max_group)
        except PlanError:
            if in_flight == 1:
                raise
            in_flight //= 2


def cached_timeline(constants: Constants, costs_of: Profile, cluster: Cluster) -> tuple[Timeline, Stage]:
    """Return one step from the activation cache, data parallel, and its shares (section V-B)."""
    length = constants.sequence_length
    stage = plan_cached(Problem(costs_of, cluster, batch_size=constants.mini_batch, sequence_length=length))
    plan = Plan(method="pac_plus", stages=(stage,), micro_batch_size=constants.mini_batch, num_micro_batches=1)
    schedule = cached_step(stage, [share.samples for share in stage.shares], world_size=cluster.world_size)
    costs = PlanCosts(costs_of, cluster, plan, sizes=(constants.mini_batch,), lengths=(length,))
    return simulate(Program.on(cluster, schedule, costs), memory=False), stage


def redistribution_s(constants: Constants, costs_of: Profile, cluster: Cluster, plan: Plan, cached: Stage, samples: int) -> float:
    """Return the seconds to send the adapters and the activations of `samples` samples to the devices that train on them.

    Each device sends a sample's computed activations to the sample's new owner, all devices at once, and then each stage's adapters are
    broadcast.  Reading and writing the disks overlaps and is not counted.
    """
    busy_s: dict[tuple[str, int], float] = {}  # of each device's link, in each direction
    adapters_s = 0.0
    for stage in plan.stages:
        layers = costs_of.layers[0][stage.start : stage.stop]
        per_sample = sum(layer.tap_bytes(1, constants.sequence_length) for layer in layers)
        others = [rank for rank in sorted(cached.ranks) if rank not in stage.ranks]
        adapters_s += broadcast_s(cluster, (stage.ranks[0], *others), sum(layer.trainable_bytes for layer in layers))
        for giver in stage.shares:
            for taker in cached.shares:
                # A group with the whole model keeps its activations: owners follow the cache where possible.
                if taker.rank != giver.rank and len(plan.stages) > 1:
                    share = giver.samples / plan.micro_batch_size * taker.samples / constants.mini_batch
                    seconds = cluster.link(giver.rank, taker.rank).transfer_s(round(samples * share * per_sample))
                    for end in (("out", giver.rank), ("in", taker.rank)):
                        busy_s[end] = busy_s.get(end, 0.0) + seconds
    return max(busy_s.values(), default=0.0) + adapters_s


def pac_plus_hours(
    constants: Constants, model: str, plan: Plan, first_s: float, samples: int, epochs: int, cluster: Cluster
) -> Sequence[float]:
    """Return the hours of the first epoch, of the redistribution, and of the epochs from the cache."""
    hours = [samples * first_s / 3600, 0.0, 0.0]
    if epochs > 1:
        costs_of = profile(constants, model, "parallel_adapters", cluster)
        timeline, cached = cached_timeline(constants, costs_of, cluster)
        hours[1] = redistribution_s(constants, costs_of, cluster, plan, cached, samples) / 3600
        hours[2] = (epochs - 1) * samples * timeline.makespan_s / constants.mini_batch / 3600
    return hours
