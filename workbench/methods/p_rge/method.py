"""P-RGE as a Method: what experiment.run calls, in the order in which it calls it."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.report import SweepPoint
from workbench.methods.base import Engines, Event, Notify, Outcome, Prediction, ignore
from workbench.methods.common.records import WARM_UP_STEPS, sweep_point
from workbench.methods.common.scaling import forward_costs, kept_layers, profiled_length, scale_to_cluster
from workbench.methods.p_rge.measure import catalogue_profile, in_precision, measure_layers
from workbench.methods.p_rge.outcome import outcome_of, results_of
from workbench.methods.p_rge.policy import ProfileOf, Run, fitted_setting
from workbench.methods.p_rge.predict import predict
from workbench.methods.p_rge.prepare import PreparedJob, check_plan, prepare, require_known
from workbench.methods.training.method import ProfiledMethod
from workbench.planners.adaptive import Precision, Setting
from workbench.planners.queries import chosen_passings, plan_queries
from workbench.planners.query_costs import METHOD
from workbench.profiler.analytic import LayerCost
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster


def measure_rank(context: RankContext, asked: tuple[PreparedJob, bool]) -> tuple[LayerProfile, ...]:
    """Return what this device's own core takes for every layer.  asked: the job, and whether to measure again."""
    prepared, refresh = asked
    return PRGE().host_layers(prepared, refresh=refresh)


class PRGE(ProfiledMethod[PreparedJob]):
    """Fine-tuning by forward passes, the queries of a step divided among the devices."""

    name = METHOD
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    measure_rank = staticmethod(measure_rank)

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return what every layer costs by the catalogue's figures (see ProfiledMethod)."""
        return catalogue_profile(prepared, cluster)

    def host_layers(
        self, prepared: PreparedJob, notify: Notify = ignore, *, refresh: bool = False, precision: Precision | None = None
    ) -> tuple[LayerProfile, ...]:
        """Return every layer's cost on one unslowed core of this host, measured now or kept from before.

        precision: of the frozen weights, the one that was asked for by default.
        """
        precision = precision or prepared.options.precision
        key = {
            "method": METHOD,
            "version": 4,
            "model": prepared.job.model,
            # The name alone may be a folder in which another model lies by now.
            "shape": asdict(prepared.facts),
            "trainable": asdict(replace(prepared.trainable, seed=0)),
            "precision": precision,
            "compute_dtype": prepared.options.compute_dtype,
            "max_length": profiled_length(prepared.longest, prepared.facts.max_length),
        }
        measure = partial(measure_layers, prepared, precision)
        return kept_layers(prepared, METHOD, key, measure, notify, refresh=refresh, what=f", weights in {precision}")

    def layer_costs(self, prepared: PreparedJob, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's FLOPs of a forward pass and its bytes, computed from sizes (see Method)."""
        return forward_costs(prepared.facts, batch=batch, sequence_length=sequence_length)

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Divide the queries, or the layers, among the devices; with other settings if the job allows it (see Method)."""
        profile_of = self._profile_of(prepared, profile, cluster)
        setting = fitted_setting(prepared, cluster, profile_of, prepared.setting)
        return plan_queries(profile_of(setting.precision), cluster, prepared.size(setting))

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Refuse what would end the run later (see Method)."""
        setting, costs = self._settled(prepared, profile, cluster, plan)
        check_plan(prepared, cluster, plan, setting)
        chosen_passings(costs, cluster, plan, prepared.size(setting))

    def predict(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
        """Simulate every step (see Method)."""
        setting, costs = self._settled(prepared, profile, cluster, plan)
        return predict(prepared, costs, cluster, plan, setting)

    def execute(
        self,
        prepared: PreparedJob,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Train on the engines, choose the epoch on the validation split, score the test split once (see Method)."""
        with self._run(prepared, profile, cluster, plan, engines, folder=folder, resume=resume, notify=notify) as run:
            notify(Event("phase", message=f"Training on {cluster.size_words}, {engines.fidelity} links", stage="train"))
            done = run.coordinated(plan, engines) if isinstance(engines, EngineCluster) else run.together(plan, engines)
            return outcome_of(run, done, prediction, engines.fidelity, resume=resume)

    def sweep_point(
        self,
        prepared: PreparedJob,
        profile: Profile,
        cluster: Cluster,
        name: str,
        plan: Plan,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
    ) -> SweepPoint:
        """Simulate, and on engines measure, the first steps under a plan (see Method)."""
        options = replace(prepared.options, steps=num_steps + WARM_UP_STEPS, adapt=False)
        short = replace(prepared, options=options)
        check_plan(short, cluster, plan, self._settled(short, profile, cluster, plan)[0])
        steps = self.predict(short, profile, cluster, plan).steps
        results = None
        if engines is not None:
            with self._run(short, profile, cluster, plan, engines, folder=folder, resume=False, notify=ignore) as run:
                results = results_of(run.together(plan, engines))
        return sweep_point(name, plan, steps, results, warm_up=WARM_UP_STEPS)

    def _run(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, engines: Engines, **settings: Any) -> Run:
        setting, profile_of = self._settled(prepared, profile, cluster, plan)[0], self._profile_of(prepared, profile, cluster)
        return Run(prepared, cluster, setting=setting, profile_of=profile_of, is_real=engines.fidelity == "real", **settings)

    def _settled(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> tuple[Setting, Profile]:
        """Return the setting that a plan is of, and the profile with its precision."""
        profile_of = self._profile_of(prepared, profile, cluster)
        setting = prepared.setting
        if prepared.options.adapts:
            fitted = fitted_setting(prepared, cluster, profile_of, setting)
            setting = Setting(sum(share.queries for share in plan.stages[0].shares), plan.micro_batch_size, fitted.precision)
        return setting, profile_of(setting.precision)

    def _profile_of(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> ProfileOf:
        asked = prepared.options.precision

        def profile_of(precision: Precision) -> Profile:
            if precision == asked:
                return profile
            if profile.source == "scaled":
                layers = self.host_layers(prepared, precision=precision)
                return scale_to_cluster(layers, cluster, model=prepared.job.model, method=METHOD)
            return in_precision(profile, asked, precision)

        return profile_of
