"""Plan a job in its paradigm (PAC+, section VI-A)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.methods.common.limits import MAX_SIMULATIONS
from workbench.methods.fine_tuning.layout import PlannedStep, planned_epoch
from workbench.methods.fine_tuning.predict import predictor_of
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.planners import PARADIGMS, asteroid, refine


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all epochs.  Raises PlanError, naming device and bytes, if nothing fits.

    'hybrid' is Asteroid's plan, refined with the simulated step as judge, or the plan of a simpler paradigm if that is faster.
    """
    job, paradigm = prepared.job, prepared.options.paradigm
    typical, longest = prepared.typical_length, max(prepared.train.lengths)

    def made_by(planner: Callable[..., Plan]) -> Plan:
        sizes = {"batch_size": job.batch_size, "micro_batches": job.micro_batches}
        return planner(profile, cluster, **sizes, sequence_length=typical, memory_length=longest)

    if paradigm != "hybrid":
        return made_by(PARADIGMS[paradigm])

    def simulated_s(plan: Plan) -> float:
        (step,) = typical_steps(prepared, plan, 1)
        return predictor_of(prepared, profile, cluster, plan).seconds(step)

    hybrid = refine(
        [made_by(asteroid)], profile, cluster, simulated_s, sequence_length=typical, memory_length=longest, max_prices=MAX_SIMULATIONS
    )
    plans = [hybrid]
    for name in ("standalone", "data_parallel"):
        with contextlib.suppress(PlanError):  # one that does not fit
            plans.append(made_by(PARADIGMS[name]))
    return min(plans, key=simulated_s)


def typical_steps(prepared: PreparedJob, plan: Plan, num_steps: int) -> tuple[PlannedStep, ...]:
    """Return `num_steps` mini-batches of the first epoch whose length is closest to the mean, the same samples for every plan."""
    steps = planned_epoch(prepared.train.lengths, plan, seed=prepared.job.seed, epoch=0)
    whole = [step for step in steps if step.shape.samples == plan.mini_batch_size] or list(steps)
    longest = {step: max(prepared.train.lengths[sample] for micro in step.samples for sample in micro) for step in whole}
    return tuple(sorted(whole, key=lambda step: abs(longest[step] - prepared.typical_length))[:num_steps])
