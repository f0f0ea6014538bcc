"""Plan a job: blocks and ring order, by the depths that its rounds have."""

from __future__ import annotations

from collections import Counter

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.ringada.phases import RingRankJob, beside_bytes
from workbench.methods.ringada.prepare import PreparedJob
from workbench.methods.training.backups import with_room
from workbench.planners.memory import readable
from workbench.planners.ringada import RingPricer, plan_ring
from workbench.tasks.device_split import split_samples


def owned_by(prepared: PreparedJob, cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Return the rows of each device's samples, D_u, by name.  Raises ConfigError for a rule that cannot be or a device without data."""
    owned = split_samples(prepared.task.train, cluster.world_size, prepared.options.data, prepared.job.seed)
    return {device.name: prepared.train.rows_of(own) for device, own in zip(cluster.devices, owned, strict=True)}


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> RingRankJob:
    """Return what every rank is told of a run under a plan."""
    return RingRankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        split=prepared.train,
        config=prepared.config,
        facts=prepared.facts,
        options=prepared.options,
        policy=prepared.policy,
        owned=owned_by(prepared, cluster),
        typical_length=prepared.typical_length,
    )


def pricer(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> RingPricer:
    """Return what prices a ring for the whole run."""
    job = prepared.job
    policy, per_round = prepared.policy, cluster.world_size * prepared.options.local_iterations
    num_rounds = prepared.steps_on(cluster.world_size)
    depths = [policy.num_layers - policy.first_unfrozen(step // per_round, step) for step in range(per_round * num_rounds)]
    filled = per_round * (num_rounds // job.epochs) if prepared.options.cache else len(depths)  # after an epoch each sample has passed
    return RingPricer(
        with_room(profile, job),
        cluster,
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        sequence_length=prepared.typical_length,
        depths=Counter(depths[:filled]),
        cached=Counter(depths[filled:]),
        rest_bytes=beside_bytes(prepared.facts, prepared.config),
        memory_length=prepared.longest,
    )


def require_memory(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> None:
    """Raise PlanError, naming device and bytes, if a device of the plan needs more than its memory."""
    price = pricer(prepared, profile, cluster)
    for stage, rank in ((one, rank) for one in plan.stages for rank in one.ranks):
        device, needed = cluster.devices[rank], price.needs(rank, stage.start, stage.stop)
        if needed > device.memory_bytes:
            raise PlanError(
                f"Device '{device.name}' has {readable(device.memory_bytes)};",
                f"layers {stage.start}-{stage.stop - 1} with embedding and head need {readable(needed)}.",
                "Add a device, raise its memory, or lower the micro-batch size or the bottleneck.",
            )


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the blocks and the ring order.  Raises PlanError if nothing fits, ConfigError for a split of the data that cannot be."""
    job = prepared.job
    if prepared.options.federated:
        size, micro_batches = job.batch_size // job.micro_batches, job.micro_batches
        shares = tuple(Share(rank=rank, samples=size) for rank in range(cluster.world_size))
        whole = Stage(start=0, stop=prepared.facts.num_layers, shares=shares)
        return Plan(method="ringada", stages=(whole,), micro_batch_size=size, num_micro_batches=micro_batches)
    return plan_ring(pricer(prepared, profile, cluster), batch_size=job.batch_size, micro_batches=job.micro_batches)
