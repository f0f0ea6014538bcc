"""The parent's side of a run: what every device is told of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.common.limits import REAL_TIMEOUT_S, SILENT_AFTER_STEPS
from workbench.methods.p_rge.history import History
from workbench.methods.p_rge.layout import Change, Shape, shape_of
from workbench.methods.p_rge.planning import TOLERATED, fitted_setting, plan_job
from workbench.methods.p_rge.predict import Predictor
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.session import RankJob
from workbench.planners.adaptive import Precision, Setting
from workbench.planners.queries import plan_queries
from workbench.runtime.coordinator import Generation

SHORTEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPredictor:
    """What the steps of a generation should take: a runtime.coordinator.Predictor."""

    predictor: Predictor
    shape: Callable[[int], Shape]

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        return self.predictor.seconds(self.shape(step))

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step in which a member computes."""
        return self.predictor.busy_s(self.shape(step), place)


class Launcher:
    """Makes the jobs of one run.

    profile_of: what every layer costs on every device of the cluster, with weights of a precision.  is_real: devices that are not
    emulated are not slowed down, and get REAL_TIMEOUT_S.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        cluster: Cluster,
        history: History,
        folder: Path,
        *,
        profile_of: Callable[[Precision], Profile],
        is_real: bool,
    ) -> None:
        self._prepared, self._cluster, self._history, self._folder = prepared, cluster, history, folder
        self._profile_of, self._is_real = profile_of, is_real
        self._shape = lru_cache(maxsize=None)(self._find_shape)

    @property
    def setting(self) -> Setting:
        """Return the setting in force."""
        return self._history.changes[-1].setting

    def _find_shape(self, change: Change, step: int) -> Shape:
        """Return the shape of a step's batch."""
        prepared = self._prepared
        return shape_of(prepared.train, prepared.job.seed, change, step, width=prepared.packing_width)

    def fitted(self, ready: tuple[int, ...], factors: Mapping[int, float]) -> Setting:
        """Return the setting for the devices that are ready at their pace; raised again, up to the asked one, when that allows it."""
        asked = self._prepared.setting._replace(precision=self.setting.precision)
        small = self._cluster.part(ready)
        try:
            return fitted_setting(
                self._prepared, small, lambda precision: self._profile(precision, ready, factors), asked, step_s=self._tolerated_s
            )
        except PlanError:
            return self.setting  # the plan's own error says more

    @cached_property
    def _tolerated_s(self) -> float | None:
        """Return the seconds that a step of an adapting run may take: from what all devices need together at the profile's pace."""
        if not self._prepared.options.adapt:
            return None
        first = self._history.changes[0].setting
        return TOLERATED * plan_queries(self._profile_of(first.precision), self._cluster, self._prepared.size(first)).total_s

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        """Return whether the devices' pace asks for another setting or plan than a generation's."""
        setting = self.fitted(ready, factors)
        if setting != self.setting:
            return True
        plan = self._planned(ready, factors, setting)
        members = tuple(ready[rank] for stage in plan.stages for rank in stage.ranks)
        return members != generation.members or _shares(plan) != _shares(generation.plan)

    def generation(
        self, number: int, ready: tuple[int, ...], factors: Mapping[int, float], setting: Setting, plan: Plan | None = None
    ) -> Generation:
        """Return the steps that are left as a job of the devices that are ready.  plan: of the whole cluster; None makes one.

        Raises PlanError if the model does not fit on them.
        """
        if plan is None:
            plan = self._planned(ready, factors, setting)
            ranks = tuple(ready[rank] for stage in plan.stages for rank in stage.ranks)
        else:
            ranks = tuple(rank for stage in plan.stages for rank in stage.ranks)
        own, change = renumbered(plan), self._history.changed(setting)
        predictor = self.predictor(ranks, factors, own, change)
        job = self.rank_job(ranks, own, predictor, change)
        return Generation(number, ranks, own, job, predictor, job.timeout_s)

    def predictor(self, ranks: tuple[int, ...], factors: Mapping[int, float], plan: Plan, change: Change) -> StepPredictor:
        """Return what prices the steps of a plan of some devices.  Raises PlanError if a device's memory is too small for its share."""
        profile = self._profile(change.setting.precision, ranks, factors)
        predictor = Predictor(self._prepared, profile, self._cluster.part(ranks), plan, change.setting)
        return StepPredictor(predictor=predictor, shape=partial(self._shape, change))

    def rank_job(self, ranks: tuple[int, ...], plan: Plan, steps: StepPredictor, change: Change) -> RankJob:
        """Return the message that starts every rank."""
        prepared, history, setting = self._prepared, self._history, change.setting
        longest = Shape(setting, setting.batch_size, prepared.longest, max(len(row.decoder_ids) for row in prepared.train.rows))
        patience_s = max(SHORTEST_TIMEOUT_S, SILENT_AFTER_STEPS * steps.predictor.seconds(longest))
        return RankJob(
            job=prepared.job,
            cluster=self._cluster.part(ranks),
            plan=plan,
            passings=steps.predictor.passings,
            profile=self._profile(setting.precision, ranks, {}),
            train=prepared.train,
            trainable=prepared.trainable,
            compute_dtype=prepared.options.compute_dtype,
            crossing=prepared.crossing(setting),
            packing_width=prepared.packing_width,
            estimator=prepared.zeroth_order(setting),
            change=change,
            records=tuple(history.records),
            last_step=prepared.num_steps,
            steps_per_epoch=prepared.steps_per_epoch,
            folder=self._folder,
            timeout_s=REAL_TIMEOUT_S if self._is_real else patience_s,
        )

    def _planned(self, ready: tuple[int, ...], factors: Mapping[int, float], setting: Setting) -> Plan:
        profile = self._profile(setting.precision, ready, factors)
        return plan_job(self._prepared, profile, self._cluster.part(ready), setting)

    def _profile(self, precision: Precision, ranks: tuple[int, ...], factors: Mapping[int, float]) -> Profile:
        """Return the profile of some devices, as slow as they were found to be."""
        return self._profile_of(precision).part(ranks, factors)


def renumbered(plan: Plan) -> Plan:
    """Return a plan whose devices are numbered in the order in which it names them."""
    stages, at = [], 0
    for stage in plan.stages:
        shares = tuple(Share(rank=at + place, queries=share.queries) for place, share in enumerate(stage.shares))
        stages.append(Stage(start=stage.start, stop=stage.stop, shares=shares))
        at += len(shares)
    return replace(plan, stages=tuple(stages))


def _shares(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.start, stage.stop, tuple(share.queries for share in stage.shares)) for stage in plan.stages]
