"""Simulate a run, step by step, with the lengths that its batches really have."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.p_rge.layout import Change, QueryStep, Shape
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.planners.adaptive import Setting
from workbench.planners.queries import chosen_passings
from workbench.simulator import simulate


class Predictor:
    """Simulates the steps of one plan and setting on one cluster: a runtime.coordinator.Predictor.  Equal shapes are simulated once."""

    def __init__(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting, shape: Callable[[int], Shape]
    ) -> None:
        """shape: of each step's batch.  Raises PlanError if a device's memory is too small for its share."""
        self._profile, self._cluster, self._crossing = profile, cluster, prepared.crossing(setting)
        self.passings = chosen_passings(profile, cluster, plan, prepared.size(setting))
        self._step = QueryStep.build(plan, self.passings, cluster.world_size)
        self.shape = shape
        self.timeline = lru_cache(maxsize=None)(self._simulated)

    def program(self, shape: Shape) -> Program:
        """Return the program of a step, the one that the ranks execute."""
        return self._step.program(self._profile, self._cluster, shape, self._crossing)

    def _simulated(self, shape: Shape, title: str = "") -> Timeline:
        """Return the timeline of a step; its memory too if it has a title."""
        return simulate(self.program(shape), title=title, memory=bool(title))

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        return self.timeline(self.shape(step)).makespan_s

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step in which a device computes."""
        return self.timeline(self.shape(step)).busy_s(place)


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting) -> Prediction:
    """Return every step's simulated seconds, as if nothing changed on the way, and the timeline of a middle step of the first epoch.

    bytes: what all devices send in a step, and what first-order data parallelism over the same devices would send.
    """
    predictor = Predictor(prepared, profile, cluster, plan, setting, partial(prepared.shape, Change(0, 0, setting)))
    per_epoch = prepared.steps_per_epoch
    middle = traced_step(min(per_epoch, prepared.num_steps))
    timeline = predictor.timeline(predictor.shape(middle), f"Step {middle + 1} of the first epoch")
    steps = tuple(
        StepRecord(
            epoch=step // per_epoch,
            step=step % per_epoch,
            samples=setting.batch_size,
            cached=False,
            predicted_s=predictor.seconds(step),
        )
        for step in range(prepared.num_steps)
    )
    epochs = tuple(
        EpochRecord(epoch=epoch, cached=False, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch))
        for epoch in range(steps[-1].epoch + 1)
    )
    trained = sum(layer.trainable_bytes for layer in profile.layers[0])
    devices = sum(len(stage.shares) for stage in plan.stages)
    return Prediction(
        steps=steps,
        epochs=epochs,
        timelines={"first epoch, predicted": timeline},
        bytes={
            "sent in a step": sum(timeline.bytes_sent(rank) for rank in range(cluster.world_size)),
            # A ring sums a gradient over all trained values with 2 (n - 1) times its bytes.
            "sent in a step of first-order data parallelism": 2 * (devices - 1) * trained,
            "kept of a step in the log": 8 * setting.queries,
        },
    )
