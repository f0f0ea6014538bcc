"""Simulate a whole run, step by step, with the real shapes of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from workbench.core.program import chained
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.schedule import STEP
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.training.backups import backup_s
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.phases import Phase, RankJob
from workbench.simulator import simulate


class Predictor:
    """Simulates a phase's steps; equal shapes are simulated once."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._seconds = cache(self._find_seconds)

    def timeline(self, planned: PlannedStep, *, title: str = "") -> Timeline:
        """Return the timeline of a step."""
        return simulate(self._phase.program(planned.shape), title=title)

    def seconds(self, planned: PlannedStep) -> float:
        """Return the seconds of a step."""
        return self._seconds(planned.shape)

    def _find_seconds(self, shape: StepShape) -> float:
        program = self._phase.program(shape)
        if shape.continues is None:
            return simulate(program, memory=False).makespan_s
        both = simulate(chained([self._phase.program(shape.continues), program]), memory=False)
        begun_s = max(span.end_s for span in both.spans if span.op.kind == STEP and span.op.writes[0].name.endswith("~0"))
        return both.makespan_s - begun_s

    def records(self, epoch: int, steps: Sequence[PlannedStep]) -> tuple[StepRecord, ...]:
        """Return an epoch's steps with their seconds."""
        return tuple(
            StepRecord(
                epoch=epoch,
                step=number,
                samples=step.shape.samples,
                cached=self._phase.cached,
                predicted_s=self.seconds(step),
                lowest_trained=step.shape.lowest_trained,
            )
            for number, step in enumerate(steps)
        )


def predict(rank_job: RankJob) -> Prediction:
    """Return every step's simulated seconds, the timeline of a middle step of each phase, and the seconds between phases."""
    steps: list[StepRecord] = []
    epochs: list[EpochRecord] = []
    timelines: dict[str, Timeline] = {}
    phases_s: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    for phase in rank_job.phases():
        predictor = Predictor(phase)
        nbytes |= phase.nbytes
        for epoch in phase.epochs:
            planned = phase.steps(epoch)
            if epoch == phase.epochs.start:
                middle = traced_step(len(planned))
                title = f"Step {middle + 1} of {'a' if phase.cached else 'the'} {phase.name}"
                timelines[f"{phase.name}, predicted"] = predictor.timeline(planned[middle], title=title)
            own = predictor.records(epoch, planned)
            steps += own
            epochs.append(EpochRecord(epoch=epoch, cached=phase.cached, seconds=sum(step.predicted_s or 0.0 for step in own)))
        for name, programs in phase.moves().items():
            phases_s[name] = sum(simulate(program, memory=False).makespan_s for program in programs)
    if rank_job.job.backup_every:
        phases_s["backups"] = backup_s(rank_job) * (len(steps) // rank_job.job.backup_every)
    if rank_job.changes_s:
        phases_s["changes of the plan"] = rank_job.changes_s
    return Prediction(steps=tuple(steps), epochs=tuple(epochs), timelines=timelines, phases_s=phases_s, bytes=nbytes)
