"""Cuts of a model over the devices of an asynchronous pipeline, chosen by hand: pace, Gantt chart and memory
(Confidant, section 2.3, Eq. 1-3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, permutations

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import trainable_bytes
from workbench.core.timeline import Timeline
from workbench.core.units import size_words
from workbench.methods.confidant.equations import printed_need
from workbench.planners import Problem
from workbench.planners.asynchronous import (
    asynchronous_plan,
    even_partition,
    partition_in_any_order,
    partition_in_order,
)
from workbench.planners.equation3 import Equation3, Partition, pace_of
from workbench.plots import gantt, needs
from workbench.profiler.analytic import analytic_profile
from workbench.profiler.descriptions import describe
from workbench.simulator.steps import mini_batches
from workbench.widgets.controls import button, described, slider
from workbench.widgets.explorer import Explorer
from workbench.widgets.tables import Table
from workbench_labs.planning import as_described

SHOWN, LONG = 6, 12
"""Number of mini-batches in a Gantt chart, and number over which the long run's pace is averaged."""


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
            [
                widgets.HBox(row, layout=widgets.Layout(flex_flow="row wrap"))
                for row in ([self.order, *buttons], self.cuts)
            ],
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
        left_out = [self.costs.cluster.devices[rank].name for rank in self.order.value if rank not in partition.order]
        if partition.pace_s == math.inf:
            found = "In this order nothing fits into the devices' memory."
            self.message.error(f"{found} Choose another order, or By speed, which ignores memory.")
            return
        if left_out:
            found = f"The best pipeline leaves out {', '.join(left_out)}; here each device has layers."
            self.message.error(f"{found} Choose an order, and move the ends by hand.")
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
            device = costs.cluster.devices[rank]
            need = costs.need(rank, behind, start, stop, num_stages=len(partition.order))
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
