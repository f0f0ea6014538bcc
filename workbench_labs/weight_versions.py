"""Versions of weights in a pipeline that never drains: which of them a device stashes, and what their age
does to a descent (Confidant, section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from workbench.core.names import FP32_BYTES
from workbench.core.profile import Bytes
from workbench.core.schedule import STEP
from workbench.core.timeline import Timeline
from workbench.planners import Problem
from workbench.planners.asynchronous import even_partition
from workbench.planners.equation3 import Equation3
from workbench.plots import lines
from workbench.simulator.steps import SAMPLES, equal_blocks
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench.widgets.tables import Table
from workbench_labs.partition_by_hand import pipeline

STALE_STEPS = 40
"""Steps of a descent with stale gradients."""


def stashed(num_stages: int, count: int) -> Timeline:
    """Return mini-batches through equal stages: forward 1 s, backward 2 s, a transfer .2 s (simulated)."""
    profile, cluster = equal_blocks(num_stages, num_stages, backward=2.0, transfer_s=0.2)
    layer = replace(profile.layers[0][0], output_bytes=Bytes(FP32_BYTES), gradient_bytes=Bytes(FP32_BYTES))
    profile = replace(profile, layers=((layer,) * num_stages,) * num_stages)
    cluster = replace(
        cluster, devices=tuple(replace(device, name=f"stage {number}") for number, device in enumerate(cluster.devices))
    )
    costs = Equation3(Problem(profile, cluster, batch_size=SAMPLES, sequence_length=1))
    return pipeline(
        costs, even_partition(costs, range(num_stages)), count, title=f"{count} mini-batches, never drained"
    )


def versions_at(timeline: Timeline, rank: int, time_s: float) -> dict[int, list[int]]:
    """Return a device's weight versions, each with the mini-batches that used it forwards and have not had their
    backward pass.
    """
    batches_of: dict[int, list[int]] = {0: []}
    newest = 0
    for span in sorted((span for span in timeline.spans if span.rank == rank), key=lambda one: one.start_s):
        versions = [value.part for value in span.op.reads if value.name == "weight"]
        if span.op.kind == "F" and span.start_s <= time_s:
            batches_of.setdefault(versions[0], []).append(span.op.microbatch)
        elif span.op.kind == "B" and span.end_s <= time_s:
            batches_of[versions[0]].remove(span.op.microbatch)
        elif span.op.kind == STEP and span.end_s <= time_s:
            newest = max(newest, *(value.part for value in span.op.writes))
    batches_of.setdefault(newest, [])
    return {version: batches_of[version] for version in sorted(batches_of) if batches_of[version] or version == newest}


def version_words(timeline: Timeline, rank: int, time_s: float) -> str:
    """Return versions_at as text, for a SchedulePlayer."""
    batches_of = versions_at(timeline, rank, time_s)
    users = {
        version: f" for {', '.join(map(str, batches))}" if batches else "" for version, batches in batches_of.items()
    }
    return "; ".join(
        f"v{version}{' (newest)' * (version == max(batches_of))}{users[version]}"
        for version in sorted(batches_of, reverse=True)
    )


def version_table(timeline: Timeline) -> Table:
    """Return the version of each stage's weights in the forward and backward pass of each mini-batch."""
    versions = {
        (span.op.stage, span.op.microbatch): span.op.reads[-1].part for span in timeline.spans if span.op.kind == "F"
    }
    stages, count = range(len(timeline.device_names)), 1 + max(batch for _, batch in versions)
    rows = [
        (f"{batch}", *(f"v{versions[stage, batch]}" for stage in stages), f"v{batch + 1}") for batch in range(count)
    ]
    columns = ("mini-batch", *timeline.device_names, "its update makes")
    return Table(columns, rows, title="Version with which a mini-batch goes forward, and back")


def delayed_descent(
    start: float, gradient: Callable[[float], float], learning_rate: float, delay: int, steps: int
) -> list[float]:
    """Return the weights w_0 to w_steps of w_{t+1} = w_t - learning_rate x gradient(w_{t-delay}); weights before w_0
    equal w_0.
    """
    weights = [start]
    for step in range(steps):
        weights.append(weights[-1] - learning_rate * gradient(weights[max(0, step - delay)]))
    return weights


class StaleLab(Explorer):
    """A slider for the learning rate: descents into the bowl w^2 / 2 with gradients that are 0 to 3 versions old
    (computed).
    """

    def __init__(self, learning_rate: float = 0.3) -> None:
        [self.learning_rate] = lab_controls("stale", learning_rate=learning_rate)
        super().__init__([self.learning_rate], [self.learning_rate], lambda: self.learning_rate.value, self._descend)

    def _descend(self, rate: float) -> None:
        paths = {delay: delayed_descent(1.0, lambda w: w, rate, delay, STALE_STEPS) for delay in range(4)}
        ends = ", ".join(f"{delay}: {abs(path[-1]):.2g}" for delay, path in paths.items())
        worse = [f"{delay}" for delay, path in paths.items() if max(map(abs, path[-10:])) > 1]
        words = f"Delays of {', '.join(worse)} run away" if worse else "All come down"
        self.headline.say(words, f"|w| after {STALE_STEPS} steps by delay: {ends} (computed)")
        series = {
            f"delay {delay}": list(takewhile(lambda point: abs(point[1]) < 4, enumerate(path)))
            for delay, path in paths.items()
        }
        self.show(
            lambda: lines(series, title="Descents with stale gradients", label="computed", x_title="step", y_title="w")
        )
