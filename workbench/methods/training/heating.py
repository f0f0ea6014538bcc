"""The seconds of a run's steps on devices that get hot while they compute (see workbench.core.heat)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.heat import Heat
from workbench.core.report import EpochRecord
from workbench.core.schedule import Ranks
from workbench.methods.base import Prediction
from workbench.methods.training.timetable import Timetable


class Stretch(NamedTuple):
    """Steps that some devices do in sequence.  timetable: at the devices' cold speeds.  members: their ranks."""

    timetable: Timetable
    members: Ranks
    steps: range


def gets_hot(cluster: Cluster) -> bool:
    """Return whether a device of a cluster slows down while it computes."""
    return any(device.sustained for device in cluster.devices)


def heated_s(cluster: Cluster, stretches: Iterable[Stretch]) -> dict[int, float]:
    """Return the seconds of steps, by number, each at the devices' speeds when it begins.  All devices begin cold."""
    heats = [Heat(device.sustained) for device in cluster.devices]
    now_s, taken_s = 0.0, dict[int, float]()
    for timetable, members, steps in stretches:
        member_heats = [heats[rank] for rank in members]
        for step in steps:
            present = at_heat(timetable, member_heats)
            taken_s[step] = present.seconds(step)
            now_s += taken_s[step]
            for place, heat in enumerate(member_heats):
                heat.advance(now_s, present.heating_s(step, place))
    return taken_s


def at_heat(timetable: Timetable, heats: Sequence[Heat]) -> Timetable:
    """Return the same steps at the devices' present speeds.  heats: by place."""
    return timetable.slowed(tuple(1 / heat.speed for heat in heats))


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
