"""Simulated seconds of one sequence under a plan, and what stands behind Table V: plans, and the same plans under our schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, product

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.planners.galaxy_plus import stack_lengths
from workbench.reproduce.galaxy_plus.systems import BASELINES, GALAXY, MEGATRON, OURS, run_system
from workbench.reproduce.galaxy_plus.testbed import ENVIRONMENTS, TABLE_V, Constants, cluster, profile
from workbench.reproduce.items import Rows
from workbench.reproduce.result import OOM, Number
from workbench.schedules.inference import InferenceCosts, InferenceLayout, inference_schedule
from workbench.simulator import simulate

KEPT = 1
"""Layers of each run of like layers that are simulated; every other takes what one more adds."""


def timeline(plan: InferencePlan, costs: InferenceProfile, on: Cluster, lengths: Sequence[int]) -> Timeline:
    """Return the simulated timeline of one sequence, all layers.  What a message costs is in the links' latency."""
    layout = InferenceLayout.build(plan, costs.stacks, lengths)
    prices = InferenceCosts(costs, on, layout, message_s=0.0)
    return simulate(Program.on(on, inference_schedule(layout, on.world_size), prices))


def sequence_s(plan: InferencePlan, costs: InferenceProfile, on: Cluster, lengths: Sequence[int]) -> float:
    """Return the simulated seconds of one sequence.

    Layers of one stack and one scheme (on one device, in a pipeline) are alike: of each such run one is simulated, and every further
    layer takes what a second one adds.  That is exact where every block begins in the same order on all devices, which a test compares
    with all layers; where messages of two blocks meet (both ways round the ring, keys and values) all layers are simulated.
    """
    if plan.both_ways or plan.paradigm == "sequence":
        return timeline(plan, costs, on, lengths).makespan_s
    runs = _runs(plan, costs)
    counts = [len(run) for run in runs]
    kept = [min(count, KEPT) for count in counts]

    def short_s(numbers: Sequence[int]) -> float:
        short_plan, short_costs = _shortened(plan, costs, runs, numbers)
        return timeline(short_plan, short_costs, on, lengths).makespan_s

    total = base = short_s(kept)
    for index, count in enumerate(counts):
        if count > KEPT:
            more = [number + (i == index) for i, number in enumerate(kept)]
            total += (count - KEPT) * (short_s(more) - base)
    return total


def _runs(plan: InferencePlan, costs: InferenceProfile) -> list[list[int]]:
    """Return the layers, counted through all stacks, in runs that are alike."""
    edges = [sum(plan.layers[: position + 1]) for position in range(len(plan.layers))]

    def alike(layer: int) -> tuple[int, int]:
        if plan.layers:
            return costs.stack_of(layer), sum(layer >= edge for edge in edges)
        return costs.stack_of(layer), plan.schemes[layer] if plan.schemes else 1

    return [list(run) for _, run in groupby(range(costs.num_layers), key=alike)]


def _shortened(
    plan: InferencePlan, costs: InferenceProfile, runs: Sequence[Sequence[int]], numbers: Sequence[int]
) -> tuple[InferencePlan, InferenceProfile]:
    left = [layer for run, number in zip(runs, numbers, strict=True) for layer in run[:number]]
    stacks = tuple(
        replace(shape, num_layers=sum(costs.stack_of(layer) == index for layer in left)) for index, shape in enumerate(costs.stacks)
    )
    edges = [sum(plan.layers[: position + 1]) for position in range(len(plan.layers))]
    layers = tuple(sum(edge - count <= layer < edge for layer in left) for edge, count in zip(edges, plan.layers, strict=True))
    schemes = tuple(plan.schemes[layer] for layer in left) if plan.schemes else ()
    return replace(plan, schemes=schemes, layers=layers), replace(costs, stacks=stacks)


def plans(constants: Constants) -> Rows:
    """Return every method's partition, devices and seconds, or what is missing."""
    rows: list[tuple[Number, ...]] = []
    for environment, model, system in product(ENVIRONMENTS, TABLE_V, (OURS, *BASELINES[::-1])):
        made = run_system(constants, model, environment, system)
        if made.plan is None:
            rows.append((model, environment, system, OOM, made.reason, None))
            continue
        plan, devices = made.plan, cluster(constants, environment).devices
        parts = f"layers {plan.layers}" if plan.layers else f"heads {plan.units}" if plan.units else "all heads"
        rows.append((model, environment, system, parts, ", ".join(devices[rank].name for rank in plan.ranks), made.seconds))
    return rows


def scheduled(constants: Constants) -> Rows:
    """Return the seconds of the same plans under this workbench's schedules: no waiting, one way round the ring and both ways."""
    rows = []
    for environment, model in product(ENVIRONMENTS, TABLE_V):
        costs = profile(constants, model, environment)
        lengths = stack_lengths(costs, constants.length(model), constants.decoder_tokens)
        row: list[Number] = [model, environment]
        for system in (OURS, GALAXY, MEGATRON):
            made = run_system(constants, model, environment, system)
            on = cluster(constants, environment, collectives=system == MEGATRON)
            ways = [] if made.plan is None else [made.plan, replace(made.plan, both_ways=True)]
            row.append(OOM if made.seconds is None else made.seconds)
            row += [sequence_s(way, costs, on, lengths) for way in ways[: 1 + (system == OURS)]] or [OOM] * (1 + (system == OURS))
        rows.append(row)
    return rows
