"""All planners by name: the paradigms of any technique, and the systems of PAC+'s evaluation, with Asteroid and PAC+ (Homo) (VI-A)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol, TypeVar

from workbench.core.cluster import Cluster, Link
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.core.virtual_workers import VirtualWorkers
from workbench.planners import memory
from workbench.planners.fixed import data_parallel, pipeline_parallel, standalone
from workbench.planners.hetpipe import hetpipe
from workbench.planners.orders import sorted_orders
from workbench.planners.pac_plus import candidates, micro_batch_size, plan
from workbench.planners.pricing import price

P_co = TypeVar("P_co", covariant=True)


class Planner(Protocol[P_co]):
    """Returns a Plan (one pipeline) or VirtualWorkers (several).  Raises PlanError, naming device, stage and bytes, if nothing fits."""

    def __call__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        batch_size: int,
        micro_batches: int,
        sequence_length: int,
        memory_length: int | None = None,
    ) -> P_co:
        """Plan for batches of `sequence_length` tokens; those of `memory_length` (default: the same) must fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system of the evaluation.  label: as in the paper.  technique: its fine-tuning technique, which the profile must have."""

    label: str
    technique: str
    plan: Planner[Plan] | Planner[VirtualWorkers]


def whole_batches(planner: Callable[..., Plan]) -> Planner[Plan]:
    """Return a planner that works 'strictly at the mini-batch granularity' (section VI-B) and ignores micro_batches."""

    def planned(profile: Profile, cluster: Cluster, *, micro_batches: int, **job: Any) -> Plan:
        return planner(profile, cluster, **job)

    return planned


def asteroid(profile: Profile, cluster: Cluster, *, batch_size: int, micro_batches: int, sequence_length: int, **job: Any) -> Plan:
    """Return the fastest hybrid pipeline of full fine-tuning (Asteroid; Ye et al., MobiCom 2024).

    profile: of full fine-tuning.  As far as PAC+ describes it, its architecture is PAC+'s; its samples, groups and cuts are fitted to the
    devices.  Our choices: the cost function (pricing.Price.bottleneck_s), the orders (the cluster's, by speed, by memory), and a finer
    division of a mini-batch than `micro_batches` if that is faster or the only way to fit.  job: memory_length of Planner.
    Raises PlanError, naming device, stage and bytes, if nothing fits even with one sample in each micro-batch.
    """
    micro_batch_size(profile, cluster, batch_size, micro_batches, sequence_length)
    settings: dict[str, Any] = {"batch_size": batch_size, "sequence_length": sequence_length, **job}
    settings |= {"objective": "bottleneck", "method": "asteroid"}
    found: list[Plan] = []
    refusal: PlanError | None = None
    for finer in (count for count in range(micro_batches, batch_size + 1) if batch_size % count == 0):
        for order in dict.fromkeys([tuple(range(cluster.world_size)), *sorted_orders(profile, cluster, sequence_length)]):
            try:
                found += candidates(profile, cluster, micro_batches=finer, order=order, **settings)[:1]
            except PlanError as error:
                refusal = error
    if not found:
        assert refusal is not None
        raise refusal

    def seconds(made: Plan) -> float:
        stages, count = made.stages, made.num_micro_batches
        return price(profile, cluster, stages, num_micro_batches=count, sequence_length=sequence_length).bottleneck_s

    return min(found, key=seconds)


def homogeneous(profile: Profile, cluster: Cluster, *, micro_batches: int, sequence_length: int, **job: Any) -> Plan:
    """Return PAC+ (Homo)'s plan: Algorithm 1 with all devices at their mean speed; its predicted time uses the real devices.

    It plans with the memory of the smallest device, so any plan that it finds can run, as in Fig. 12.
    job: batch_size and memory_length of Planner, and cached of pac_plus.plan.
    Raises PlanError, naming device, stage and bytes, if it finds no plan or one does not fit.
    """
    alike = replace(profile, layers=(_mean_layers(profile),) * profile.world_size)
    job |= {"sequence_length": sequence_length, "method": "pac_plus_homogeneous"}
    made = plan(alike, _alike(cluster), micro_batches=micro_batches, **job)
    longest = job.get("memory_length") or sequence_length
    memory.check(profile, cluster, made, sequence_length=longest)
    if made.cached is not None:
        memory.check_cached(profile, cluster, made.cached, sequence_length=longest)
    cost = price(profile, cluster, made.stages, num_micro_batches=micro_batches, sequence_length=sequence_length)
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


PARADIGMS: dict[str, Planner[Plan]] = {
    "standalone": whole_batches(standalone),
    "data_parallel": whole_batches(data_parallel),
    "pipeline_parallel": pipeline_parallel,
    "hybrid": partial(plan, cached=False),
}

SYSTEMS: dict[str, System] = {
    "eco_fl": System(label="PP (Eco-FL)", technique="full", plan=pipeline_parallel),
    "eddl": System(label="DP (EDDL)", technique="full", plan=whole_batches(data_parallel)),
    "hetpipe": System(label="HetPipe", technique="full", plan=hetpipe),
    "asteroid": System(label="Asteroid", technique="full", plan=asteroid),
    "pac_plus_homogeneous": System(label="PAC+ (Homo)", technique="parallel_adapters", plan=homogeneous),
    "pac_plus": System(label="PAC+", technique="parallel_adapters", plan=plan),
}
