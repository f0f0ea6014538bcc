"""Every planner by name: the paradigms that any fine-tuning technique runs under, and the systems of PAC+'s evaluation (section VI-A)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.virtual_workers import VirtualWorkers
from workbench.planners.baselines import asteroid, homogeneous
from workbench.planners.fixed import data_parallel, pipeline_parallel, standalone
from workbench.planners.hetpipe import hetpipe
from workbench.planners.pac_plus import plan

P_co = TypeVar("P_co", covariant=True)


class Planner(Protocol[P_co]):
    """Returns a Plan, one pipeline, or VirtualWorkers, several.  Raises PlanError, naming device, stage and bytes, if nothing fits."""

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
    """A system of the evaluation.  label: as the paper writes it.  technique: what it fine-tunes with, to be profiled for."""

    label: str
    technique: str
    plan: Planner[Plan] | Planner[VirtualWorkers]


def standalone_batches(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    memory_length: int | None = None,
) -> Plan:
    """Return standalone's plan 'strictly at the mini-batch granularity' (section VI-B), whatever micro_batches is."""
    return standalone(profile, cluster, batch_size=batch_size, sequence_length=sequence_length, memory_length=memory_length)


def data_parallel_batches(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    memory_length: int | None = None,
) -> Plan:
    """Return EDDL's plan 'strictly at the mini-batch granularity' (section VI-B), whatever micro_batches is."""
    return data_parallel(profile, cluster, batch_size=batch_size, sequence_length=sequence_length, memory_length=memory_length)


PARADIGMS: dict[str, Planner[Plan]] = {
    "standalone": standalone_batches,
    "data_parallel": data_parallel_batches,
    "pipeline_parallel": pipeline_parallel,
    "hybrid": partial(plan, cached=False),
}

SYSTEMS: dict[str, System] = {
    "eco_fl": System(label="PP (Eco-FL)", technique="full", plan=pipeline_parallel),
    "eddl": System(label="DP (EDDL)", technique="full", plan=data_parallel_batches),
    "hetpipe": System(label="HetPipe", technique="full", plan=hetpipe),
    "asteroid": System(label="Asteroid", technique="full", plan=asteroid),
    "pac_plus_homogeneous": System(label="PAC+ (Homo)", technique="parallel_adapters", plan=homogeneous),
    "pac_plus": System(label="PAC+", technique="parallel_adapters", plan=plan),
}
