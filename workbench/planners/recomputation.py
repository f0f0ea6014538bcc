"""Choose for each stage whether its activations stay in memory or are recomputed in the backward pass.

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
from workbench.core.plan import KEEP, RECOMPUTE, Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners.memory import Need, recomputing_layers


def recomputing(profile: Profile) -> Profile:
    """Return the profile of a run in which all stages recompute their activations."""
    return replace(profile, layers=tuple(map(recomputing_layers, profile.layers)))


GAIN = 0.98
"""Recompute where all activations fit only if a step takes at most this share of the time."""


def plan_within_memory(
    choice: ActivationsChoice,
    profile: Profile,
    cluster: Cluster,
    plan_with: Callable[[Profile], Plan],
    needs: Callable[[Plan], Mapping[int, Need]],
    seconds: Callable[[Plan], float],
) -> Plan:
    """Return the plan, whose stages say what happens to their activations.

    choice: 'auto' takes the faster of two plans: one that keeps all activations in memory, and one that may compute
    them again, which keeps them in the stages where they fit.
    plan_with: plans with a profile.  needs: the memory need of each rank under a plan.  seconds: the seconds of a step
    under a plan.
    Raises PlanError, naming device and bytes, if nothing fits.
    """
    if choice == RECOMPUTE:
        return _marked(plan_with(recomputing(profile)), lambda number: True)
    try:
        keeping = plan_with(profile)
    except PlanError:
        if choice == KEEP:
            raise
        return _where_short(profile, cluster, plan_with, needs)  # its error says what is missing in this case, too
    if choice == KEEP or not _memory_binds(cluster, keeping, needs):
        return keeping
    with contextlib.suppress(PlanError):
        again = _where_short(profile, cluster, plan_with, needs)
        again_s, kept_s = seconds(again), seconds(keeping)
        if any(stage.activations == RECOMPUTE for stage in again.stages) and again_s <= GAIN * kept_s:
            faster = f"A step takes {again_s:.3g} s, and {kept_s:.3g} s with the fastest plan that keeps all of them."
            return replace(again, notes=(*again.notes, faster))
    return keeping


def _memory_binds(cluster: Cluster, plan: Plan, needs: Callable[[Plan], Mapping[int, Need]]) -> bool:
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
        if needs(alone)[rank].total_bytes > device.memory_bytes:
            return True
    return False


def _where_short(
    profile: Profile,
    cluster: Cluster,
    plan_with: Callable[[Profile], Plan],
    needs: Callable[[Plan], Mapping[int, Need]],
) -> Plan:
    """Return the plan that recomputes in the stages whose activations do not fit.  Raises PlanError if nothing fits."""
    plan = plan_with(recomputing(profile))
    kept_needs = needs(_marked(plan, lambda number: False))

    def is_short(number: int) -> bool:
        ranks = plan.stages[number].ranks
        return any(
            kept_needs[rank].total_bytes > cluster.devices[rank].memory_bytes for rank in ranks if rank in kept_needs
        )

    chosen = _marked(plan, is_short)
    layers = " and ".join(stage.layers_in_words for stage in chosen.stages if stage.activations == RECOMPUTE)
    if not layers:
        return chosen
    why = f"The activations of {layers} do not fit in memory: the backward pass computes them again."
    return replace(chosen, notes=(*chosen.notes, why))


def _marked(plan: Plan, recomputes: Callable[[int], bool]) -> Plan:
    def marked(number: int, stage: Stage) -> Stage:
        return replace(stage, activations=RECOMPUTE if recomputes(number) else KEEP)

    return replace(plan, stages=tuple(marked(number, stage) for number, stage in enumerate(plan.stages)))
