"""Labs of Confidant: partitions by hand, weight versions, stale gradients, heads over processors, recoveries (sections
2.3 and 3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations, takewhile

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.names import FP32_BYTES
from workbench.core.profile import Bytes, trainable_bytes
from workbench.core.proportions import proportional_parts
from workbench.core.report import Report
from workbench.core.schedule import STEP
from workbench.core.timeline import Timeline
from workbench.core.units import counted, size_words
from workbench.methods.confidant.equations import printed_need
from workbench.methods.confidant.heads import (
    EPSILONS,
    HeadProfile,
    allocate_as_printed,
    best_allocation,
    epsilon_name,
    random_profile,
)
from workbench.planners import Problem
from workbench.planners.asynchronous import (
    asynchronous_plan,
    even_partition,
    partition_in_any_order,
    partition_in_order,
)
from workbench.planners.equation3 import Equation3, Partition, pace_of
from workbench.plots import gantt, lines, needs
from workbench.plots.style import CYCLE, Unit, finish, time_unit
from workbench.profiler.analytic import analytic_profile
from workbench.profiler.descriptions import describe
from workbench.simulator.steps import SAMPLES, equal_blocks, mini_batches
from workbench.widgets.controls import button, described, slider
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench.widgets.tables import Table
from workbench_labs.planning import as_described

SHOWN, LONG, STALE_STEPS = 6, 12, 40
"""Number of mini-batches in a Gantt chart, number over which the long run's pace is averaged, and steps of a
descent."""
WRAPPED = widgets.Layout(flex_flow="row wrap")


def pipeline(costs: Equation3, partition: Partition, count: int, *, title: str = "") -> Timeline:
    """Return some mini-batches through an empty asynchronous pipeline, whether or not the memory suffices
    (simulated).
    """
    plan = asynchronous_plan(costs, partition, method="confidant", check_memory=False)
    return mini_batches(costs.profile, costs.cluster, plan, tokens=costs.memory_length, count=count, title=title)


def costs_of(model: str, cluster: Cluster, *, batch_size: int, tokens: int) -> Equation3:
    """Return the costs of full fine-tuning on a cluster's devices as the catalogue describes them."""
    bare, sizes = as_described(cluster), {"batch_sizes": (batch_size,), "sequence_lengths": (tokens,)}
    profile = analytic_profile(model, bare, technique="full", **sizes)  # type: ignore[arg-type]
    return Equation3(Problem(profile, bare, batch_size=batch_size, sequence_length=tokens))


class PartitionLab(Explorer):
    """Sliders for the cuts of a model over devices, and for their order; pace, Gantt chart and memory of the
    asynchronous pipeline.

    costs: the input of Eq. 3.  partition: the controls' partition; reading it raises ConfigError for a device without a
    layer.
    """

    def __init__(self, model: str, cluster: Cluster, *, batch_size: int, tokens: int) -> None:
        sizes, names = describe(model), cluster.names
        self.costs = costs_of(model, cluster, batch_size=batch_size, tokens=tokens)
        self._sizes = {"heads": sizes.heads, "hidden": sizes.hidden, "feed_forward": sizes.feed_forward}
        orders = {" - ".join(names[rank] for rank in order): order for order in permutations(range(cluster.world_size))}
        self.order = described(
            widgets.Dropdown, "Order", "Who comes first in the pipeline", width="30em", options=list(orders.items())
        )
        cuts = enumerate(even_partition(self.costs, self.order.value).cuts[1:-1], start=1)
        tooltip = "Place {} of the pipeline has the layers before this one"
        self.cuts = tuple(
            slider(f"Place {place} ends", tooltip.format(place), cut, 1, self.costs.profile.num_layers, width="24em")
            for place, cut in cuts
        )
        presets: dict[str, tuple[str, Callable[[], Partition]]] = {
            "Eq. 3": ("The best cuts in this order that fit", lambda: partition_in_order(self.costs, self.order.value)),
            "By speed": (
                "FTPipeHD: memory is not looked at",
                lambda: partition_in_order(self.costs, self.order.value, in_memory=False),
            ),
            "Even": ("PipeDream, as the paper uses it", lambda: even_partition(self.costs, self.order.value)),
            "Best order": ("Eq. 3 over all orders of all sets of devices", lambda: partition_in_any_order(self.costs)),
        }
        buttons = [
            button(name, tooltip, "magic", partial(self._take, find)) for name, (tooltip, find) in presets.items()
        ]
        super().__init__(
            [widgets.HBox([self.order, *buttons], layout=WRAPPED), widgets.HBox(self.cuts, layout=WRAPPED)],
            [self.order, *self.cuts],
            lambda: self.partition,
            self._price,
            tabs=("When (Gantt chart)", "Memory"),
            refused="No pipeline.",
        )

    @property
    def partition(self) -> Partition:
        """Return the settings of the controls."""
        order, cuts = self.order.value, (0, *(end.value for end in self.cuts), self.costs.profile.num_layers)
        for rank, (start, stop) in zip(order, pairwise(cuts), strict=True):
            if stop <= start:
                request = f"Layers [{start}, {stop}) on '{self.costs.cluster.devices[rank].name}' were asked for."
                raise ConfigError(request, "It has none.", "Move its end up, or the one before down.")
        return Partition(pace_s=pace_of(self.costs, order, cuts), order=order, cuts=cuts)

    @property
    def answer(self) -> list[int]:
        """Return the settings of the controls as one list: the order, then the number of layers of each place."""
        partition = self.partition
        return [*partition.order, *(stop - start for start, stop in pairwise(partition.cuts))]

    def _take(self, find: Callable[[], Partition]) -> None:
        partition = find()
        if partition.pace_s == math.inf or len(partition.order) < len(self.order.value):
            idle = (
                "In this order nothing fits."
                if partition.pace_s == math.inf
                else "The best set of devices leaves some out."
            )
            self.message.error(f"{idle} Choose another order.")
            return
        with self.setting():
            self.order.value = partition.order
            for end, cut in zip(self.cuts, partition.cuts[1:-1], strict=True):
                end.value = cut

    def _price(self, partition: Partition) -> None:
        costs, rows, parts, over_budget = self.costs, [], {}, []
        for behind, rank, (start, stop) in zip(
            reversed(range(len(partition.order))), partition.order, pairwise(partition.cuts), strict=True
        ):
            device, need = (
                costs.cluster.devices[rank],
                costs.need(rank, behind, start, stop, num_stages=len(partition.order)),
            )
            stashed = behind * trainable_bytes(costs.profile.layers[rank][start:stop])
            parts[rank] = need.purposes | {"weights": need.weights_bytes - stashed, "stashed versions": stashed}
            sizes = {
                "num_layers": stop - start,
                "behind": behind,
                "batch": costs.batch_size,
                "tokens": costs.memory_length,
            }
            seconds, over = float(costs.seconds(rank)[start, stop]), need.total_bytes - device.memory_bytes
            over_budget += [f"{device.name} lacks {size_words(over)}"] * (over > 0)
            need_text = [
                size_words(nbytes)
                for nbytes in (need.total_bytes, printed_need(need, **sizes, **self._sizes), device.memory_bytes)
            ]
            rows.append(
                (
                    device.name,
                    f"{start}-{stop - 1}",
                    f"{behind}",
                    f"{seconds:.3g} s",
                    *need_text,
                    "too little" * (over > 0),
                )
            )
        long_s = (pipeline(costs, partition, 2 * LONG).makespan_s - pipeline(costs, partition, LONG).makespan_s) / LONG
        best_s = partition_in_order(costs, partition.order).pace_s
        against = (
            f"{partition.pace_s / best_s - 1:+.0%} against Eq. 3 in this order"
            if best_s < math.inf
            else "nothing fits in this order"
        )
        words = f"{partition.pace_s:.3g} s a mini-batch in the long run ({against})"
        first = f"Out of memory: {', '.join(over_budget)}" if over_budget else words
        self.headline.say(first, f"{f'if it did fit: {words}; ' * bool(over_budget)}{long_s:.3g} s in the simulator")
        columns = (
            "device",
            "layers",
            "stashed versions",
            "a mini-batch",
            "needs",
            "by Eq. 1 and 2 as printed",
            "has",
            "",
        )
        self.tabulate(Table(columns, rows))
        self.show(
            lambda: gantt(pipeline(costs, partition, SHOWN, title=f"{SHOWN} mini-batches into an empty pipeline")),
            lambda: needs(
                parts, costs.cluster, title="What each device needs, stashed versions of its weights included"
            ),
        )


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


def head_profile(seed: int) -> HeadProfile:
    """Return a random profile of 12 heads on a device with three processors."""
    draw = random.Random(seed)
    drawn = iter(lambda: random_profile(draw), None)
    return next(
        drawn_profile for drawn_profile in drawn if drawn_profile.num_heads == 12 and len(drawn_profile.seconds) == 3
    )


class HeadsLab(Explorer):
    """A slider for each processor's attention heads, and Algorithm 1's epsilon; yours, Algorithm 1's and the optimum
    (computed).
    """

    def __init__(self, profile: HeadProfile) -> None:
        self.profile, most = profile, profile.num_heads
        even = proportional_parts(most, (1,) * len(profile.seconds))
        self.counts = tuple(
            slider(f"Processor {number}", f"Heads on processor {number}", count, 0, most, width="24em")
            for number, count in enumerate(even, start=1)
        )
        tooltip, options = (
            "Algorithm 1's epsilon, as a share of the profile's largest step",
            [(epsilon_name(share), share) for share in EPSILONS],
        )
        self.epsilon = described(widgets.SelectionSlider, "Epsilon", tooltip, value=0.5, options=options)
        super().__init__(
            [widgets.HBox(self.counts, layout=WRAPPED), self.epsilon],
            [*self.counts, self.epsilon],
            lambda: (tuple(count.value for count in self.counts), self.epsilon.value),
            lambda request: self._time(*request),
        )

    def _time(self, mine: tuple[int, ...], epsilon: float) -> None:
        profile, best = self.profile, best_allocation(self.profile)
        unit, over = time_unit(max(row[-1] for row in profile.seconds)), sum(mine) - profile.num_heads
        printed = allocate_as_printed(profile, epsilon_s=epsilon * profile.largest_step_s)
        allocations = {"yours": mine, "Algorithm 1": printed or (), "optimum": best}
        times = {
            name: unit.text(profile.time_s(counts)) if counts else "nothing" for name, counts in allocations.items()
        }
        lines = (f"{name} {'-'.join(map(str, counts))}: {times[name]}" for name, counts in allocations.items())
        words = f"{profile.time_s(mine) / profile.time_s(best) - 1:+.0%} against the optimum"
        if over:
            words = f"{counted(abs(over), 'head')} too {'many' if over > 0 else 'few'}"
        self.headline.say(words, "; ".join(lines) + " (computed from the profile)")
        self.show(
            lambda: _heads_figure(profile, {name: counts for name, counts in allocations.items() if counts}, unit)
        )


def _heads_figure(profile: HeadProfile, allocations: Mapping[str, Sequence[int]], unit: Unit) -> go.Figure:
    figure, names = go.Figure(), [f"processor {number + 1}" for number in range(len(profile.seconds))]
    for colour, (name, counts) in zip(CYCLE, allocations.items(), strict=False):
        times = [
            row[count - 1] * unit.factor if count else 0.0 for row, count in zip(profile.seconds, counts, strict=True)
        ]
        figure.add_bar(
            x=names, y=times, name=name, marker={"color": colour}, text=[f"{count} heads" for count in counts]
        )
    figure.update_yaxes(title=unit.name)
    title = "A layer's heads, computed at the same time"
    return finish(figure, title=title, label="computed", height=400)


def recovery_table(reports: Mapping[str, Report]) -> Table:
    """Return the cost of each change of the devices, of several runs by name."""
    rows = []
    for name, report in reports.items():
        for recovery in report.recoveries:
            parts = (recovery.noticed_s, recovery.planned_s, recovery.resumed_s, recovery.stood_still_s)
            of_simulation, of_run = (
                (recovery.seconds, None) if report.mode == "simulate" else (recovery.predicted_s, recovery.seconds)
            )
            totals = ("" if seconds is None else f"{seconds:.2f}" for seconds in (of_simulation, of_run))
            rows.append(
                (
                    name,
                    recovery.what,
                    *(f"{seconds:.2f}" for seconds in parts),
                    f"{recovery.repeated}",
                    *totals,
                    report.mark,
                )
            )
        if not report.recoveries:
            reason = "no step followed the change" if report.job.faults else "nothing changed"
            rows.append((name, reason, *["–"] * 7, ""))
    columns = (
        "run",
        "what",
        "noticed",
        "planned",
        "loaded and done",
        "stood still",
        "steps again",
        "simulated",
        "measured",
        "",
    )
    return Table(columns, rows, title="Seconds from a change of the devices to the end of the next step")
