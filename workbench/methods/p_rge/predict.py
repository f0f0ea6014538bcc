"""Simulate a run, step by step, with the lengths that its batches really have."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.p_rge.layout import Change, QueryStep, Shape, shape_of
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.prices import step_program
from workbench.planners.adaptive import Setting
from workbench.planners.queries import chosen_passings
from workbench.simulator import simulate


class Predictor:
    """Simulates the programs of one plan and setting on one cluster; equal shapes are simulated once."""

    def __init__(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting) -> None:
        self._profile, self._cluster, self._crossing = profile, cluster, prepared.crossing(setting)
        self.passings = chosen_passings(profile, cluster, plan, prepared.size(setting))
        self.step = QueryStep.build(plan, self.passings, cluster.world_size)
        self._timelines: dict[Shape, Timeline] = {}

    def program(self, shape: Shape) -> Program:
        """Return the program of a step, the one that the ranks execute."""
        return step_program(self._profile, self._cluster, self.step, shape, self._crossing)

    def timeline(self, shape: Shape, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step."""
        self._timelines[shape] = simulate(self.program(shape), title=title, memory=memory)
        return self._timelines[shape]

    def seconds(self, shape: Shape) -> float:
        """Return the seconds of a step."""
        return self._kept(shape).makespan_s

    def busy_s(self, shape: Shape, rank: int) -> float:
        """Return the seconds of a step in which a device computes."""
        return self._kept(shape).busy_s(rank)

    def sent_bytes(self, shape: Shape) -> int:
        """Return the bytes that all devices together send in a step."""
        return sum(self._kept(shape).bytes_sent(rank) for rank in range(self._cluster.world_size))

    def _kept(self, shape: Shape) -> Timeline:
        return self._timelines[shape] if shape in self._timelines else self.timeline(shape, memory=False)


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting) -> Prediction:
    """Return every step's simulated seconds, as if nothing changed on the way, and the timeline of a middle step of the first epoch.

    bytes: what all devices send in a step, beside what first-order data parallelism over the same devices would move.
    """
    predictor = Predictor(prepared, profile, cluster, plan, setting)
    change, per_epoch = Change(0, 0, setting), prepared.steps_per_epoch
    shapes = [shape_of(prepared.train, prepared.job.seed, change, step, width=prepared.packing_width) for step in range(prepared.num_steps)]
    middle = traced_step(min(per_epoch, len(shapes)))
    timelines = {"first epoch, predicted": predictor.timeline(shapes[middle], title=f"Step {middle + 1} of the first epoch")}
    steps = tuple(
        StepRecord(
            epoch=step // per_epoch,
            step=step % per_epoch,
            samples=setting.batch_size,
            cached=False,
            predicted_s=predictor.seconds(shape),
        )
        for step, shape in enumerate(shapes)
    )
    epochs = tuple(
        EpochRecord(epoch=epoch, cached=False, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch))
        for epoch in sorted({step.epoch for step in steps})
    )
    trained = sum(layer.trainable_bytes for layer in profile.layers[0])
    return Prediction(
        steps=steps,
        epochs=epochs,
        timelines=timelines,
        bytes={
            "sent in a step": predictor.sent_bytes(shapes[middle]),
            "sent in a step of first-order data parallelism": first_order_bytes(trained, sum(len(stage.shares) for stage in plan.stages)),
            "kept of a step in the log": 8 * setting.queries,
        },
    )


def first_order_bytes(trainable_bytes: int, devices: int) -> int:
    """Return what `devices` devices send to sum a gradient over all trained values by a ring: 2 (n - 1) times its bytes."""
    return 2 * (devices - 1) * trainable_bytes
