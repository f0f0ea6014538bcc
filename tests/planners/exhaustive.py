"""Exhaustive search over partitions, device groups and orders: what Algorithm 1 is compared with.  Written without any
of its code."""

from __future__ import annotations

import functools
import itertools
import math

from tests.plans import stage
from workbench.planners.memory import in_flight, rank_need

from .builders import closed_form


def parts(total: int, count: int) -> list[tuple[int, ...]]:
    """Return every way to write `total` as `count` positive numbers in order."""
    every = ((0, *cuts, total) for cuts in itertools.combinations(range(1, total), count - 1))
    return [tuple(end - first for first, end in itertools.pairwise(edges)) for edges in every]


def exhaustive(
    profile, cluster, *, batch_size, micro_batches, sequence_length, num_stages=None, orders=False, objective="paper"
):
    """Return (seconds, stages) of the best plan, None if none fits, samples divided so that a stage's slowest rank is
    fastest (Eq. 4).

    objective: "paper" (Eq. 7), "bottleneck" (pricing.Price) or "balance" (Eq. 3).  num_stages: only plans of so many
    stages.
    """
    size, count, num_layers = batch_size // micro_batches, cluster.world_size, profile.num_layers

    def seconds(rank, samples, start, stop, live):
        if samples == 0:
            return 0.0
        need = rank_need(profile, rank, start, stop, samples=samples, sequence_length=sequence_length, in_flight=live)
        layers = profile.layers[rank][start:stop]
        times = [
            layer.forward_s(samples, sequence_length) + layer.backward_s(samples, sequence_length) for layer in layers
        ]
        return math.inf if need.total_bytes > cluster.devices[rank].memory_bytes else sum(times)

    @functools.cache
    def divided(start, stop, group, live):
        times = {rank: [seconds(rank, samples, start, stop, live) for samples in range(size + 1)] for rank in group}
        wholes = (samples for samples in itertools.product(range(size + 1), repeat=len(group)) if sum(samples) == size)
        return min((max(times[rank][n] for rank, n in zip(group, whole, strict=True)), whole) for whole in wholes)

    results = []
    for order in itertools.permutations(range(count)) if orders else (tuple(range(count)),):
        for s in range(1, min(count, num_layers) + 1) if num_stages is None else (num_stages,):
            for layers, widths in itertools.product(parts(num_layers, s), parts(count, s)):
                stages, slowest, start, first = [], 0.0, 0, 0
                for index, (length, width) in enumerate(zip(layers, widths, strict=True)):
                    group = order[first : first + width]
                    own, samples = divided(start, start + length, group, in_flight(index, s, micro_batches))
                    shares = {rank: n for rank, n in zip(group, samples, strict=True) if n}
                    stages.append(stage(start, start + length, shares))
                    slowest, start, first = max(slowest, own), start + length, first + width
                if math.isfinite(slowest):
                    cost = closed_form(profile, cluster, stages, micro_batches)
                    value = {"paper": cost.total_s, "bottleneck": cost.bottleneck_s, "balance": slowest}[objective]
                    results.append((value, tuple(stages)))
    return min(results, key=lambda pair: pair[0], default=None)
