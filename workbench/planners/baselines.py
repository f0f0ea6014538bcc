"""Planners of systems that PAC+ is compared with on unequal devices: Asteroid and PAC+ (Homo) (PAC+, section VI-A and VI-C, Fig. 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from workbench.core.cluster import Cluster, Link
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.planners import memory
from workbench.planners.orders import sorted_orders
from workbench.planners.pac_plus import candidates, micro_batch_size, plan
from workbench.planners.pricing import price


def asteroid(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    memory_length: int | None = None,
) -> Plan:
    """Return the fastest hybrid pipeline of full fine-tuning (Asteroid; Ye et al., MobiCom 2024).

    profile: of full fine-tuning.  As far as PAC+ describes it, its architecture is PAC+'s; its samples, groups and cuts are fitted to the
    devices.  Ours to choose: the price (pricing.Price.bottleneck_s), the orders (the cluster's, by speed, by memory), and that a
    mini-batch is cut finer than into `micro_batches` where that is faster or the only way to fit.
    Raises PlanError, naming device, stage and bytes, if nothing fits even with one sample in each micro-batch.
    """
    micro_batch_size(profile, cluster, batch_size, micro_batches, sequence_length)
    found: list[Plan] = []
    refusal: PlanError | None = None
    for finer in (count for count in range(micro_batches, batch_size + 1) if batch_size % count == 0):
        for order in dict.fromkeys([tuple(range(cluster.world_size)), *sorted_orders(profile, cluster, sequence_length)]):
            try:
                found += candidates(
                    profile,
                    cluster,
                    batch_size=batch_size,
                    micro_batches=finer,
                    sequence_length=sequence_length,
                    memory_length=memory_length,
                    order=order,
                    objective="bottleneck",
                    method="asteroid",
                )[:1]
            except PlanError as error:
                refusal = error
    if not found:
        assert refusal is not None
        raise refusal

    def seconds(made: Plan) -> float:
        stages, count = made.stages, made.num_micro_batches
        return price(profile, cluster, stages, num_micro_batches=count, sequence_length=sequence_length).bottleneck_s

    return min(found, key=seconds)


def homogeneous(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    memory_length: int | None = None,
    cached: bool = True,
    budget: Literal["smallest", "mean"] = "smallest",
) -> Plan:
    """Return PAC+ (Homo)'s plan: Algorithm 1 for devices that are all alike, as fast as their mean, priced on the devices as they are.

    budget: the memory that it believes in.  With "smallest" the plan runs wherever it finds one, as in Fig. 12; with "mean" it may be
    refused by a device that has less.  Raises PlanError, naming device, stage and bytes, if it finds none or one does not fit.
    """
    alike = replace(profile, layers=(_mean_layers(profile),) * profile.world_size)
    made = plan(
        alike,
        _alike(cluster, budget),
        batch_size=batch_size,
        micro_batches=micro_batches,
        sequence_length=sequence_length,
        memory_length=memory_length,
        method="pac_plus_homogeneous",
        cached=cached,
    )
    memory.check(profile, cluster, made, sequence_length=memory_length or sequence_length)
    if made.cached is not None:
        memory.check_cached(profile, cluster, made.cached, sequence_length=memory_length or sequence_length)
    cost = price(profile, cluster, made.stages, num_micro_batches=micro_batches, sequence_length=sequence_length)
    return replace(made, predicted_s=cost.parts(), notes=())


def _alike(cluster: Cluster, budget: Literal["smallest", "mean"]) -> Cluster:
    devices = cluster.devices
    budgets = [device.memory_bytes for device in devices]
    link = Link(
        bytes_per_s=fmean(device.link.bytes_per_s for device in devices), latency_s=fmean(device.link.latency_s for device in devices)
    )
    memory_bytes = min(budgets) if budget == "smallest" else int(fmean(budgets))
    return replace(cluster, devices=tuple(replace(device, memory_bytes=memory_bytes, link=link) for device in devices), pairs={})


def _mean_layers(profile: Profile) -> tuple[LayerProfile, ...]:
    """Return every layer with its seconds averaged over the devices."""
    layers = []
    for rows in zip(*profile.layers, strict=True):
        kinds = dict.fromkeys(kind for layer in rows for kind in layer.times)
        times = {kind: _mean_grid([layer.times[kind] for layer in rows if kind in layer.times]) for kind in kinds}
        layers.append(replace(rows[0], times=times))
    return tuple(layers)


def _mean_grid(grids: Sequence[Grid]) -> Grid:
    """Return the mean at every batch size and length at which one of the grids was measured."""
    batch_sizes = tuple(sorted({size for grid in grids for size in grid.batch_sizes}))
    lengths = tuple(sorted({length for grid in grids for length in grid.sequence_lengths}))
    seconds = tuple(tuple(fmean(grid(size, length) for grid in grids) for length in lengths) for size in batch_sizes)
    return Grid(batch_sizes=batch_sizes, sequence_lengths=lengths, seconds=seconds)
