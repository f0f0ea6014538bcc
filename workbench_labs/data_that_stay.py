"""What lab 09, Data that stay, shows: its figures and tables, and the names that its cells use."""

from __future__ import annotations

from functools import cached_property
from statistics import fmean

import plotly.graph_objects as go

from workbench import plots
from workbench.core.catalogue import load_cluster
from workbench.methods.ringada.published import PIPE, RING, SINGLE, average, load_constants
from workbench.tasks import load_task
from workbench.tasks.batching import split_samples
from workbench.trainings.rings import Training
from workbench.widgets.tables import Table
from workbench_labs.exercises.pipelines import both_table
from workbench_labs.exercises.unfreezing import Policy, run_policy
from workbench_labs.learning import Learned, LearningLab, Tried
from workbench_labs.ring import RingLab, memory_by_depth, ring_table, ring_timeline
from workbench_labs.travel import (
    leak_table,
    message_table,
    readable_by_depth,
    reading_table,
    watch,
    words_read,
)

__all__ = [
    "RingLab",
    "Shares",
    "both_table",
    "leak_table",
    "learning_lab",
    "lower_after_equal_time",
    "memory_by_depth",
    "message_table",
    "parts_for",
    "plots",
    "published_table",
    "readable_by_depth",
    "reading_table",
    "ring_table",
    "ring_timeline",
    "run_policy",
    "watch",
    "words_read",
]

PARTS = (1, 2, 4, 8)
"""Micro-batches that are compared."""
ALL, STEPS = Tried(unfreezing="all"), Tried(unfreezing="steps", every=8)


class Shares:
    """Which device of a cluster owns which samples of a task."""

    def __init__(self, task: str, cluster_name: str, *, rule: str, train_samples: int | None, seed: int) -> None:
        self._train = load_task(task).limited(train_samples, None, None).train
        self._names, self._rule = [device.name for device in load_cluster(cluster_name).devices], rule
        self._owned = split_samples(self._train, len(self._names), rule, seed, self._names)

    def figure(self) -> go.Figure:
        """Return each device's samples by label."""
        labels = self._train.labels
        return plots.device_samples(
            self._owned, labels, self._names, class_names=("complaint", "praise"), rule=self._rule
        )

    @cached_property
    def most_one_sided(self) -> float:
        """Return the largest share, in per cent, that one label has of a device's samples."""
        of_devices = [[int(self._train.labels[row]) for row in rows] for rows in self._owned if len(rows)]
        return round(max(100 * max(fmean(labels), 1 - fmean(labels)) for labels in of_devices), 1)


def published_table() -> Table:
    """Return the layer times of an average mini-batch, by micro-batches: twelve blocks, four devices (simulated)."""
    rows = []
    for count in PARTS:
        single, pipe, ring = (average(load_constants(), scheme, count) for scheme in (SINGLE, PIPE, RING))
        rows.append((count, f"{single:.1f}", f"{pipe:.1f}", f"{ring:.1f}", f"{single / ring:.2f}"))
    columns = ("micro-batches", "Single", "PipeAdapter, without stale weights", "RingAda", "Single / RingAda")
    note = "12 blocks on 4 equal devices, an adapter more every 40 of 800 mini-batches; a backward pass takes as long"
    return Table(
        columns, rows, title="Layer times of an average mini-batch (simulated)", note=f"{note} as a forward one."
    )


def parts_for(ratio: float) -> int:
    """Return the number of micro-batches whose ratio Single / RingAda is nearest to this one."""

    def off(count: int) -> float:
        constants = load_constants()
        return abs(average(constants, SINGLE, count) / average(constants, RING, count) - ratio)

    return min(PARTS, key=off)


def learning_lab(model: str, steps: int, policy: Policy) -> LearningLab:
    """Return a lab in which two of the paper's policies and the student's have been trained."""
    few = steps < 48
    training = Training(
        model=model,
        steps=steps,
        points=2 if few else 4,
        batch_size=8,
        max_length=16 if few else 32,
        limits=(64, 16, 16) if few else (None, 100, 200),
    )
    return LearningLab(training, [ALL, STEPS, Tried(policy=policy)])


def lower_after_equal_time(lab: LearningLab) -> str:
    """Return which policy has the lower loss at the time at which the faster one ends: 'all' or 'steps'."""
    everything, stepwise = lab.learned[ALL], lab.learned[STEPS]
    end = min(everything.times[-1], stepwise.times[-1])

    def loss_at(one: Learned) -> float:
        times, losses = one.times, one.curve.losses
        return next((loss for time, loss in zip(times, losses, strict=True) if time >= end), losses[-1])

    return "all" if loss_at(everything) < loss_at(stepwise) else "steps"
