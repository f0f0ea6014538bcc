"""All planners of single-shot inference by name (Galaxy+, section IV-A), and re-planning on the remaining devices (III-E, step 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.baselines import InferencePlanner, edgeshard, galaxy, local, megatron_lm, sequence_parallel
from workbench.planners.galaxy_plus.planner import Price, plan
from workbench.planners.galaxy_plus.problem import SequenceProblem

INFERENCE_SYSTEMS: dict[str, InferencePlanner] = {
    "galaxy_plus": plan,
    "algorithm_1": algorithm_1,
    "galaxy": galaxy,
    "megatron_lm": megatron_lm,
    "sequence_parallel": sequence_parallel,
    "edgeshard": edgeshard,
    "local": local,
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
    seen, tokens = slowed(profile, slowdowns or {}), length or old.length or 1
    problem = SequenceProblem(seen, cluster, length=tokens, decoder_length=decoder_length, ranks=left)
    planner = INFERENCE_SYSTEMS.get(old.method)
    if old.method == "galaxy_plus" or planner is None:
        return plan(
            problem,
            price=price,
            overlap=old.overlap if old.num_positions > 1 else True,
            both_ways=old.both_ways,
            tile_tokens=old.tile_tokens,
            portal=old.ranks[0] if old.ranks[0] in left else None,
            effort=1,
            most_steps=20,
            method=old.method,
        )
    made = planner(problem)
    return replace(made, tile_tokens=old.tile_tokens, both_ways=old.both_ways and made.paradigm == "hybrid")
