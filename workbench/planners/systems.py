"""Asteroid and PAC+ (Homo), of PAC+'s evaluation (section VI-A), and the paradigms of any technique by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from workbench.core.cluster import Cluster, Link
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.planners import memory
from workbench.planners.fixed import data_parallel, pipeline_parallel, standalone
from workbench.planners.orders import sorted_orders
from workbench.planners.pac_plus import candidates, plan
from workbench.planners.pricing import price
from workbench.planners.problem import Problem


def whole_batches(planner: Callable[[Problem], Plan]) -> Callable[[Problem], Plan]:
    """Return a planner that works 'strictly at the mini-batch granularity' (section VI-B) and ignores micro_batches."""
    return lambda problem: planner(replace(problem, micro_batches=1))


def asteroid(problem: Problem) -> Plan:
    """Return the fastest hybrid pipeline of full fine-tuning (Asteroid; Ye et al., MobiCom 2024).

    problem: of full fine-tuning.  As far as PAC+ describes it, its architecture is PAC+'s; its samples, groups and cuts are fitted to the
    devices.  Our choices: the cost function (pricing.Price.bottleneck_s), the orders (the cluster's, by speed, by memory), and a finer
    division of a mini-batch than `micro_batches` if that is faster or the only way to fit.
    Raises PlanError, naming device, stage and bytes, if nothing fits even with one sample in each micro-batch.
    """
    _ = problem.micro_batch_size  # refuses impossible numbers
    profile, cluster, batch_size = problem.profile, problem.cluster, problem.batch_size
    orders = dict.fromkeys([tuple(range(cluster.world_size)), *sorted_orders(profile, cluster, problem.sequence_length)])
    found: list[Plan] = []
    refusal: PlanError | None = None
    for finer in (count for count in range(problem.micro_batches, batch_size + 1) if batch_size % count == 0):
        for order in orders:
            try:
                found += candidates(replace(problem, micro_batches=finer), order=order, objective="bottleneck", method="asteroid")[:1]
            except PlanError as error:
                refusal = error
    if not found:
        assert refusal is not None
        raise refusal

    def seconds(made: Plan) -> float:
        count = made.num_micro_batches
        return price(profile, cluster, made.stages, num_micro_batches=count, sequence_length=problem.sequence_length).bottleneck_s

    return min(found, key=seconds)


def homogeneous(problem: Problem, *, cached: bool = True) -> Plan:
    """Return PAC+ (Homo)'s plan: Algorithm 1 with all devices at their mean speed; its predicted time uses the real devices.

    It plans with the memory of the smallest device, so any plan that it finds can run, as in Fig. 12.  cached: see pac_plus.plan.
    Raises PlanError, naming device, stage and bytes, if it finds no plan or one does not fit.
    """
    profile, cluster, longest = problem.profile, problem.cluster, problem.longest
    alike = replace(profile, layers=(_mean_layers(profile),) * profile.world_size)
    made = plan(replace(problem, profile=alike, cluster=_alike(cluster)), cached=cached, method="pac_plus_homogeneous")
    memory.check(profile, cluster, made, sequence_length=longest)
    if made.cached is not None:
        memory.check_cached(profile, cluster, made.cached, sequence_length=longest)
    count = problem.micro_batches
    cost = price(profile, cluster, made.stages, num_micro_batches=count, sequence_length=problem.sequence_length)
    return replace(made, predicted_s=cost.parts(), notes=())


def _alike(cluster: Cluster) -> Cluster:
    devices = cluster.devices
    link = Link(
        bytes_per_s=fmean(device.link.bytes_per_s for device in devices), latency_s=fmean(device.link.latency_s for device in devices)
    )
    memory_bytes = min(device.memory_bytes for device in devices)
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


PARADIGMS: dict[str, Callable[[Problem], Plan]] = {
    "standalone": whole_batches(standalone),
    "data_parallel": whole_batches(data_parallel),
    "pipeline_parallel": pipeline_parallel,
    "hybrid": partial(plan, cached=False),
}
