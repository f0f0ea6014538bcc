"""All planners of single-shot inference by name (Galaxy+, section IV-A), and re-planning on the remaining devices (III-E, step 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile, Paradigm
from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.baselines import InferencePlanner, edgeshard, galaxy, local, megatron_lm, sequence_parallel
from workbench.planners.galaxy_plus.planner import Price, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSystem:
    """A system of the evaluation.  label: as in the paper."""

    label: str
    paradigm: Paradigm
    plan: InferencePlanner


INFERENCE_SYSTEMS: dict[str, InferenceSystem] = {
    "galaxy_plus": InferenceSystem(label="Galaxy+", paradigm="hybrid", plan=plan),
    "algorithm_1": InferenceSystem(label="Galaxy+ (Algorithm 1)", paradigm="hybrid", plan=algorithm_1),
    "galaxy": InferenceSystem(label="Galaxy", paradigm="hybrid", plan=galaxy),
    "megatron_lm": InferenceSystem(label="M-LM", paradigm="tensor", plan=megatron_lm),
    "sequence_parallel": InferenceSystem(label="SP", paradigm="sequence", plan=sequence_parallel),
    "edgeshard": InferenceSystem(label="EdgeShard", paradigm="pipeline", plan=edgeshard),
    "local": InferenceSystem(label="Local", paradigm="pipeline", plan=local),
}


def slowed(profile: InferenceProfile, slowdowns: Mapping[int, float]) -> InferenceProfile:
    """Return the profile with each rank slowed down by its measured factor."""
    for rank, factor in slowdowns.items():
        if not (0 <= rank < profile.world_size and factor > 0):
            raise ConfigError(
                f"Rank {rank} {factor} times slower was asked for.",
                f"There are ranks 0 to {profile.world_size - 1}.",
                "Name one of them and a factor above 0.",
            )
        profile = profile.slowed(rank, factor)
    return profile


def replan(
    old: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int | None = None,
    decoder_length: int | None = None,
    excluded: Collection[int] = (),
    slowdowns: Mapping[int, float] | None = None,
    price: Price | None = None,
) -> InferencePlan:
    """Return a plan of the same method on all devices of the cluster except the excluded ones.

    profile, cluster: of all devices; the plan keeps their rank numbers.  slowdowns: by rank, relative to the profile.
    length: default the old plan's.  'galaxy_plus' plans with less effort than at first, and keeps the first device of the ring if it is
    still there; any other method uses its own planner.  Raises PlanError if no device is left or nothing fits.
    """
    left = [rank for rank in range(cluster.world_size) if rank not in excluded]
    if not left:
        raise PlanError(
            f"A plan of '{profile.model}' without {sorted(excluded)} was asked for.",
            f"Cluster '{cluster.name}' has no other device.",
            "Wait until a device is back.",
        )
    seen = slowed(profile, slowdowns or {})
    tokens = length or old.length or 1
    system = INFERENCE_SYSTEMS.get(old.method)
    if old.method == "galaxy_plus" or system is None:
        return plan(
            seen,
            cluster,
            length=tokens,
            decoder_length=decoder_length,
            price=price,
            overlap=old.overlap if old.num_positions > 1 else True,
            both_ways=old.both_ways,
            tile_tokens=old.tile_tokens,
            ranks=left,
            portal=old.ranks[0] if old.ranks[0] in left else None,
            effort=1,
            most_steps=20,
            method=old.method,
        )
    made = system.plan(seen, cluster, length=tokens, decoder_length=decoder_length, ranks=left)
    return replace(made, tile_tokens=old.tile_tokens, both_ways=old.both_ways and made.paradigm == "hybrid")
