"""Planners of Galaxy+'s baselines (section IV-A): local inference, Megatron-LM, sequence parallelism, Galaxy,
EdgeShard.

Each returns a plan, whose seconds a simulation gives, or raises PlanError if it does not fit.

EdgeShard's dynamic programme (Zhang et al. 2024, the latency objective) has as its state a layer and its device, and
stores the path to it: used devices and their memory follow from that.  It is exact where memory does not force a
detour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.memory import check, layer_needs, least_missing
from workbench.methods.galaxy_plus.planners.planner import algorithm_1, plan
from workbench.methods.galaxy_plus.planners.terms import LayerTimes, boundary_bytes, capacity, ends_s, lengths_of
from workbench.planners.problem import Problem

InferencePlanner = Callable[[Problem[InferenceProfile]], InferencePlan]
"""Returns a plan for one sequence.  Raises PlanError, naming device and bytes, if none fits."""


def local(problem: Problem[InferenceProfile]) -> InferencePlan:
    """Return the plan of one device, the fastest on which the model fits.  Raises PlanError for the largest device if
    it fits on none.
    """
    profile, lengths = problem.profile, lengths_of(problem)

    def single(rank: int) -> InferencePlan:
        whole = InferencePlan.on_one_device(rank, profile.stacks, length=lengths[0])
        check(problem, whole)
        return whole

    def alone_s(plan: InferencePlan) -> float:
        return profile.num_layers / capacity(profile, plan.ranks[0], lengths) + ends_s(profile, plan.ranks[0], lengths)

    return min(problem.alone(single), key=alone_s)


def megatron_lm(problem: Problem[InferenceProfile]) -> InferencePlan:
    """Return tensor parallelism with equal heads and columns on every device, regardless of speed and memory
    (Megatron-LM).

    Raises PlanError if the number of heads is not a multiple of the devices, or if a device runs out of memory.
    """
    profile, ranks = problem.profile, problem.members
    count, units = len(ranks), profile.stacks[0].num_units
    if any(shape.num_units % count for shape in profile.stacks):
        able = max(
            number for number in range(1, count) if all(shape.num_units % number == 0 for shape in profile.stacks)
        )
        raise PlanError(
            f"Equal parts of '{profile.model}' on {count} devices were asked for (Megatron-LM).",
            f"Its attention has {units} units, which {count} does not divide.",
            f"Use {able} of the devices, or a planner that cuts unequally, such as galaxy_plus.",
        )
    columns = proportional_parts(profile.stacks[0].columns, (1,) * count)
    parts = (units // count,) * count
    length = lengths_of(problem)[0]
    plan = InferencePlan(
        method="megatron_lm", paradigm="tensor", ranks=ranks, units=parts, columns=columns, length=length
    )
    check(problem, plan)
    return plan


def sequence_parallel(problem: Problem[InferenceProfile]) -> InferencePlan:
    """Return sequence parallelism: equal parts of the sequence, and the whole model on every device.

    Raises PlanError if the sequence has fewer tokens than there are devices, or if a device runs out of memory.
    """
    ranks, lengths = problem.members, lengths_of(problem)
    if min(lengths) < len(ranks):
        raise PlanError(
            f"Equal parts of {min(lengths)} tokens on {len(ranks)} devices were asked for (sequence parallelism).",
            "That leaves a device without a token.",
            f"Use {min(lengths)} of the devices, or a planner that cuts unequally, such as galaxy_plus.",
        )
    shares = (1.0,) * len(ranks)
    plan = InferencePlan(method="sequence_parallel", paradigm="sequence", ranks=ranks, shares=shares, length=lengths[0])
    check(problem, plan)
    return plan


galaxy: InferencePlanner = partial(algorithm_1, substitute=False, method="galaxy")
"""The conference version: Algorithm 1, scheme 1 in every layer, overlapped (Galaxy)."""

Path = tuple[tuple[int, int], ...]
"""A sequence of (rank, layers)."""


def edgeshard(problem: Problem[InferenceProfile]) -> InferencePlan:
    """Return the sequential pipeline of EdgeShard's dynamic programme, for the least latency; devices that do not help
    are left out.

    Embedding and head are on the first device, and the result is sent back to it.
    Raises PlanError with the missing memory if no pipeline fits.
    """
    path = _Paths(problem).best()
    if path is None:
        raise least_missing(problem)
    ranks, layers = zip(*path, strict=True)
    plan = InferencePlan(
        method="edgeshard", paradigm="pipeline", ranks=ranks, layers=layers, length=problem.sequence_length
    )
    check(problem, plan)
    return plan


class _Paths:
    """Seconds and bytes of every range of layers on every device.  Index d is ranks[d]; i layers are finished."""

    def __init__(self, problem: Problem[InferenceProfile]) -> None:
        profile, cluster, lengths = problem.profile, problem.cluster, lengths_of(problem)
        ranks = self.ranks = problem.members
        self.layers = profile.num_layers
        stacks = [profile.stack_of(layer) for layer in range(self.layers)]
        needs = layer_needs(problem, [1] * self.layers)
        sizes = [need.total_bytes - need.working_bytes - need.ends_bytes for need in needs]
        bytes_before = np.concatenate([[0], np.cumsum(sizes)])
        self.ends = [ends_s(profile, rank, lengths) for rank in ranks]
        crossing = [boundary_bytes(profile, layer, lengths) for layer in range(self.layers + 1)]
        self.hop = {
            (a, b): np.array([cluster.link(ranks[a], ranks[b]).transfer_s(nbytes) for nbytes in crossing])
            for a, b in itertools.permutations(range(len(ranks)), 2)
        }
        self.cost: list[dict[bool, np.ndarray]] = []  # [device][is first]: (layers + 1, layers + 1) seconds from i to j
        nbytes = bytes_before[None, :] - bytes_before[:, None]
        for rank in ranks:
            done = np.concatenate(
                [[0.0], np.cumsum([LayerTimes(profile, rank, stack, lengths).whole_s() for stack in stacks])]
            )
            seconds, budget = done[None, :] - done[:, None], cluster.devices[rank].memory_bytes - needs[0].working_bytes
            rooms = {first: budget - first * profile.ends_bytes for first in (True, False)}
            self.cost.append(
                {first: np.where((nbytes > 0) & (nbytes <= room), seconds, np.inf) for first, room in rooms.items()}
            )

    def best(self) -> Path | None:
        """Return the fastest path, None if none fits."""
        n, best, best_path = len(self.ranks), math.inf, None
        states: list[dict[int, tuple[float, Path]]] = [{} for _ in range(self.layers + 1)]
        for d in range(n):
            for i in range(1, self.layers + 1):
                seconds = float(self.cost[d][True][0, i]) + self.ends[d]
                if math.isfinite(seconds):
                    states[i][d] = seconds, ((d, i),)
        for i in range(1, self.layers + 1):
            for last, (seconds, path) in list(states[i].items()):
                for d in range(n):
                    if any(d == device for device, _ in path):
                        continue
                    for j in range(i + 1, self.layers + 1):
                        value = seconds + float(self.hop[last, d][i]) + float(self.cost[d][False][i, j])
                        if value < states[j].get(d, (math.inf, ()))[0]:
                            states[j][d] = value, (*path, (d, j - i))
        for last, (seconds, path) in states[self.layers].items():
            first = path[0][0]
            value = seconds + (0.0 if last == first else float(self.hop[last, first][-1]))
            if value < best:
                best, best_path = value, path
        return None if best_path is None else tuple((self.ranks[d], count) for d, count in best_path)


INFERENCE_SYSTEMS: dict[str, InferencePlanner] = {
    "galaxy_plus": plan,
    "algorithm_1": algorithm_1,
    "galaxy": galaxy,
    "megatron_lm": megatron_lm,
    "sequence_parallel": sequence_parallel,
    "edgeshard": edgeshard,
    "local": local,
}
