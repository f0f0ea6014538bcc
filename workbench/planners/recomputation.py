"""Choose for each stage whether its activations stay in memory, are recomputed in the backward pass, or are read from
the disk.

A planner needs no rule for this: it plans with a profile whose layers keep only their inputs and whose
backward pass contains the forward pass again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.names import ActivationsChoice
from workbench.core.plan import DISK, KEEP, RECOMPUTE, Activations, Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.units import three_figures
from workbench.planners.memory import recomputing_layers


def recomputing(profile: Profile) -> Profile:
    """Return the profile of a run in which all stages recompute their activations."""
    return replace(profile, layers=tuple(map(recomputing_layers, profile.layers)))


def profile_with(profile: Profile, cluster: Cluster, activations: Activations) -> Profile:
    """Return the profile of a run in which this happens to the activations of all stages."""
    if activations == DISK:
        rows = zip(profile.layers, cluster.devices, strict=True)
        layers = (recomputing_layers(row, device) for row, device in rows)
        return replace(profile, layers=tuple(layers))
    return recomputing(profile) if activations == RECOMPUTE else profile


GAIN = 0.98
"""Recompute where all activations fit only if a step takes at most this share of the time."""


def plan_within_memory(
    choice: ActivationsChoice,
    profile: Profile,
    cluster: Cluster,
    plan_with: Callable[[Profile], Plan],
    needs: Callable[[Plan], Mapping[int, int]],
    seconds: Callable[[Plan], float],
) -> Plan:
    """Return the plan, whose stages say what happens to their activations.

    choice: 'auto' takes the faster of two plans: one that keeps all activations in memory, and one that may compute
    them again, which keeps them in the stages where they fit.  It never takes the disk, which wears out.
    plan_with: plans with a profile.  needs: the bytes that each rank needs under a plan.  seconds: how long a
    step takes under a plan.
    Raises PlanError, naming device and bytes, if nothing fits.
    """
    if choice in (RECOMPUTE, DISK):
        return _marked(plan_with(profile_with(profile, cluster, choice)), lambda stage: True, choice)
    try:
        keeping = plan_with(profile)
    except PlanError:
        if choice == KEEP:
            raise
        return _where_short(profile, cluster, plan_with, needs)  # its error names the missing bytes in this case, too
    if choice == KEEP or not _memory_binds(cluster, keeping, needs):
        return keeping
    with contextlib.suppress(PlanError):
        again = _where_short(profile, cluster, plan_with, needs)
        again_s, kept_s = seconds(again), seconds(keeping)
        if again.recomputes and again_s <= GAIN * kept_s:
            faster = (
                f"A step takes {three_figures(again_s)} s, and {three_figures(kept_s)} s with the fastest plan that "
                "keeps all of them."
            )
            return replace(again, notes=(*again.notes, faster))
    return keeping


def _memory_binds(cluster: Cluster, plan: Plan, needs: Callable[[Plan], Mapping[int, int]]) -> bool:
    """Return whether a device has no room for the whole model and a mini-batch, so that another plan might be faster if
    activations took less.
    """
    for rank, device in enumerate(cluster.devices):
        share = Share(rank=rank, samples=plan.mini_batch_size)
        all_layers = Stage(start=0, stop=plan.num_layers, shares=(share,))
        alone = replace(
            plan,
            stages=(all_layers,),
            micro_batch_size=plan.mini_batch_size,
            num_micro_batches=1,
            cached=None,
            later=(),
        )
        if needs(alone)[rank] > device.memory_bytes:
            return True
    return False


def _where_short(
    profile: Profile,
    cluster: Cluster,
    plan_with: Callable[[Profile], Plan],
    needs: Callable[[Plan], Mapping[int, int]],
) -> Plan:
    """Return the plan that recomputes in the stages whose activations do not fit.  Raises PlanError if nothing fits."""
    plan = plan_with(recomputing(profile))
    kept_needs = needs(_marked(plan, lambda stage: False))

    def is_short(stage: Stage) -> bool:
        return any(kept_needs[rank] > cluster.devices[rank].memory_bytes for rank in stage.ranks if rank in kept_needs)

    chosen = _marked(plan, is_short)
    stages = [stage for _, stages in chosen.assignments for stage in stages if stage.activations == RECOMPUTE]
    layers = " and ".join(dict.fromkeys(stage.layers_in_words for stage in stages))
    if not layers:
        return chosen
    why = f"The activations of {layers} do not fit in memory: the backward pass computes them again."
    return replace(chosen, notes=(*chosen.notes, why))


def _marked(plan: Plan, releases: Callable[[Stage], bool], choice: Activations = RECOMPUTE) -> Plan:
    def marked(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(replace(stage, activations=choice if releases(stage) else KEEP) for stage in stages)

    later = tuple((first, marked(stages)) for first, stages in plan.later)
    return replace(plan, stages=marked(plan.stages), later=later)
