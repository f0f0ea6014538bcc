"""Fine-tuning through the backbone as a Method: its specifics, and its plan in each paradigm (PAC+, section VI-A)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Layers, Profile
from workbench.methods.base import MAX_SIMULATIONS
from workbench.methods.common.scaling import number_format
from workbench.methods.fine_tuning.jax_stage import require_jax_suits
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.methods.fine_tuning.phases import FineTuningRankJob, phases_on
from workbench.methods.fine_tuning.prepare import PreparedJob, can_recompute, check_plan, prepare, require_known
from workbench.methods.training.backpropagation import AnalyticTechnique, BackpropagationMethod
from workbench.methods.training.profiled import Measurement
from workbench.methods.training.state_costs import planning_problem, with_room
from workbench.methods.training.trained import Trained
from workbench.models.techniques import num_trained
from workbench.planners import PARADIGMS, asteroid, refine_on_any_count
from workbench.planners.asynchronous import plan_asynchronous
from workbench.planners.equation3 import Equation3
from workbench.planners.memory import check as check_memory
from workbench.planners.memory import plan_needs
from workbench.planners.recomputation import plan_within_memory
from workbench.profiler.analytic import TechniqueSizes
from workbench.simulator.steps import pace_s


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> FineTuningRankJob:
    """Return the description of a run under a plan, for every rank."""
    return FineTuningRankJob.of(
        prepared,
        profile,
        cluster,
        plan,
        config=prepared.config,
        facts=prepared.facts,
        schedule=prepared.options.schedule,
        window=prepared.options.window,
        versions=prepared.options.versions,
        drain_every=prepared.options.drain_every,
    )


def stage_costs(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Equation3:
    """Return the costs for partitions of an asynchronous pipeline."""
    return Equation3(planning_problem(prepared, profile, cluster), versions=prepared.options.versions)


def pace_of_job(prepared: PreparedJob, costs: Equation3) -> Callable[[Plan], float]:
    """Return a function of a plan: the simulated seconds of a typical mini-batch in a full pipeline."""
    return partial(pace_s, costs.profile, costs.cluster, tokens=prepared.typical_length)


def step_of_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Callable[[Plan], float]:
    """Return a function of a plan: the simulated seconds of a typical step."""
    typical_step = cache(prepared.typical_step)

    def seconds(plan: Plan) -> float:
        run, step = rank_job(prepared, profile, cluster, plan), typical_step(plan.num_micro_batches)
        return run.predictor(run.phases()[0]).seconds(step)

    return seconds


def least_of_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Callable[[Plan], float]:
    """Return a function of a plan: a lower bound of step_of_job's seconds."""
    typical_step = cache(prepared.typical_step)

    def seconds(plan: Plan) -> float:
        programs = rank_job(prepared, profile, cluster, plan).programs
        return programs.least_s(typical_step(plan.num_micro_batches).shape)

    return seconds


def choose_activations(
    prepared: PreparedJob, profile: Profile, cluster: Cluster, plan_with: Callable[[Profile], Plan]
) -> Plan:
    """Return a plan whose stages keep or recompute their activations, as the job's options say (see
    planners.recomputation).

    plan_with: plans with a profile.
    """
    options, room = prepared.options, with_room(profile, prepared.job)

    def needs(plan: Plan) -> Mapping[int, int]:
        by_rank = plan_needs(
            room, plan, sequence_length=prepared.longest, order=options.schedule, versions=options.versions
        )
        return {rank: need.total_bytes for rank, need in by_rank.items()}

    choice = options.activations if can_recompute(prepared, cluster) else "memory"
    # An asynchronous plan has its pace, by which its planner has chosen it.
    seconds = attrgetter("total_s") if prepared.is_asynchronous else step_of_job(prepared, profile, cluster)
    return plan_within_memory(choice, profile, cluster, plan_with, needs, seconds)


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all epochs.  Raises PlanError, naming device and bytes, if nothing fits.

    'hybrid' is Asteroid's plan, refined by the simulated step time, or the plan of a simpler paradigm if that is
    faster.
    An asynchronous pipeline is planned by Confidant's Eq. 3.
    """
    return choose_activations(prepared, profile, cluster, partial(plan_with, prepared, cluster))


def plan_with(prepared: PreparedJob, cluster: Cluster, profile: Profile) -> Plan:
    """Return the plan with a profile, which says whether activations are recomputed (see plan_job)."""
    if prepared.is_asynchronous:
        searches = prepared.options.paradigm == "hybrid"
        costs = stage_costs(prepared, profile, cluster)
        simulated_pace_s = pace_of_job(prepared, costs)
        return plan_asynchronous(costs, searches=searches, method="asynchronous_1f1b", simulated_s=simulated_pace_s)
    problem, paradigm = planning_problem(prepared, profile, cluster), prepared.options.paradigm
    simulated_s = step_of_job(prepared, profile, cluster)
    if paradigm != "hybrid":
        return PARADIGMS[paradigm](problem)
    limits: Any = {"max_prices": MAX_SIMULATIONS, "least": least_of_job(prepared, profile, cluster)}
    plans = [refine_on_any_count([asteroid(problem)], problem, simulated_s, method="asteroid", **limits)]
    for name in ("standalone", "data_parallel"):
        with contextlib.suppress(PlanError):  # if a simpler plan does not fit
            plans.append(PARADIGMS[name](problem))
    return min(plans, key=simulated_s)


class FineTuning(BackpropagationMethod[PreparedJob]):
    """Full fine-tuning, LoRA or Adapters, on one device or several: the baselines of PAC+."""

    name = "fine_tuning"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    check_plan = staticmethod(check_plan)
    rank_job = staticmethod(rank_job)
    phases_on = staticmethod(phases_on)
    trained = Trained

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Reject unknown names, and settings that JAX does not support here (see Method)."""
        super().require_known(job, cluster)
        require_jax_suits(cluster, job.model, self.known(job))

    def num_trained(self, prepared: PreparedJob) -> int:
        """Return the number of the technique's weights (see Method)."""
        return num_trained(prepared.config, prepared.facts)

    def measured(self, prepared: PreparedJob) -> Measurement:
        """Return the settings that affect layer costs, and a function that measures them (see LayerMethod)."""

        def measure(max_length: int) -> Layers:
            return measure_layers(self.measured_stack(prepared, quantization), prepared.config, max_length=max_length)

        quantization = prepared.quantization
        key = {"technique": asdict(replace(prepared.config, seed=0, label_mean=0.0, label_std=1.0))}
        return key | ({} if quantization.storage == "float32" else {"backbone": quantization.description}), measure

    def technique(self, prepared: PreparedJob) -> AnalyticTechnique:
        """Return the technique's sizes (see BackpropagationMethod)."""
        config = prepared.config
        sizes = TechniqueSizes(
            lora_rank=config.lora_rank,
            lora_dropout=config.lora_dropout > 0,
            bottleneck=config.bottleneck,
            adapter_norms=True,
            reduction=config.reduction,
            side_apart=False,
            predicts_words=prepared.predicts_words,
        )
        numbers = number_format(prepared.facts, "float32", prepared.quantization)
        if config.technique == "parallel":
            return AnalyticTechnique("parallel_adapters", sizes, numbers)
        if config.technique == "serial":
            return AnalyticTechnique("adapters", replace(sizes, adapters_per_layer=1, adapter_norms=False), numbers)
        return AnalyticTechnique(config.technique, sizes, numbers)

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        if folder is not None:
            room = with_room(profile, prepared.job)
            options = prepared.options
            check_memory(
                room, cluster, plan, sequence_length=prepared.longest, order=options.schedule, versions=options.versions
            )
