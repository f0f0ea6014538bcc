"""Simulate a whole PAC+ job, step by step, with the shapes that its batches really have."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.common.steps import PlannedStep, plan_steps
from workbench.methods.pac_plus.cached_epochs import cached_steps, shard_owners
from workbench.methods.pac_plus.layout import CachedStep, HybridStep
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.prices import CachedCosts, HybridCosts, RedistributionCosts
from workbench.methods.pac_plus.redistribution import chunks_of, redistribution_schedule, rounds_of
from workbench.schedules.cached import adapter_broadcast
from workbench.simulator import simulate
from workbench.tasks.batching import epoch_batches


class Predictor:
    """Prices steps on one cluster; equal shapes are simulated once."""

    def __init__(self, profile: Profile, cluster: Cluster, plan: Plan) -> None:
        self._profile, self._cluster, self._plan = profile, cluster, plan
        self._names = tuple(device.name for device in cluster.devices)
        self._budgets = tuple(device.memory_bytes for device in cluster.devices)
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        self._hybrid_s: dict[object, float] = {}
        self._cached_s: dict[object, float] = {}

    def hybrid(self, planned: PlannedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step of the first epoch."""
        step = HybridStep.build(self._plan, planned.shape, self._cluster.world_size, self._schedules)
        costs = HybridCosts(profile=self._profile, cluster=self._cluster, step=step)
        return simulate(step.schedule, costs, device_names=self._names, title=title, memory=memory, budget_bytes=self._budgets)

    def cached(self, step: CachedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step from the cache."""
        costs = CachedCosts(profile=self._profile, cluster=self._cluster, step=step)
        return simulate(step.schedule, costs, device_names=self._names, title=title, memory=memory, budget_bytes=self._budgets)

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
    predictor = Predictor(profile, cluster, plan)
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
            phases |= _redistribution_s(prepared, profile, cluster, plan, first, owners)
        for epoch in range(first_cached, job.epochs):
            cached = cached_steps(plan.cached, owners, lengths, cluster.world_size, seed=job.seed, epoch=epoch)
            steps += [
                StepRecord(epoch=epoch, step=number, samples=step.samples, cached=True, predicted_s=predictor.cached_s(step))
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
    prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, steps: Sequence[PlannedStep], owners: Sequence[int]
) -> dict[str, float]:
    world_size = cluster.world_size
    names = tuple(device.name for device in cluster.devices)
    adapter_bytes = tuple(3 * sum(layer.trainable_bytes for layer in profile.layers[0][stage.start : stage.stop]) for stage in plan.stages)
    chunks = chunks_of(
        plan,
        steps,
        owners,
        prepared.train.lengths,
        world_size=world_size,
        layout=prepared.record_layout,
        num_encoder_layers=prepared.adapter.num_encoder_layers,
    )
    broadcast = RedistributionCosts(cluster=cluster, chunk_bytes=(), adapter_bytes=adapter_bytes)
    schedule = adapter_broadcast(plan.stages, range(world_size), world_size=world_size)
    seconds = 0.0
    for turn in rounds_of(chunks):
        costs = RedistributionCosts(cluster=cluster, chunk_bytes=tuple(chunk.nbytes for chunk in turn), adapter_bytes=adapter_bytes)
        seconds += simulate(redistribution_schedule(turn, world_size), costs, device_names=names, memory=False).makespan_s
    return {
        "sharing the adapter": simulate(schedule, broadcast, device_names=names, memory=False).makespan_s,
        "sharing the activations": seconds,
    }
