"""Choose for each stage whether its activations stay in memory or are recomputed in the backward pass.

A planner needs no rule of its own for this: it plans with a profile whose layers keep only their inputs and whose
backward pass contains the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.names import ActivationsChoice
from workbench.core.plan import KEEP, RECOMPUTE, Plan, Stage
from workbench.core.profile import Profile
from workbench.planners.memory import Need, recomputing_layers


def recomputing(profile: Profile) -> Profile:
    """Return the profile of a run in which all stages recompute their activations."""
    return replace(profile, layers=tuple(map(recomputing_layers, profile.layers)))


def plan_within_memory(
    choice: ActivationsChoice,
    profile: Profile,
    cluster: Cluster,
    plan_with: Callable[[Profile], Plan],
    needs: Callable[[Plan], Mapping[int, Need]],
) -> Plan:
    """Return the plan, whose stages say what happens to their activations.

    choice: 'auto' keeps the activations in memory if a plan fits so.  If none does, it plans with recomputation, and
    keeps them in the stages where they fit.
    plan_with: plans with a profile.  needs: the memory need of each rank under a plan.  Raises PlanError, naming device
    and bytes, if nothing fits.
    """
    if choice == KEEP:
        return plan_with(profile)
    if choice == "auto":
        try:
            return plan_with(profile)
        except PlanError:
            pass  # the planner's next error says what is missing even with recomputation
    plan = _marked(plan_with(recomputing(profile)), lambda number: True)
    if choice == RECOMPUTE:
        return plan
    kept = needs(_marked(plan, lambda number: False))

    def is_short(number: int) -> bool:
        ranks = plan.stages[number].ranks
        return any(kept[rank].total_bytes > cluster.devices[rank].memory_bytes for rank in ranks if rank in kept)

    chosen = _marked(plan, is_short)
    layers = " and ".join(stage.layers_in_words for stage in chosen.stages if stage.activations == RECOMPUTE)
    why = f"The activations of {layers} do not fit in memory: the backward pass computes them again."
    return replace(chosen, notes=(*chosen.notes, why))


def _marked(plan: Plan, recomputes: Callable[[int], bool]) -> Plan:
    def marked(number: int, stage: Stage) -> Stage:
        return replace(stage, activations=RECOMPUTE if recomputes(number) else KEEP)

    return replace(plan, stages=tuple(marked(number, stage) for number, stage in enumerate(plan.stages)))
