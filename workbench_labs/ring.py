"""The ring to play with: its blocks, depth and initiator, in virtual time; its memory (RingAda, section IV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.core.plan import Plan, one_device_stages
from workbench.core.profile import Bytes
from workbench.core.timeline import Timeline
from workbench.methods.ringada.published import load_constants, simulated_round
from workbench.methods.ringada.schedule import Iteration, terminator
from workbench.plots import gantt, lines
from workbench.profiler.analytic import layer_costs
from workbench.simulator.steps import SAMPLES, equal_blocks
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench.widgets.tables import Table

TOGETHER = 4
BATCH_SIZE, TOKENS = 16, 128
BLOCKS = (3, 3, 3, 3)
"""Number of mini-batches shown."""


def ring_plan(blocks: tuple[int, ...]) -> Plan:
    """Return the ring of devices with these numbers of blocks, in order."""
    stages = one_device_stages(range(len(blocks)), tuple(accumulate(blocks, initial=0)), SAMPLES)
    return Plan(method="ringada", stages=stages, micro_batch_size=SAMPLES, num_micro_batches=1)


def ring_timeline(
    blocks: tuple[int, ...],
    depth: int,
    *,
    micro_batches: int = 1,
    initiator: int = 0,
    transfer_s: float = 0.0,
    count: int = TOGETHER,
) -> Timeline:
    """Return `count` mini-batches of one initiator, one after the other; a block's forward pass takes 1 s, and its
    backward pass too.

    depth: trained adapters, counted from the top.  transfer_s: seconds of an activation or gradient on a link.
    """
    profile, cluster = equal_blocks(sum(blocks), len(blocks), transfer_s=transfer_s)
    iterations = [Iteration(initiator, sum(blocks) - depth, micro_batches)] * count
    timeline = simulated_round(profile, cluster, ring_plan(blocks), iterations)
    cut = f"{count} mini-batches cut into {micro_batches}" if micro_batches > 1 else f"{count} whole mini-batches"
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


def ring_memory_bytes(blocks: Sequence[int], depth: int, block_bytes: int, context_bytes: int) -> list[int]:
    """Return each device's peak in a whole mini-batch, in bytes (simulated).

    context_bytes: the activations of a mini-batch that a trained block keeps for its backward pass.
    """
    profile, cluster = equal_blocks(sum(blocks), len(blocks))
    block = replace(profile.layers[0][0], frozen_bytes=block_bytes, context_bytes=Bytes(context_bytes // SAMPLES))
    profile = replace(profile, layers=((block,) * sum(blocks),) * len(blocks))
    iterations = [Iteration(0, sum(blocks) - depth, 1)]
    timeline = simulated_round(profile, cluster, ring_plan(tuple(blocks)), iterations, memory=True)
    return [max(sample.nbytes for sample in samples) for samples in timeline.memory]


def memory_by_depth() -> go.Figure:
    """Return the memory of the device that needs most, by trained adapters: mBERT's 12 blocks on four devices."""
    constants = load_constants()
    _, block, *_ = layer_costs(constants.model, "adapters", batch=BATCH_SIZE, sequence_length=TOKENS)
    context = block.context_bytes(BATCH_SIZE, TOKENS) // SAMPLES * SAMPLES
    blocks = [constants.layers // constants.devices] * constants.devices
    depths, in_mb = range(1, constants.layers + 1), 1e-6
    ring = [max(ring_memory_bytes(blocks, depth, block.frozen_bytes, context)) * in_mb for depth in depths]
    first = blocks[0] * (block.frozen_bytes + constants.devices * context) * in_mb
    single = [constants.layers * block.frozen_bytes * in_mb + depth * context * in_mb for depth in depths]
    series = {
        "one device": [*zip(map(float, depths), single, strict=True)],
        "PipeAdapter that never drains": [(float(depth), first) for depth in depths],
        "RingAda": [*zip(map(float, depths), ring, strict=True)],
    }
    on = f"mBERT on {constants.devices} devices, {BATCH_SIZE} samples of {TOKENS} tokens; without the embedding"
    words = {"title": "Memory of the device that needs most", "label": "simulated", "subtitle": on}
    return lines(series, x_title="trained adapters", y_title="MB", **words)


class RingLab(Explorer):
    """Sliders for depth, micro-batches and initiator of a ring of equal devices; its table and Gantt chart below
    (simulated).
    """

    def __init__(self) -> None:
        self.depth, self.micro_batches, self.initiator = controls = lab_controls("ring", depth=3)
        self.depth.max, self.initiator.max = sum(BLOCKS), len(BLOCKS)
        super().__init__(
            [widgets.HBox(controls)],
            controls,
            lambda: (self.depth.value, self.micro_batches.value, self.initiator.value - 1),
            lambda request: self._answer_to(*request),
        )

    def _answer_to(self, depth: int, micro_batches: int, initiator: int) -> None:
        timeline = ring_timeline(BLOCKS, depth, micro_batches=micro_batches, initiator=initiator)
        batch_s, least = timeline.makespan_s / TOGETHER, 2 * depth
        words = f"{batch_s:.3g} layer times a mini-batch, {2 * sum(BLOCKS) / batch_s:.2f} times as fast as one device"
        rule = (
            f"whole mini-batches with {depth} trained adapters take at least {least} layer times on any number of "
            "devices"
        )
        self.headline.say(words, f"{rule} (simulated, {TOGETHER} mini-batches from beginning to end)")
        self.tabulate(ring_table(BLOCKS, depth, initiator))
        self.show(lambda: gantt(timeline))
