"""Simulate a whole job, step by step, with the shapes that its batches really have."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.fine_tuning.layout import BackpropagationStep, PlannedStep, SharedParameter, planned_epoch, shared_parameters
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.methods.fine_tuning.prices import BackpropagationCosts
from workbench.simulator import simulate


class Predictor:
    """Prices steps of one plan on one cluster; equal shapes are simulated once."""

    def __init__(self, profile: Profile, cluster: Cluster, plan: Plan, shared: tuple[SharedParameter, ...]) -> None:
        self._profile, self._cluster, self._plan, self._shared = profile, cluster, plan, shared
        self._names = tuple(device.name for device in cluster.devices)
        self._budgets = tuple(device.memory_bytes for device in cluster.devices)
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        self._seconds: dict[object, float] = {}

    def timeline(self, planned: PlannedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step."""
        step = BackpropagationStep.build(self._plan, planned.shape, self._cluster.world_size, self._schedules, self._shared)
        costs = BackpropagationCosts(self._profile, self._cluster, step)
        return simulate(step.schedule, costs, device_names=self._names, title=title, memory=memory, budget_bytes=self._budgets)

    def seconds(self, planned: PlannedStep) -> float:
        """Return the seconds of a step."""
        if planned.shape not in self._seconds:
            self._seconds[planned.shape] = self.timeline(planned, memory=False).makespan_s
        return self._seconds[planned.shape]


def predictor_of(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Predictor:
    """Return what prices the job's steps under a plan."""
    return Predictor(profile, cluster, plan, shared_parameters(prepared.facts, prepared.config.technique, plan))


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every step's simulated seconds and the timeline of a middle step of the first epoch; all epochs are alike."""
    job = prepared.job
    predictor = predictor_of(prepared, profile, cluster, plan)
    steps: list[StepRecord] = []
    timelines: dict[str, Timeline] = {}
    for epoch in range(job.epochs):
        planned = planned_epoch(prepared.train.lengths, plan, seed=job.seed, epoch=epoch)
        steps += [
            StepRecord(epoch=epoch, step=number, samples=step.shape.samples, cached=False, predicted_s=predictor.seconds(step))
            for number, step in enumerate(planned)
        ]
        if epoch == 0:
            middle = traced_step(len(planned))
            timelines["first epoch, predicted"] = predictor.timeline(planned[middle], title=f"Step {middle + 1} of the first epoch")
    epochs = tuple(
        EpochRecord(epoch=epoch, cached=False, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch))
        for epoch in range(job.epochs)
    )
    return Prediction(steps=tuple(steps), epochs=epochs, timelines=timelines)
