"""Time and memory of Single, PipeAdapter and RingAda (RingAda, section IV, Table I)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from statistics import fmean
from typing import Any

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.plan import Plan
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.planners.ringada import RingPricer, plan_ring
from workbench.profiler.analytic import layer_costs
from workbench.profiler.descriptions import FP32_BYTES, ModelDescription
from workbench.reproduce.items import Item, Rows
from workbench.reproduce.result import Number, Result, Settings, printed, read_constants
from workbench.schedules.costs import Crossing
from workbench.schedules.ringada import Iteration, RingLayout, ring_costs, ring_round
from workbench.simulator import simulate

PAPER = "ringada"
SINGLE, PIPE, RING, FEDERATED, PARALLEL = "Single", "PipeAdapter", "RingAda", "FedAvg", "Parallel Adapters"
TIME = "convergence time"
SAMPLES = 32  # of a mini-batch; only the number of its parts matters
MICRO_BATCHES = (1, 2, 4, 8)
TOGETHER = 40
"""Mini-batches simulated one after the other and averaged: the paper's number between two unfreezings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/ringada/constants.toml, which states the source of each value."""

    layer_s: float
    backward: float
    micro_batches: int
    epochs: float
    unfreeze_every: float
    devices: int
    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int

    @property
    def model(self) -> ModelDescription:
        """Return mBERT's sizes."""
        return ModelDescription(
            name="mBERT",
            kind="encoder",
            num_layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // 64,
            feed_forward=self.feed_forward,
            vocab=self.vocabulary,
            positions=self.positions,
        )


load_constants = partial(read_constants, PAPER, Constants)


def depth_of(constants: Constants, scheme: str, step: int) -> int:
    """Return the number of trained adapters in a step."""
    layers = constants.layers
    return min(layers, 1 + int(step // constants.unfreeze_every)) if scheme in (RING, PARALLEL) else layers


@lru_cache(maxsize=64)
def layer_times(constants: Constants, scheme: str, micro_batches: int) -> tuple[dict[int, float], Plan | None]:
    """Return the time of a mini-batch by the number of trained adapters, in forward passes of one block, and the plan.

    PipeAdapter is the variant without stale weights.  FedAvg trains a mini-batch on each device at once; its averages are free.
    Parallel Adapters are on the ring; their cost is that of their FLOPs with 128 tokens.
    """
    layers, steps = constants.layers, range(round(constants.epochs))
    if scheme in (SINGLE, FEDERATED):
        at_once = constants.devices if scheme == FEDERATED else 1
        return {layers: (1 + constants.backward) * layers / at_once}, None
    depths = Counter(depth_of(constants, scheme, step) for step in steps)
    block = layer_costs(constants.model, "parallel_adapters", batch=1, sequence_length=128)[1]
    side = block.side_forward_flops / block.forward_flops if scheme == PARALLEL else 0.0
    profile, cluster = equal_blocks(layers, constants.devices, constants.backward, side=side)
    sizes: Any = {"batch_size": SAMPLES, "micro_batches": micro_batches, "sequence_length": 1}
    plan = plan_ring(RingPricer(profile, cluster, **sizes, depths=depths, has_side=side > 0))
    rounds = {depth: [Iteration(0, layers - depth, micro_batches)] * TOGETHER for depth in depths}
    found = {depth: simulated(profile, cluster, plan, each, has_side=side > 0).makespan_s / TOGETHER for depth, each in rounds.items()}
    return found, plan


def equal_blocks(layers: int, devices: int, backward: float = 1.0, transfer_s: float = 0.0, side: float = 0.0) -> tuple[Profile, Cluster]:
    """Return blocks whose forward pass of a mini-batch takes 1 s, and equal devices.

    backward: over forward.  transfer_s: of a mini-batch's activation on a link.  side: forward pass of a side layer, if such are trained
    next to the blocks; its backward pass takes twice as long.
    """
    grid = Grid(batch_sizes=(1, SAMPLES), sequence_lengths=(1,), seconds=((1 / SAMPLES,), (1.0,)))
    forward, back = (grid.scaled(side), grid.scaled(2 * side)) if side else (grid, grid.scaled(backward))
    times = {"P": grid, "F": forward, "B": back, "A": back}
    sizes = dict.fromkeys(("frozen_bytes", "trainable_bytes", "output_bytes_per_token", "context_bytes_per_token"), 0)
    block = LayerProfile(name="block", times=times, **sizes)
    profile = Profile(model=f"{layers} equal blocks", method=PAPER, source="analytic", layers=((block,) * layers,) * devices)
    link = Link(bytes_per_s=FP32_BYTES * SAMPLES / transfer_s if transfer_s else 1e18)
    made = (Device(name=f"device {rank + 1}", flops_per_s=1e9, memory_bytes=10**9, link=link) for rank in range(devices))
    return profile, Cluster(name="equal", devices=tuple(made))


def simulated(profile: Profile, cluster: Cluster, plan: Plan, iterations: Sequence[Iteration], *, has_side: bool = False) -> Timeline:
    """Return a round of mini-batches of SAMPLES samples."""
    sizes = tuple(SAMPLES // one.num_micro_batches for one in iterations for _ in range(one.num_micro_batches))
    crossing = Crossing(hidden_size=1, side_width=int(has_side))
    layout = RingLayout(plan, iterations, sizes, (1,) * len(sizes))
    costs = ring_costs(profile, cluster, layout, crossing=crossing, head_values=1, beside_bytes=0)
    schedule = ring_round(plan, iterations, costs.seconds, in_flight=8, has_side=has_side)
    return simulate(Program.on(cluster, schedule, costs), memory=False)


def seconds_after(constants: Constants, scheme: str) -> tuple[float, ...]:
    """Return the time after each epoch, which is assumed to be one mini-batch."""
    times, _ = layer_times(constants, scheme, constants.micro_batches)
    steps = range(round(constants.epochs))
    return tuple(accumulate(constants.layer_s * times[depth_of(constants, scheme, step)] for step in steps))


def average(constants: Constants, scheme: str, micro_batches: int) -> float:
    """Return the layer times of a mini-batch, averaged over the run."""
    times, _ = layer_times(constants, scheme, micro_batches)
    return fmean(times[depth_of(constants, scheme, step)] for step in range(round(constants.epochs)))


def weights_mb(constants: Constants, scheme: str) -> float:
    """Return the MB of float32 weights on an average device; for RingAda each has a copy of the embedding (section III-A)."""
    model = constants.model
    embedding, blocks = model.embedding_params, sum(model.layer_params(layer) for layer in range(model.num_layers))
    held = {SINGLE: embedding + blocks, PIPE: (embedding + blocks) / constants.devices, RING: embedding + blocks / constants.devices}
    return FP32_BYTES * held[scheme] / 1e6


def ours(constants: Constants, executed: Mapping[tuple[str, str], float], scheme: str, quantity: str) -> Number:
    """Return our value of a cell, None if nothing was executed.  executed: the scores."""
    if quantity == "memory":
        return weights_mb(constants, scheme)
    return seconds_after(constants, scheme)[-1] if quantity == TIME else executed.get((scheme, quantity))


def _deviations(paper: Mapping[tuple[str, ...], float], constants: Constants) -> list[float]:
    """Return how many per cent each scheme's time is above the paper's."""
    return [100 * (seconds_after(constants, scheme)[-1] / paper[scheme, TIME] - 1) for scheme in (SINGLE, PIPE, RING)]


def table1(item: Item, settings: Settings) -> Result:
    """Simulate the times, count the weights, and train for the scores, if the settings say so."""
    constants, paper = load_constants(), printed(PAPER, "table1")
    scores, means = list[tuple[Number, ...]](), dict[tuple[str, str], float]()
    if settings.trains:
        from workbench.reproduce.ringada.executed import question_scores  # torch is slow to import

        scores, means = question_scores(settings)
    rows: list[tuple[Number, ...]] = []
    ratios, rings = dict[int, float](), dict[int, float]()
    for count in MICRO_BATCHES:
        single, pipe, own = (average(constants, scheme, count) for scheme in (SINGLE, PIPE, RING))
        plan = layer_times(constants, RING, count)[1]
        ratios[count], rings[count] = single / own, own
        rows.append((count, single, pipe, own, pipe / own, single / own, "" if plan is None else plan.partition()))
    times = {scheme: seconds_after(constants, scheme)[-1] / constants.epochs for scheme in (SINGLE, PIPE, RING)}
    ring, beside = (layer_times(constants, scheme, constants.micro_batches)[0] for scheme in (RING, PARALLEL))
    deviations = _deviations(paper, constants)
    trivial = [100 * (paper[SINGLE, TIME] / constants.devices / paper[scheme, TIME] - 1) for scheme in (SINGLE, PIPE, RING)]
    stashing, memory = (1 + constants.backward) * constants.layers / constants.devices, paper[RING, "memory"]
    others = (average(constants, PIPE, constants.micro_batches), stashing, average(constants, SINGLE, 1))
    depths = [(depth, own, *(other / own for other in others), beside[depth]) for depth, own in ring.items()]
    sensitivity = item.sensitivity(constants, partial(_deviations, paper), trivial)
    tables: dict[str, Rows] = {"micro": rows, "depths": depths, "sensitivity": sensitivity}
    return item.result(
        item.compare(partial(ours, constants, means)),
        tables=tables | ({"scores": scores} if scores else {}),
        holds={
            "order": times[RING] < times[PIPE] < times[SINGLE],
            "ratio": ratios[2] <= paper[SINGLE, TIME] / paper[RING, TIME] <= ratios[8],
            "stale": stashing < rings[8],
            "copies": weights_mb(constants, RING) > memory,
        }
        | ({"scores": means[RING, "F1"] < means[SINGLE, "F1"]} if scores else {}),
        f1="" if not scores else f"F1 {means[RING, 'F1']:.1f} and {means[SINGLE, 'F1']:.1f}",
        micro_batches=constants.micro_batches,
        single=times[SINGLE],
        pipe=times[PIPE],
        ring=times[RING],
        two=ratios[2],
        four=ratios[4],
        eight=ratios[8],
        low=-deviations[1],
        stashing=stashing,
        crossover=sum(own < stashing for own in ring.values()),
        beside=average(constants, PARALLEL, constants.micro_batches),
        least=rings[8],
        embedding=FP32_BYTES * constants.model.embedding_params / 1e6,
        whole=weights_mb(constants, SINGLE),
        needed=weights_mb(constants, RING),
        printed=memory,
    )
