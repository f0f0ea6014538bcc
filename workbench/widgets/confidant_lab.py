"""Labs of Confidant: partitions by hand, versions of weights, stale gradients, heads over processors, recoveries (sections 2.3 and 3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, permutations

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.program import Program
from workbench.core.report import Report
from workbench.core.schedule import STEP, Schedule
from workbench.core.timeline import Timeline
from workbench.planners.confidant import (
    Partition,
    StageCosts,
    asynchronous_plan,
    even_partition,
    pace_of,
    partition_in_any_order,
    partition_in_order,
    printed_need,
)
from workbench.planners.heads import HeadProfile, allocate_as_printed, best_allocation
from workbench.planners.memory import readable
from workbench.plots import gantt, needs
from workbench.plots.style import CYCLE, LEGEND_BELOW, finish, time_unit
from workbench.profiler.analytic import analytic_profile
from workbench.reproduce.confidant.heads import random_profile
from workbench.reproduce.confidant.testbed import description
from workbench.reproduce.ringada.training import SAMPLES, equal_blocks
from workbench.schedules import PlanCosts, asynchronous_1f1b, insert_transfers
from workbench.schedules.plan_costs import StashingCosts, trainable_bytes
from workbench.simulator import simulate
from workbench.widgets.controls import BIG_FIRST, Html, button, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.planning import as_described
from workbench.widgets.tables import Table, lines

SHOWN, LONG = 6, 12
"""Mini-batches of a Gantt chart; and of which the long run's pace is the mean."""


def pipeline(costs: StageCosts, partition: Partition, count: int, *, title: str = "") -> Timeline:
    """Return some mini-batches through an empty asynchronous pipeline, whether or not memory suffices (simulated)."""
    plan = asynchronous_plan(costs, partition, method="confidant", check_memory=False)
    sizes, world = (costs.batch_size,) * count, costs.cluster.world_size
    of_plan = PlanCosts(costs.profile, costs.cluster, plan, sizes=sizes, lengths=(costs.memory_length,) * count)
    schedule = insert_transfers(asynchronous_1f1b(plan, count, world_size=world))
    return simulate(Program.on(costs.cluster, schedule, StashingCosts(of_plan)), title=title, memory=False)


def by_hand(costs: StageCosts, order: Sequence[int], cuts: Sequence[int]) -> Partition:
    """Return a partition of one's own.  cuts: see Partition.  Raises ConfigError for a device without a layer."""
    for rank, (start, stop) in zip(order, pairwise(cuts), strict=True):
        if stop <= start:
            name = costs.cluster.devices[rank].name
            raise ConfigError(
                f"Layers [{start}, {stop}) on '{name}' were asked for.", "It has none.", "Move its end up, or the one before down."
            )
    return Partition(pace_s=pace_of(costs, order, cuts), order=tuple(order), cuts=tuple(cuts))


class PartitionLab(Explorer):
    """Sliders for the cuts of a model over devices, and their order; pace, Gantt chart and memory of the asynchronous pipeline.

    costs: what Eq. 3 goes by.  partition: as the controls have it; reading it raises ConfigError for a device without a layer.
    """

    def __init__(self, model: str, cluster: Cluster, *, batch_size: int, tokens: int) -> None:
        self._model, bare = description(model), as_described(cluster)
        sizes = {"batch_sizes": (batch_size,), "sequence_lengths": (tokens,)}
        profile = analytic_profile(self._model, bare, technique="full", **sizes)  # type: ignore[arg-type]
        self.costs = StageCosts(profile, bare, batch_size=batch_size, sequence_length=tokens, memory_length=tokens)
        world, layers = range(cluster.world_size), profile.num_layers
        orders = {" - ".join(cluster.devices[rank].name for rank in order): order for order in permutations(world)}
        self.order = described(widgets.Dropdown, "Order", "Who comes first in the pipeline", width="30em", options=list(orders.items()))
        self.cuts = tuple(
            described(
                widgets.IntSlider,
                f"End of device {at}",
                f"Place {at} of the pipeline has the layers before this one",
                value=cut,
                min=1,
                max=layers,
            )
            for at, cut in enumerate(even_partition(self.costs, tuple(world)).cuts[1:-1], start=1)
        )
        presets: dict[str, tuple[str, Callable[[], Partition]]] = {
            "Eq. 3": ("The best cuts in this order that fit", lambda: partition_in_order(self.costs, self.order.value)),
            "By speed": ("FTPipeHD: memory is not looked at", lambda: partition_in_order(self.costs, self.order.value, in_memory=False)),
            "Even": ("PipeDream, as the paper uses it", lambda: even_partition(self.costs, self.order.value)),
            "Best order": ("Eq. 3 over all orders of all devices", lambda: partition_in_any_order(self.costs)),
        }
        buttons = [button(name, told, "magic", lambda make=make: self._take(make())) for name, (told, make) in presets.items()]  # type: ignore[misc]
        self.table = Html()
        rows = [widgets.HBox([self.order, *buttons], layout=widgets.Layout(flex_flow="row wrap")), widgets.HBox(self.cuts)]
        super().__init__(
            rows,
            [self.order, *self.cuts],
            lambda: self.partition,
            self._price,
            tabs=("When (Gantt chart)", "Memory"),
            below=[self.table],
            refused="No pipeline.",
        )

    @property
    def partition(self) -> Partition:
        """Return what the controls say."""
        cuts = (0, *(slider.value for slider in self.cuts), self.costs.profile.num_layers)
        return by_hand(self.costs, self.order.value, cuts)

    def _take(self, found: Partition) -> None:
        if found.pace_s == float("inf"):
            self.message.error("In this order nothing fits. Choose another order.")
        elif len(found.order) < len(self.order.value):
            self.message.error(f"The best set leaves devices out: {len(found.order)} of {len(self.order.value)} work.")
        else:
            with self.setting():
                self.order.value = found.order
                for slider, cut in zip(self.cuts, found.cuts[1:-1], strict=True):
                    slider.value = cut

    def _price(self, made: Partition) -> None:
        costs, devices, last = self.costs, self.costs.cluster.devices, len(made.order) - 1
        rows, parts, lacking = [], {}, []
        for at, (rank, (start, stop)) in enumerate(zip(made.order, pairwise(made.cuts), strict=True)):
            behind = last - at
            need = costs.need(rank, behind, start, stop)
            stashed = behind * trainable_bytes(costs.profile.layers[rank][start:stop])
            parts[rank] = {
                "weights": need.weights_bytes - stashed,
                "stashed versions": stashed,
                "gradients and optimizer": need.gradient_bytes + need.optimizer_bytes,
                "activations and messages": need.context_bytes + need.workspace_bytes + need.boundary_bytes,
            }
            printed = printed_need(
                need,
                num_layers=stop - start,
                behind=behind,
                heads=self._model.heads,
                batch=costs.batch_size,
                tokens=costs.memory_length,
                hidden=self._model.hidden,
                feed_forward=self._model.feed_forward,
            )
            budget, seconds = devices[rank].memory_bytes, float(costs.stage(rank, 0, in_memory=False)[start, stop])
            over = need.total_bytes > budget
            lacking += [f"{devices[rank].name} lacks {readable(need.total_bytes - budget)}"] if over else []
            rows.append((
                devices[rank].name, f"{start}-{stop - 1}", f"{behind}", f"{seconds:.3g} s", readable(need.total_bytes), readable(printed),
                f"{readable(budget)}{': too little' * over}",
            ))  # fmt: skip
        long_s = (pipeline(costs, made, 2 * LONG).makespan_s - pipeline(costs, made, LONG).makespan_s) / LONG
        best = partition_in_order(costs, made.order)
        against = (
            f"{made.pace_s / best.pace_s - 1:+.0%} against Eq. 3 in this order"
            if best.pace_s < float("inf")
            else "nothing fits in this order"
        )
        words = f"{made.pace_s:.3g} s a mini-batch in the long run ({against})"
        self.headline.value = BIG_FIRST.format(
            f"Out of memory: {', '.join(lacking)}" if lacking else words,
            f"{f'if it did fit: {words}; ' if lacking else ''}{long_s:.3g} s in the simulator, where links and ways back count",
        )
        columns = ("device", "layers", "stashed versions", "a mini-batch", "needs", "by Eq. 1 and 2 as printed", "has")
        self.table.value = Table(columns, rows)._repr_html_()
        self.show(
            lambda: gantt(pipeline(costs, made, SHOWN, title=f"{SHOWN} mini-batches into an empty pipeline")),
            lambda: needs(parts, costs.cluster, title="What each device needs, stashed weights and all"),
        )


def stashed(num_stages: int, count: int) -> tuple[Schedule, Timeline]:
    """Return mini-batches through equal stages, a forward pass 1 s and a backward pass 2 s, transfers for nothing (simulated)."""
    profile, cluster = equal_blocks(num_stages, num_stages, backward=2.0)
    costs = StageCosts(profile, cluster, batch_size=SAMPLES, sequence_length=1, memory_length=1)
    cut = even_partition(costs, tuple(range(num_stages)))
    schedule = asynchronous_1f1b(asynchronous_plan(costs, cut, method="confidant"), count)
    return schedule, pipeline(costs, cut, count, title=f"{count} mini-batches, asynchronous")


def versions_at(timeline: Timeline, rank: int, time_s: float) -> dict[int, list[int]]:
    """Return the versions of its weights that a device holds, each with the mini-batches that have come with it and not gone back yet."""
    held: dict[int, list[int]] = {0: []}
    newest = 0
    for span in sorted((one for one in timeline.spans if one.rank == rank), key=lambda one: one.start_s):
        versions = [value.part for value in span.op.reads if value.name == "weight"]
        if span.op.kind == "F" and span.start_s <= time_s:
            held.setdefault(versions[0], []).append(span.op.microbatch)
        elif span.op.kind == "B" and span.end_s <= time_s:
            held[versions[0]].remove(span.op.microbatch)
        elif span.op.kind == STEP and span.end_s <= time_s:
            newest = max(newest, *(value.part for value in span.op.writes))
    held.setdefault(newest, [])
    return {version: held[version] for version in sorted(held) if held[version] or version == newest}


def version_words(timeline: Timeline, rank: int, time_s: float) -> str:
    """Return versions_at in words, for a SchedulePlayer."""
    held = versions_at(timeline, rank, time_s)
    users = {version: f" for {', '.join(map(str, batches))}" if batches else "" for version, batches in held.items()}
    return "; ".join(f"v{version}{' (newest)' * (version == max(held))}{users[version]}" for version in sorted(held, reverse=True))


def version_table(num_stages: int, count: int) -> Table:
    """Return with which version of each stage's weights mini-batches go forward and back."""
    schedule, _ = stashed(num_stages, count)
    read = {(op.stage, op.microbatch): op.reads[-1].part for ops in schedule.ops for op in ops if op.kind == "F"}
    rows = [(f"{batch}", *(f"v{read[stage, batch]}" for stage in range(num_stages)), f"v{batch + 1}") for batch in range(count)]
    columns = ("mini-batch", *(f"stage {stage}" for stage in range(num_stages)), "its update makes")
    return Table(columns, rows, title="Version with which a mini-batch goes forward, and back")


def delayed_descent(start: float, gradient: Callable[[float], float], learning_rate: float, delay: int, steps: int) -> list[float]:
    """Return the weights w_0 to w_steps of w_{t+1} = w_t - learning_rate x gradient(w_{t-delay}); before w_0 they are w_0."""
    found = [start]
    for step in range(steps):
        found.append(found[-1] - learning_rate * gradient(found[max(0, step - delay)]))
    return found


class StaleLab(Explorer):
    """A slider for the learning rate: descents into the bowl w^2 / 2 with gradients of 0 to 3 versions before (computed)."""

    def __init__(self, learning_rate: float = 0.3, steps: int = 40) -> None:
        self.learning_rate = described(
            widgets.FloatSlider,
            "Learning rate",
            "How far a step goes along its gradient",
            value=learning_rate,
            min=0.05,
            max=1.2,
            step=0.01,
        )
        self._steps = steps
        super().__init__([self.learning_rate], [self.learning_rate], lambda: self.learning_rate.value, self._descend)

    def _descend(self, rate: float) -> None:
        paths = {delay: delayed_descent(1.0, lambda w: w, rate, delay, self._steps) for delay in range(4)}
        ends = ", ".join(f"{delay}: {abs(path[-1]):.2g}" for delay, path in paths.items())
        worse = [f"{delay}" for delay, path in paths.items() if max(map(abs, path[-10:])) > 1]
        words = f"Delays of {', '.join(worse)} run away" if worse else "All come down"
        self.headline.value = BIG_FIRST.format(words, f"|w| after {self._steps} steps by delay: {ends} (computed)")
        series = {f"delay {delay}": [(float(at), max(-3.0, min(3.0, w))) for at, w in enumerate(path)] for delay, path in paths.items()}
        self.show(lambda: lines(series, title="Descents with stale gradients", label="computed", x_title="step", y_title="w, cut at 3"))


def head_profile(seed: int, *, heads: int = 12, processors: int = 3) -> HeadProfile:
    """Return a random profile of a device with so many processors."""
    draw = random.Random(seed)
    while (found := random_profile(draw)).num_heads != heads or len(found.seconds) != processors:
        pass
    return found


class HeadsLab(Explorer):
    """A slider for each processor's attention heads, and Algorithm 1's epsilon; yours, Algorithm 1's and the optimum (computed)."""

    def __init__(self, profile: HeadProfile, epsilon_steps: float = 0.5) -> None:
        self.profile, most = profile, profile.num_heads
        self.counts = tuple(
            described(widgets.IntSlider, f"Processor {at}", f"Heads on processor {at}", width="22em", value=count, min=0, max=most)
            for at, count in enumerate(_evenly(most, len(profile.seconds)), start=1)
        )
        told = "Algorithm 1's epsilon, as a share of the profile's largest step"
        self.epsilon = described(
            widgets.SelectionSlider,
            "Epsilon",
            told,
            value=epsilon_steps,
            options=[("0.125", 0.125), ("0.25", 0.25), ("0.5", 0.5), ("1", 1.0), ("no limit", 1e9)],
        )
        controls = [*self.counts, self.epsilon]
        super().__init__(
            [widgets.HBox(self.counts, layout=widgets.Layout(flex_flow="row wrap")), self.epsilon],
            controls,
            lambda: (tuple(slider.value for slider in self.counts), self.epsilon.value),
            lambda asked: self._time(*asked),
        )

    def _time(self, mine: tuple[int, ...], epsilon: float) -> None:
        profile, unit = self.profile, time_unit(max(row[-1] for row in self.profile.seconds))
        printed = allocate_as_printed(profile, epsilon_s=epsilon * profile.largest_step_s)
        found: dict[str, tuple[int, ...] | None] = {"yours": mine, "Algorithm 1": printed, "optimum": best_allocation(profile)}
        said = [
            f"{name} {'-'.join(map(str, counts))}: {unit.text(profile.time_s(counts))}" if counts else f"{name}: nothing"
            for name, counts in found.items()
        ]
        over = sum(mine) - profile.num_heads
        words = (
            f"{abs(over)} head{'s' * (abs(over) > 1)} too {'many' if over > 0 else 'few'}"
            if over
            else f"{profile.time_s(mine) / profile.time_s(found['optimum'] or mine) - 1:+.0%} against the optimum"
        )
        self.headline.value = BIG_FIRST.format(words, "; ".join(said) + " (computed from the profile)")
        self.show(lambda: _heads_figure(profile, {name: counts for name, counts in found.items() if counts}))


def _evenly(total: int, parts: int) -> list[int]:
    return [total * (at + 1) // parts - total * at // parts for at in range(parts)]


def _heads_figure(profile: HeadProfile, found: Mapping[str, Sequence[int]]) -> go.Figure:
    unit, figure = time_unit(max(row[-1] for row in profile.seconds)), go.Figure()
    names = [f"processor {at + 1}" for at in range(len(profile.seconds))]
    for colour, (name, counts) in zip(CYCLE, found.items(), strict=False):
        times = [row[count - 1] * unit.factor if count else 0.0 for row, count in zip(profile.seconds, counts, strict=True)]
        figure.add_bar(x=names, y=times, name=name, marker={"color": colour}, text=[f"{count} heads" for count in counts])
    figure.update_yaxes(title=unit.name)
    return finish(
        figure, title="A layer's heads, computed at the same time", label="computed", height=400, margin={"b": 95}, legend=LEGEND_BELOW
    )


def recovery_table(reports: Mapping[str, Report]) -> Table:
    """Return what each change of the devices cost, of several runs by name."""
    rows = []
    for name, report in reports.items():
        for one in report.recoveries:
            simulated = one.seconds if report.mode == "simulate" else one.predicted_s
            measured = "" if report.mode == "simulate" else f"{one.seconds:.2f} s{report.mark}"
            parts = [f"{seconds:.2f}" for seconds in (one.noticed_s, one.planned_s, one.resumed_s)]
            still = f"{one.stood_still_s:.2f} s"
            rows.append((name, one.what, *parts, still, f"{one.repeated}", "" if simulated is None else f"{simulated:.2f} s", measured))
        if not report.recoveries:
            rows.append((name, "nothing changed", *[""] * 7))
    columns = (
        "run",
        "what",
        "noticed, s",
        "planned again, s",
        "loaded and done, s",
        "stood still",
        "steps done again",
        "simulated",
        "measured",
    )
    return Table(columns, rows, title="From the fault to the end of the next step")
