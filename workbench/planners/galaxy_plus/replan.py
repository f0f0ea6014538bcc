"""Plan anew on the devices that are left, in milliseconds (Galaxy+, section III-E, step 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule
from workbench.planners.galaxy_plus.planner import Price, plan
from workbench.planners.galaxy_plus.systems import INFERENCE_SYSTEMS


def slowed(profile: InferenceProfile, slowdowns: Mapping[int, float]) -> InferenceProfile:
    """Return the profile with each rank as many times slower as was measured."""
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
    lost: Collection[int] = (),
    excluded: Collection[int] = (),
    slowdowns: Mapping[int, float] | None = None,
    price: Price | None = None,
    portal: int | None = None,
    memory: MemoryRule = HELD,
    memory_length: int | None = None,
    effort: int = 0,
    most_steps: int = 10,
) -> InferencePlan:
    """Return a plan of the same method on all devices of the cluster but `lost` and `excluded` ones.

    profile, cluster: of all devices; the plan's ranks are theirs, nothing is renumbered.  slowdowns: by rank, against the profile.
    portal: stands first (default: the old plan's first device, if it is left).  length: default the old plan's.
    'galaxy_plus' plans as planner.plan does, with little effort and few steps unless told; any other method by its own planner.
    Raises PlanError if none is left or nothing fits.
    """
    gone = set(lost) | set(excluded)
    left: Sequence[int] = [rank for rank in range(cluster.world_size) if rank not in gone]
    if not left:
        raise PlanError(
            f"A plan of '{profile.model}' without {sorted(gone)} was asked for.",
            f"Cluster '{cluster.name}' has no other device.",
            "Wait until a device is back.",
        )
    seen = slowed(profile, slowdowns or {})
    tokens = length or old.length or 1
    system = INFERENCE_SYSTEMS.get(old.method)
    if old.method == "galaxy_plus" or system is None:
        first = portal if portal is not None else old.ranks[0] if old.ranks[0] in left else None
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
            portal=first if first in left else None,
            memory=memory,
            memory_length=memory_length,
            effort=effort,
            most_candidates=8,
            most_steps=most_steps,
            method=old.method,
        )
    made = system.plan(seen, cluster, length=tokens, decoder_length=decoder_length, ranks=left, memory=memory)
    return replace(made, tile_tokens=old.tile_tokens, both_ways=old.both_ways and made.paradigm == "hybrid")
