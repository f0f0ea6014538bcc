"""Plan a job in its paradigm (PAC+, section VI-A)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.methods.common.limits import MAX_SIMULATIONS
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.methods.training.backups import with_room
from workbench.methods.training.predict import Predictor
from workbench.planners import PARADIGMS, asteroid, refine


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> FineTuningRankJob:
    """Return what every rank is told of a run under a plan."""
    return FineTuningRankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        split=prepared.train,
        config=prepared.config,
        facts=prepared.facts,
        quantization=prepared.options.quantization,
        schedule=prepared.options.schedule,
    )


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all epochs.  Raises PlanError, naming device and bytes, if nothing fits.

    'hybrid' is Asteroid's plan, refined with the simulated step as judge, or the plan of a simpler paradigm if that is faster.
    """
    job, paradigm = prepared.job, prepared.options.paradigm
    profile = with_room(profile, job)
    typical, longest = prepared.typical_length, prepared.longest
    typical_step = cache(prepared.typical_step)

    def made_by(planner: Callable[..., Plan]) -> Plan:
        sizes = {"batch_size": job.batch_size, "micro_batches": job.micro_batches}
        return planner(profile, cluster, **sizes, sequence_length=typical, memory_length=longest)

    def simulated_s(plan: Plan) -> float:
        return Predictor(rank_job(prepared, profile, cluster, plan).phases()[0]).seconds(typical_step(plan.num_micro_batches))

    if paradigm != "hybrid":
        return made_by(PARADIGMS[paradigm])
    hybrid = refine(
        [made_by(asteroid)], profile, cluster, simulated_s, sequence_length=typical, memory_length=longest, max_prices=MAX_SIMULATIONS
    )
    plans = [hybrid]
    for name in ("standalone", "data_parallel"):
        with contextlib.suppress(PlanError):  # one that does not fit
            plans.append(made_by(PARADIGMS[name]))
    return min(plans, key=simulated_s)
