"""Divide a mini-batch among devices for the epochs that run from the activation cache (PAC+, section V-B)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.plan import Share, Stage
from workbench.core.profile import Profile
from workbench.planners.balance import dispatch
from workbench.planners.memory import cached_need, readable
from workbench.planners.pricing import allreduce_s, stage_trainable_bytes
from workbench.planners.problem import Problem

SAMPLE_KINDS = ("LOAD", "SF", "SB")
MAX_DEVICES_IN_EVERY_SUBSET = 10


def plan_cached(problem: Problem, *, ranks: Sequence[int] | None = None) -> Stage:
    """Return the shares of the fastest cached step: max(LOAD + SF + SB) + all-reduce + max(STEP).

    The all-reduce takes longer with more devices, so a device may be left out.  With up to 10 devices every subset is tried, with more the
    fastest n for every n.  ranks: the devices that may take part (default: all).  Raises PlanError if the adapters do not fit.
    """
    profile, cluster, batch_size = problem.profile, problem.cluster, problem.batch_size
    if batch_size < 1:
        raise ConfigError(f"A cached step of {batch_size} samples was asked for.", "It must be at least 1.", "Raise batch_size.")
    usable = sorted(range(cluster.world_size) if ranks is None else ranks)
    costs = {rank: _costs(problem, rank) for rank in usable}
    steps = {rank: _step_s(profile, rank, problem.sequence_length) for rank in usable}
    nbytes = sum(layer.trainable_bytes for layer in profile.layers[0])
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for members, slowest in _subsets([costs[rank] for rank in usable], batch_size):
        chosen = tuple(usable[member] for member in members)
        seconds = slowest + allreduce_s(cluster, chosen, nbytes) + max(steps[rank] for rank in chosen)
        # One more device must save time; rounding errors must not decide between equally good subsets.
        if seconds < best[0] * (1 - 1e-9):
            best = (seconds, chosen)
    if not best[1]:
        raise _refusal(problem, usable)
    _, samples = dispatch([[math.inf, *costs[rank][1:].tolist()] for rank in best[1]], batch_size)
    shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(best[1], samples, strict=True))
    return Stage(start=0, stop=profile.num_layers, shares=shares)


def cached_step_s(profile: Profile, cluster: Cluster, stage: Stage, *, sequence_length: int) -> float:
    """Return the predicted seconds of one cached step with the stage's shares."""
    slowest = max(_sample_s(profile, share.rank, share.samples, sequence_length) for share in stage.shares)
    step = max(_step_s(profile, share.rank, sequence_length) for share in stage.shares)
    return slowest + allreduce_s(cluster, stage.ranks, stage_trainable_bytes(profile, stage)) + step


def _sample_s(profile: Profile, rank: int, samples: int, sequence_length: int) -> float:
    if samples == 0:
        return 0.0
    return sum(layer.seconds(kind, samples, sequence_length) for layer in profile.layers[rank] for kind in SAMPLE_KINDS)


def _step_s(profile: Profile, rank: int, sequence_length: int) -> float:
    return sum(layer.seconds("STEP", 1, sequence_length) for layer in profile.layers[rank])


def _costs(problem: Problem, rank: int) -> np.ndarray:
    """Return (batch_size + 1,) seconds, infinite where the device runs out of memory."""
    budget = problem.cluster.devices[rank].memory_bytes
    seconds = [0.0]
    for samples in range(1, problem.batch_size + 1):
        need = cached_need(problem.profile, rank, samples=samples, sequence_length=problem.longest)
        seconds.append(math.inf if need.total_bytes > budget else _sample_s(problem.profile, rank, samples, problem.sequence_length))
    return np.array(seconds)


def _subsets(costs: Sequence[np.ndarray], batch_size: int) -> list[tuple[tuple[int, ...], float]]:
    """Return (indices, the slowest device's seconds) for every subset in which each device has at least one sample."""
    count = len(costs)
    if count > MAX_DEVICES_IN_EVERY_SUBSET:
        middle = max(1, batch_size // count)
        fastest = sorted(range(count), key=lambda rank: (costs[rank][middle], rank))
        masks = [sum(1 << rank for rank in fastest[:size]) for size in range(1, count + 1)]
    else:
        masks = sorted(range(1, 1 << count), key=lambda mask: (mask.bit_count(), mask))
    tables: dict[int, np.ndarray] = {}

    def table(mask: int) -> np.ndarray:
        if mask not in tables:
            top = mask.bit_length() - 1
            rest = mask & ~(1 << top)
            own = costs[top].copy()
            own[0] = math.inf
            tables[mask] = own if not rest else _join(table(rest), own)
        return tables[mask]

    found = []
    for mask in masks:
        if mask.bit_count() <= batch_size and math.isfinite(slowest := float(table(mask)[batch_size])):
            found.append((tuple(rank for rank in range(count) if mask >> rank & 1), slowest))
    return found


def _join(table: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return Eq. 4's next table for one more device."""
    result = np.full_like(table, math.inf)
    for i in range(1, len(table)):
        np.minimum(result[i:], np.maximum(table[: len(table) - i], cost[i]), out=result[i:])
    return result


def _refusal(problem: Problem, usable: Sequence[int]) -> PlanError:
    smallest = {rank: cached_need(problem.profile, rank, samples=1, sequence_length=problem.longest).total_bytes for rank in usable}
    rank = min(usable, key=lambda rank: smallest[rank] - problem.cluster.devices[rank].memory_bytes)
    device = problem.cluster.devices[rank]
    return PlanError(
        f"Device '{device.name}' has {readable(device.memory_bytes)};",
        f"in the cached epochs the adapters and one sample need {readable(smallest[rank])}, and {problem.batch_size} samples"
        f" do not fit on {len(usable)} devices together.",
        "Add a device, raise its memory, lower the batch size, or raise the adapters' reduction factor.",
    )
