"""Simulate a whole PAC+ job, step by step, with the shapes that its batches really have."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.common.steps import PlannedStep, plan_steps
from workbench.methods.pac_plus.cached_epochs import cached_steps, shard_owners
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.programs import CachedStep, Programs
from workbench.methods.pac_plus.redistribution import chunks_of, round_program, rounds_of
from workbench.simulator import simulate
from workbench.tasks.batching import epoch_batches


class Predictor:
    """Simulates steps; equal shapes are simulated once."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._hybrid_s: dict[object, float] = {}
        self._cached_s: dict[object, float] = {}

    def hybrid(self, planned: PlannedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step of the first epoch."""
        return simulate(self._programs.hybrid(planned.shape), title=title, memory=memory)

    def cached(self, step: CachedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step from the cache."""
        return simulate(self._programs.cached(step), title=title, memory=memory)

    def hybrid_s(self, planned: PlannedStep) -> float:
        """Return the seconds of a step of the first epoch."""
        if planned.shape not in self._hybrid_s:
            self._hybrid_s[planned.shape] = self.hybrid(planned, memory=False).makespan_s
        return self._hybrid_s[planned.shape]

    def cached_s(self, step: CachedStep) -> float:
        """Return the seconds of a step from the cache."""
        key = (step.sizes, step.lengths)
        if key not in self._cached_s:
            self._cached_s[key] = self.cached(step, memory=False).makespan_s
        return self._cached_s[key]


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every step's simulated seconds, the timeline of a middle step of each kind, and the redistribution's seconds."""
    job, lengths = prepared.job, prepared.train.lengths
    programs = prepared.programs(profile, cluster, plan)
    predictor = Predictor(programs)
    first_cached = 0 if prepared.from_kept else 1
    steps: list[StepRecord] = []
    timelines: dict[str, Timeline] = {}
    phases: dict[str, float] = {}
    first = plan_steps(epoch_batches(lengths, job.batch_size, job.seed, 0), lengths, job.micro_batches)
    if first_cached:
        steps += [
            StepRecord(epoch=0, step=number, samples=planned.shape.samples, cached=False, predicted_s=predictor.hybrid_s(planned))
            for number, planned in enumerate(first)
        ]
        middle = traced_step(len(first))
        timelines["first epoch, predicted"] = predictor.hybrid(first[middle], title=f"Step {middle + 1} of the first epoch")
    if job.epochs > first_cached:
        assert plan.cached is not None, "a plan without shares for cached epochs"
        owners = shard_owners(plan.cached, lengths, cluster.world_size, job.seed)
        if first_cached:
            phases |= _redistribution_s(prepared, programs, cluster.world_size, plan, first, owners)
        for epoch in range(first_cached, job.epochs):
            cached = cached_steps(plan.cached, owners, lengths, cluster.world_size, seed=job.seed, epoch=epoch)
            steps += [
                StepRecord(epoch=epoch, step=number, samples=step.num_samples, cached=True, predicted_s=predictor.cached_s(step))
                for number, (step, _) in enumerate(cached)
            ]
            if epoch == first_cached:
                middle = traced_step(len(cached))
                title = f"Step {middle + 1} of a cached epoch"
                timelines["cached epoch, predicted"] = predictor.cached(cached[middle][0], title=title)
    epochs = tuple(
        EpochRecord(
            epoch=epoch, cached=epoch >= first_cached, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch)
        )
        for epoch in range(job.epochs)
    )
    return Prediction(
        steps=tuple(steps),
        epochs=epochs,
        timelines=timelines,
        phases_s=phases,
        bytes={"activation cache": prepared.cache_bytes if job.epochs > first_cached else 0},
    )


def _redistribution_s(
    prepared: PreparedJob, programs: Programs, world_size: int, plan: Plan, steps: Sequence[PlannedStep], owners: Sequence[int]
) -> dict[str, float]:
    chunks = chunks_of(
        plan,
        steps,
        owners,
        prepared.train.lengths,
        world_size=world_size,
        layout=prepared.record_layout,
        num_encoder_layers=prepared.adapter.num_encoder_layers,
    )
    seconds = sum(simulate(round_program(programs, turn), memory=False).makespan_s for turn in rounds_of(chunks))
    return {"sharing the adapter": simulate(programs.adapter_broadcast(), memory=False).makespan_s, "sharing the activations": seconds}
