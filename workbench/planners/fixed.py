"""User-defined plans, and the planners of PAC+'s baselines (section VI-A): standalone, data parallel (EDDL), pipeline parallel (Eco-FL)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.plan import Plan, Share, Stage, proportional_ranges
from workbench.core.profile import Profile
from workbench.planners import memory
from workbench.planners.balance import dispatch as best_dispatch
from workbench.planners.pac_plus import candidates, micro_batch_size
from workbench.planners.pricing import price

Dispatch = Literal["speed", "equal", "best"]


def fixed_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    layers: Sequence[int],
    groups: Sequence[Sequence[int]],
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    memory_length: int | None = None,
    shares: Sequence[Sequence[int]] | None = None,
    dispatch: Dispatch = "speed",
    check_memory: bool = True,
    method: str = "fixed",
) -> Plan:
    """Return the plan of stages with `layers[i]` layers on the ranks `groups[i]`.

    shares[i]: the samples of each rank, which sum to a micro-batch.  Without them: "speed" in proportion to each rank's speed, "equal", or
    "best" by Eq. 4.  Each rank of a group no larger than the micro-batch gets at least one sample (except with "best", which may leave a
    slow device without samples).  sequence_length: for timing.  memory_length: must fit (default: the same).
    Raises ConfigError if the numbers do not fit together, PlanError if memory does not suffice.
    """
    size = micro_batch_size(profile, cluster, batch_size, micro_batches, sequence_length)
    longest = sequence_length if memory_length is None else memory_length
    _check_form(profile, cluster, layers, groups)
    if shares is not None:
        _check_shares(groups, shares, size)
    stages, start = [], 0
    for index, (count, group) in enumerate(zip(layers, groups, strict=True)):
        stop = start + count
        if shares is not None:
            samples = tuple(shares[index])
        else:
            live = memory.in_flight(index, len(layers), micro_batches)
            samples = _samples(profile, cluster, start, stop, group, size, sequence_length, longest, dispatch, live)
        given = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True))
        stages.append(Stage(start=start, stop=stop, shares=given))
        start = stop
    cost = price(profile, cluster, stages, num_micro_batches=micro_batches, sequence_length=sequence_length)
    made = Plan(
        method=method,
        stages=tuple(stages),
        micro_batch_size=size,
        num_micro_batches=micro_batches,
        predicted_s=cost.parts(),
    )
    if check_memory:
        memory.check(profile, cluster, made, sequence_length=longest)
    return made


def standalone(profile: Profile, cluster: Cluster, *, rank: int | None = None, micro_batches: int = 1, **job: Any) -> Plan:
    """Return the plan of one device: `rank`, or the fastest on which the model fits.  Raises PlanError if it fits on none.

    job: batch_size, sequence_length and memory_length of fixed_plan.
    """
    made, refusals = [], []
    for candidate in range(cluster.world_size) if rank is None else (rank,):
        form: dict[str, Any] = {"layers": (profile.num_layers,), "groups": ((candidate,),), "micro_batches": micro_batches}
        try:
            made.append(fixed_plan(profile, cluster, **form, **job, method="standalone"))
        except PlanError as error:
            refusals.append((cluster.devices[candidate].memory_bytes, error))
    if not made:
        raise max(refusals, key=lambda refusal: refusal[0])[1]
    return min(made, key=lambda plan: plan.total_s)


def data_parallel(profile: Profile, cluster: Cluster, *, micro_batches: int = 1, **job: Any) -> Plan:
    """Return the plan of the whole model on every device, samples in proportion to speed (EDDL).  Raises PlanError if it does not fit.

    job: batch_size, sequence_length and memory_length of fixed_plan.
    """
    everyone = (tuple(range(cluster.world_size)),)
    form: dict[str, Any] = {"layers": (profile.num_layers,), "groups": everyone, "micro_batches": micro_batches}
    return fixed_plan(profile, cluster, **form, **job, method="data_parallel")


def pipeline_parallel(profile: Profile, cluster: Cluster, *, micro_batches: int = 4, **job: Any) -> Plan:
    """Return the balanced pipeline with one device for each stage (Eco-FL).  Raises PlanError if it does not fit.

    job: batch_size, sequence_length and memory_length of fixed_plan.  With more devices than layers, the first num_layers take part.
    """
    ranks = tuple(range(min(cluster.world_size, profile.num_layers)))
    return candidates(profile, cluster, micro_batches=micro_batches, **job, order=ranks, method="pipeline_parallel", max_group=1)[0]


def _samples(
    profile: Profile,
    cluster: Cluster,
    start: int,
    stop: int,
    group: Sequence[int],
    size: int,
    sequence_length: int,
    memory_length: int,
    how: Dispatch,
    live: int,
) -> tuple[int, ...]:
    def seconds(rank: int, samples: int) -> float:
        layers = profile.layers[rank][start:stop]
        return sum(layer.forward_s(samples, sequence_length) + layer.backward_s(samples, sequence_length) for layer in layers)

    if how == "equal":
        weights = [1] * len(group)
    elif how == "speed":
        # Integer weights to one part in a million, by the layers' times, or equal if there are none.
        whole = [seconds(rank, size) for rank in group]
        weights = [round(1e6 * min(whole) / one) if one > 0 else 1 for one in whole] if min(whole) > 0 else [1] * len(group)
    elif how == "best":
        costs = []
        for rank in group:
            budget = cluster.devices[rank].memory_bytes
            row = [0.0]
            for samples in range(1, size + 1):
                need = memory.rank_need(profile, rank, start, stop, samples=samples, sequence_length=memory_length, in_flight=live)
                row.append(math.inf if need.total_bytes > budget else seconds(rank, samples))
            costs.append(row)
        best, samples_each = best_dispatch(costs, size)
        # If nothing fits, divide equally; memory.check then names the device.
        return samples_each if math.isfinite(best) else _spread([1] * len(group), size)
    else:
        raise ConfigError(f"The dispatch '{how}' was asked for.", "Known: speed, equal, best.", "Choose one of them.")
    return _spread(weights, size)


def _spread(weights: Sequence[int], size: int) -> tuple[int, ...]:
    """Divide `size` in proportion to weights, at least one each if there are enough."""
    counts = [end - first for first, end in proportional_ranges(size, tuple(weights))]
    if size >= len(counts):
        while 0 in counts:
            counts[counts.index(max(counts))] -= 1
            counts[counts.index(0)] += 1
    return tuple(counts)


def _check_form(profile: Profile, cluster: Cluster, layers: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
    asked = f"Stages of {list(layers)} layers on the groups {[list(group) for group in groups]} were asked for."
    if not layers or len(layers) != len(groups):
        raise ConfigError(asked, f"That is {len(layers)} stages and {len(groups)} groups.", "Name a group for each stage.")
    if min(layers) < 1 or sum(layers) != profile.num_layers:
        raise ConfigError(
            asked,
            f"Model '{profile.model}' has {profile.num_layers} layers, and no stage may be empty.",
            f"Let the layers sum to {profile.num_layers}.",
        )
    ranks = [rank for group in groups for rank in group]
    if any(not group for group in groups):
        raise ConfigError(asked, "A group is empty.", "Give each stage a device.")
    unknown = sorted({rank for rank in ranks if not 0 <= rank < cluster.world_size})
    if unknown:
        raise ConfigError(asked, f"Cluster '{cluster.name}' has ranks 0 to {cluster.world_size - 1}.", f"Drop {unknown}.")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(asked, f"Ranks {twice} appear more than once.", "Give a device one stage.")


def _check_shares(groups: Sequence[Sequence[int]], shares: Sequence[Sequence[int]], size: int) -> None:
    asked = f"The shares {[list(share) for share in shares]} were asked for."
    if [len(group) for group in groups] != [len(share) for share in shares]:
        raise ConfigError(asked, f"The groups are {[list(group) for group in groups]}.", "Give each rank of each group a share.")
    for share in shares:
        if min(share) < 0 or sum(share) != size:
            raise ConfigError(asked, f"A micro-batch has {size} samples; one stage's shares are {list(share)}.", f"Let them sum to {size}.")
