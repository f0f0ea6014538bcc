"""Plans of every method in the paper's environments, and the simulated seconds of one sequence under each (Galaxy+, section IV-A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.schedules.inference import InferenceCosts, InferenceLayout, inference_schedule
from workbench.simulator import simulate

KEPT = 1
"""Layers of each run of like layers that are simulated; every other takes what one more adds."""


def timeline(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> Timeline:
    """Return the simulated timeline of one sequence, all layers.  What a message costs is in the links' latency."""
    layout = InferenceLayout.build(plan, profile.stacks, lengths)
    costs = InferenceCosts(profile, cluster, layout, message_s=0.0)
    return simulate(Program.on(cluster, inference_schedule(layout, cluster.world_size), costs))


def sequence_s(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> float:
    """Return the simulated seconds of one sequence.

    Layers of one stack and one scheme (on one device, in a pipeline) are alike: of each such run one is simulated, and every further
    layer takes what a second one adds.  That is exact where every block begins in the same order on all devices, which a test compares
    with all layers; where messages of two blocks meet (both ways round the ring, keys and values) all layers are simulated.
    """
    if plan.both_ways or plan.paradigm == "sequence":
        return timeline(plan, profile, cluster, lengths).makespan_s
    runs = _runs(plan, profile)
    counts = [len(run) for run in runs]
    kept = [min(count, KEPT) for count in counts]

    def short_s(numbers: Sequence[int]) -> float:
        short_plan, short_profile = _shortened(plan, profile, runs, numbers)
        return timeline(short_plan, short_profile, cluster, lengths).makespan_s

    total = base = short_s(kept)
    for index, count in enumerate(counts):
        if count > KEPT:
            more = [number + (i == index) for i, number in enumerate(kept)]
            total += (count - KEPT) * (short_s(more) - base)
    return total


def _runs(plan: InferencePlan, profile: InferenceProfile) -> list[list[int]]:
    """Return the layers, counted through all stacks, in runs that are alike."""
    edges = [sum(plan.layers[: position + 1]) for position in range(len(plan.layers))]

    def alike(layer: int) -> tuple[int, int]:
        if plan.layers:
            return profile.stack_of(layer), sum(layer >= edge for edge in edges)
        return profile.stack_of(layer), plan.schemes[layer] if plan.schemes else 1

    return [list(run) for _, run in groupby(range(profile.num_layers), key=alike)]


def _shortened(
    plan: InferencePlan, profile: InferenceProfile, runs: Sequence[Sequence[int]], numbers: Sequence[int]
) -> tuple[InferencePlan, InferenceProfile]:
    left = [layer for run, number in zip(runs, numbers, strict=True) for layer in run[:number]]
    stacks = tuple(
        replace(shape, num_layers=sum(profile.stack_of(layer) == index for layer in left)) for index, shape in enumerate(profile.stacks)
    )
    edges = [sum(plan.layers[: position + 1]) for position in range(len(plan.layers))]
    layers = tuple(sum(edge - count <= layer < edge for layer in left) for edge, count in zip(edges, plan.layers, strict=True))
    schemes = tuple(plan.schemes[layer] for layer in left) if plan.schemes else ()
    return replace(plan, schemes=schemes, layers=layers), replace(profile, stacks=stacks)
