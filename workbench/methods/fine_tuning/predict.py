"""Simulate a whole job, step by step, with the shapes that its batches really have."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.common.steps import PlannedStep
from workbench.methods.fine_tuning.layout import planned_epoch, shared_parameters
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.methods.fine_tuning.programs import Programs
from workbench.simulator import simulate


class Predictor:
    """Simulates steps; equal shapes are simulated once."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._seconds: dict[object, float] = {}

    def timeline(self, planned: PlannedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step."""
        return simulate(self._programs.step(planned.shape), title=title, memory=memory)

    def seconds(self, planned: PlannedStep) -> float:
        """Return the seconds of a step."""
        if planned.shape not in self._seconds:
            self._seconds[planned.shape] = self.timeline(planned, memory=False).makespan_s
        return self._seconds[planned.shape]


def predictor_of(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Predictor:
    """Return what simulates the job's steps under a plan."""
    return Predictor(Programs(profile, cluster, plan, prepared.facts, shared_parameters(prepared.facts, prepared.config.technique, plan)))


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
