"""A run's steps on devices that get hot while they compute (see workbench.core.heat)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.heat import Heat
from workbench.core.report import EpochRecord
from workbench.core.schedule import Ranks
from workbench.methods.base import Prediction


class Steps(Protocol):
    """Numbered steps of some devices: of a training, or requests to answer."""

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""

    def heating_s(self, step: int, place: int) -> float:
        """Return the seconds of a step during which a device computes."""

    def slowed(self, factors: tuple[float, ...]) -> Self:
        """Return the same steps on slower devices; the same object for the same factors, by place."""


S = TypeVar("S", bound=Steps)


class Stretch(NamedTuple, Generic[S]):
    """Steps that some devices do in sequence.  timetable: at the devices' cold speeds.  members: their ranks."""

    timetable: S
    members: Ranks
    steps: range


def gets_hot(cluster: Cluster) -> bool:
    """Return whether a device of a cluster slows down while it computes."""
    return any(device.sustained for device in cluster.devices)


def heated(cluster: Cluster, stretches: Iterable[Stretch[S]]) -> dict[int, S]:
    """Return the timetable for each step, by number, at the devices' speeds when it begins.  All devices begin cold."""
    heats = [Heat(device.sustained) for device in cluster.devices]
    now_s, timetables = 0.0, dict[int, S]()
    for timetable, members, steps in stretches:
        member_heats = [heats[rank] for rank in members]
        for step in steps:
            timetables[step] = present = timetable.slowed(tuple(1 / heat.speed for heat in member_heats))
            now_s += present.seconds(step)
            for place, heat in enumerate(member_heats):
                heat.advance(now_s, present.heating_s(step, place))
    return timetables


def heated_s(cluster: Cluster, stretches: Iterable[Stretch[S]]) -> dict[int, float]:
    """Return the seconds of steps, by number, each at the devices' speeds when it begins."""
    return {step: timetable.seconds(step) for step, timetable in heated(cluster, stretches).items()}


def with_seconds(prediction: Prediction, taken_s: Mapping[int, float]) -> Prediction:
    """Return a prediction whose steps, by number, take other seconds; those not mentioned keep theirs."""
    steps = tuple(
        replace(step, predicted_s=taken_s.get(number, step.predicted_s)) for number, step in enumerate(prediction.steps)
    )
    sums = dict[int, float]()
    for step in steps:
        sums[step.epoch] = sums.get(step.epoch, 0.0) + (step.predicted_s or 0.0)
    epochs: tuple[EpochRecord, ...] = tuple(
        replace(epoch, seconds=sums.get(epoch.epoch, 0.0)) for epoch in prediction.epochs
    )
    return replace(prediction, steps=steps, epochs=epochs)
