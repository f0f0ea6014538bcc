"""Planners of Galaxy+'s baselines (section IV-A): local inference, Megatron-LM, sequence parallelism, Galaxy.  EdgeShard's is edgeshard.py.

Each returns a plan or raises PlanError; check_memory=False returns a plan that does not fit too, as the first two would make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, check_inference
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.times import checked_ranks, stack_lengths


def finished(
    made: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None,
    memory: MemoryRule,
    check_memory: bool,
) -> InferencePlan:
    """Return the plan with its predicted seconds.  Raises PlanError if it does not fit and that is to be checked."""
    if check_memory:
        check_inference(made, profile, cluster, length=length, decoder_length=decoder_length, memory=memory)
    return replace(made, predicted_s=price_plan(made, profile, cluster, length=length, decoder_length=decoder_length).total_s)


def local(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    check_memory: bool = True,
) -> InferencePlan:
    """Return the plan of one device, the fastest on which the model fits.  Raises PlanError, of the largest device, if it fits on none."""
    stack_lengths(profile, length, decoder_length)
    made, refusals = [], []
    for rank in checked_ranks(profile, cluster, ranks):
        one = InferencePlan(method="local", paradigm="pipeline", ranks=(rank,), layers=(profile.num_layers,), length=length)
        try:
            made.append(
                finished(one, profile, cluster, length=length, decoder_length=decoder_length, memory=memory, check_memory=check_memory)
            )
        except PlanError as error:
            refusals.append((cluster.devices[rank].memory_bytes, error))
    if not made:
        raise max(refusals, key=lambda refusal: refusal[0])[1]
    return min(made, key=lambda plan: plan.predicted_s)


def megatron_lm(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    check_memory: bool = True,
) -> InferencePlan:
    """Return tensor parallelism with equal heads and columns on every device, whatever its speed and memory (Megatron-LM).

    Raises PlanError if the heads do not divide by the devices, or if a device cannot hold its part: out of memory.
    """
    stack_lengths(profile, length, decoder_length)
    chosen = checked_ranks(profile, cluster, ranks)
    count, units = len(chosen), profile.stacks[0].num_units
    if any(shape.num_units % count for shape in profile.stacks):
        able = max(number for number in range(1, count) if all(shape.num_units % number == 0 for shape in profile.stacks))
        raise PlanError(
            f"Equal parts of '{profile.model}' on {count} devices were asked for (Megatron-LM).",
            f"Its attention has {units} units, which {count} does not divide.",
            f"Use {able} of the devices, or a planner that cuts unequally, such as galaxy_plus.",
        )
    made = InferencePlan(
        method="megatron_lm",
        paradigm="tensor",
        ranks=chosen,
        units=(units // count,) * count,
        columns=proportional_parts(profile.stacks[0].columns, (1,) * count),
        length=length,
    )
    return finished(made, profile, cluster, length=length, decoder_length=decoder_length, memory=memory, check_memory=check_memory)


def sequence_parallel(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    check_memory: bool = True,
) -> InferencePlan:
    """Return sequence parallelism: equal parts of the sequence, and the whole model on every device.

    Raises PlanError if the sequence has fewer tokens than there are devices, or if a device cannot hold the model: out of memory.
    """
    lengths = stack_lengths(profile, length, decoder_length)
    chosen = checked_ranks(profile, cluster, ranks)
    if min(lengths) < len(chosen):
        raise PlanError(
            f"Equal parts of {min(lengths)} tokens on {len(chosen)} devices were asked for (sequence parallelism).",
            "That leaves a device without a token.",
            f"Use {min(lengths)} of the devices, or a planner that cuts unequally, such as galaxy_plus.",
        )
    made = InferencePlan(method="sequence_parallel", paradigm="sequence", ranks=chosen, shares=(1.0,) * len(chosen), length=length)
    return finished(made, profile, cluster, length=length, decoder_length=decoder_length, memory=memory, check_memory=check_memory)


def galaxy(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
) -> InferencePlan:
    """Return the conference version's plan: Algorithm 1, scheme 1 in every layer, overlapped (Galaxy).  Raises PlanError if it fails."""
    return algorithm_1(
        profile, cluster, length=length, decoder_length=decoder_length, ranks=ranks, memory=memory, substitute=False, method="galaxy"
    )
