"""An interactive ring: frozen layers, waiting devices, and the time of a mini-batch (RingAda, sections III and IV-B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import ipywidgets as widgets

from workbench.core.plan import Plan
from workbench.core.timeline import Timeline
from workbench.methods.ringada.rounds import Policy, Unfreezing
from workbench.planners.ringada import ring_stages
from workbench.plots import gantt
from workbench.reproduce.ringada.training import SAMPLES, equal_blocks, simulated
from workbench.schedules.ringada import Iteration, terminator
from workbench.widgets.controls import BIG_FIRST, Html, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.tables import Table

MICRO_BATCHES = (1, 2, 4, 8)
TOGETHER = 4
"""Number of mini-batches shown."""


def ring_plan(blocks: tuple[int, ...]) -> Plan:
    """Return the ring of devices with these numbers of blocks, in order."""
    stages = ring_stages(range(len(blocks)), tuple(accumulate(blocks, initial=0)), SAMPLES)
    return Plan(method="ringada", stages=stages, micro_batch_size=SAMPLES, num_micro_batches=1)


def ring_timeline(blocks: tuple[int, ...], depth: int, *, micro_batches: int = 1, initiator: int = 0, transfer_s: float = 0.0) -> Timeline:
    """Return some mini-batches of one initiator, one after the other; a block's forward pass takes 1 s, and its backward pass too.

    depth: trained adapters, counted from the top.  transfer_s: seconds of an activation or gradient on a link.
    """
    profile, cluster = equal_blocks(sum(blocks), len(blocks), transfer_s=transfer_s)
    iterations = [Iteration(initiator, sum(blocks) - depth, micro_batches)] * TOGETHER
    timeline = simulated(profile, cluster, ring_plan(blocks), iterations)
    cut = f"{TOGETHER} mini-batches cut into {micro_batches}" if micro_batches > 1 else f"{TOGETHER} whole mini-batches"
    return replace(timeline, title=f"{cut}, {depth} adapters trained")


def ring_table(blocks: tuple[int, ...], depth: int, initiator: int = 0) -> Table:
    """Return the compute and the traffic of each device of a ring."""
    plan, first = ring_plan(blocks), sum(blocks) - depth
    end, rows = terminator(plan, first), []
    for number, stage in enumerate(plan.stages):
        frozen = range(stage.start, min(stage.stop, first))
        following = f"device {(number + 2)}" if number + 1 < len(blocks) else f"device {initiator + 1}, the initiator"
        back = "" if number < end else "nothing: here it ends" if number == end else f"gradient to device {number}"
        roles = [name for name, is_it in (("initiator", number == initiator), ("terminator", number == end)) if is_it]
        rows.append((
            f"device {number + 1}", ", ".join(roles), f"{stage.start + 1}-{stage.stop}", f"{len(frozen)}",
            f"{stage.num_layers - len(frozen)}", f"activation to {following}", back,
        ))  # fmt: skip
    columns = ("device", "role", "blocks", "frozen", "trained", "sends forward", "sends back")
    return Table(columns, rows, title="What travels for a mini-batch; its labels never do")


def policy_seconds(
    unfreezing: Unfreezing, num_layers: int, steps: int, seconds: Mapping[int, float], every: int, *, per_round: int = 16
) -> list[tuple[float, float]]:
    """Return (mini-batches, time so far) of a fixed unfreezing schedule.  seconds: of a mini-batch, by the number of trained adapters."""
    policy, passed, points = Policy(num_layers=num_layers, unfreezing=unfreezing, every=every), 0.0, [(0.0, 0.0)]
    for step in range(steps):
        passed += seconds[num_layers - policy.first_unfrozen(step // per_round, step)]
        if (step + 1) % (steps // 20) == 0:
            points.append((float(step + 1), passed))
    return points


class RingLab(Explorer):
    """Sliders for depth, micro-batches and initiator of a ring of equal devices; its table and Gantt chart below (simulated)."""

    def __init__(self, blocks: tuple[int, ...] = (3, 3, 3, 3), depth: int = 3) -> None:
        self.blocks = blocks
        layers, size = sum(blocks), len(blocks)
        self.depth = described(
            widgets.IntSlider, "Trained adapters", "How many adapters are trained, from the top", value=depth, min=1, max=layers
        )
        self.micro_batches = described(
            widgets.SelectionSlider, "Micro-batches", "Into how many parts a mini-batch is cut", value=1, options=MICRO_BATCHES
        )
        self.initiator = described(widgets.IntSlider, "Initiator", "Whose data it is", value=1, min=1, max=size)
        self.table = Html()
        controls = [self.depth, self.micro_batches, self.initiator]
        super().__init__(
            [widgets.HBox(controls)],
            controls,
            lambda: (self.depth.value, self.micro_batches.value, self.initiator.value - 1),
            lambda asked: self._answer_to(*asked),
            below=[self.table],
        )

    def _answer_to(self, depth: int, micro_batches: int, initiator: int) -> None:
        timeline = ring_timeline(self.blocks, depth, micro_batches=micro_batches, initiator=initiator)
        each, least = timeline.makespan_s / TOGETHER, 2 * depth
        words = f"{each:.3g} layer times a mini-batch, {2 * sum(self.blocks) / each:.2f} times as fast as one device"
        rule = f"whole mini-batches with {depth} trained adapters take at least {least} layer times on any number of devices"
        self.headline.value = BIG_FIRST.format(words, f"{rule} (simulated, {TOGETHER} mini-batches from beginning to end)")
        self.table.value = ring_table(self.blocks, depth, initiator)._repr_html_()
        self.show(lambda: gantt(timeline))
