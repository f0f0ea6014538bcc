"""Plan a PAC+ job: Algorithm 1 or a baseline's paradigm for the first epoch, data parallelism for the cached ones (section V)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.common.limits import MAX_SIMULATIONS
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.rank_job import rank_job
from workbench.methods.training.backups import with_room
from workbench.methods.training.predict import Predictor
from workbench.planners import candidates, data_parallel, pipeline_parallel, plan_cached, refine, standalone

PARADIGMS = {"standalone": standalone, "data_parallel": data_parallel, "pipeline_parallel": pipeline_parallel}


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all epochs.  Raises PlanError if nothing fits."""
    job = prepared.job
    profile = with_room(profile, job)
    chosen = _first_epoch(prepared, profile, cluster)
    if job.epochs == 1 and not prepared.from_kept:
        return chosen
    if prepared.options.paradigm == "standalone":
        (rank,) = chosen.stages[0].ranks
        cached = Stage(start=0, stop=chosen.num_layers, shares=(Share(rank=rank, samples=job.batch_size),))
    else:
        cached = plan_cached(
            profile,
            cluster,
            batch_size=job.batch_size,
            sequence_length=prepared.typical_length,
            memory_length=prepared.longest,
        )
    return replace(chosen, cached=cached)


def _first_epoch(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Run Algorithm 1; among its W_s take the objective's best, or (by default) the plan whose simulated step is shortest."""
    job, options = prepared.job, prepared.options
    typical, longest = prepared.typical_length, prepared.longest
    if options.paradigm != "hybrid":
        planner: Callable[..., Plan] = PARADIGMS[options.paradigm]
        return planner(profile, cluster, batch_size=job.batch_size, sequence_length=typical, micro_batches=job.micro_batches)
    found = candidates(
        profile,
        cluster,
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        order="all" if options.order == "all" else None,
        objective="bottleneck" if options.objective == "simulated" else options.objective,
        sequence_length=typical,
        memory_length=longest,
    )
    if options.objective != "simulated":
        return found[0]
    step = prepared.typical_step(job.micro_batches)

    def simulated_s(plan: Plan) -> float:
        return Predictor(rank_job(prepared, profile, cluster, plan).phases()[0]).seconds(step)

    return refine(found, profile, cluster, simulated_s, sequence_length=typical, memory_length=longest, max_prices=MAX_SIMULATIONS)
