"""Compare drafts for texts on some devices by the shortest round of each, simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.profile import Profile
from workbench.methods.common.acceptances import acceptance_of
from workbench.methods.common.draft_advice import DraftAdvice, DraftOffer
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import System
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.profiles import inference_of
from workbench.methods.galaxy_plus.serving.drafts import DraftPrices, Round, draft_profile, token_s
from workbench.methods.galaxy_plus.serving.text_plans import KEPT, planned_lengths, text_planner
from workbench.models.sharding import layout_facts
from workbench.models.speculation import INT4, DraftChoice

SYSTEMS: tuple[System, ...] = ("galaxy_plus", "galaxy", "megatron_lm", "edgeshard", "local")
"""Systems whose plans can write a token."""
SHARES = (4, 2)
"""Drafts that are compared have the first layers of a model, one in so many."""


def advise_drafts(
    model: str, cluster: Cluster, profile_of: Callable[[str, dict[str, Any]], Profile], *, draft: str = ""
) -> DraftAdvice:
    """Compare drafts for texts of one reader.

    profile_of: returns the costs of a model on the devices, for a method's options.  draft: another one to compare (see
    DraftChoice.read).
    Raises PlanError if the model fits on no devices, ConfigError as DraftChoice.read.
    """
    layout = layout_facts(model)
    choices = {name: DraftChoice.read(name, model) for name in draft_names(layout.stacks[-1].num_layers, draft)}

    def costs_of(name: str) -> InferenceProfile:
        return inference_of(profile_of(name, {"generate": 1}))

    profile, lengths = costs_of(model), planned_lengths(layout)
    programs, names = Programs(cluster, layout.stacks, profile), cluster.names
    plans = _plans(profile, cluster, lengths)
    seconds = {system: token_s(programs, plan, lengths) for system, plan in plans.items()}
    fastest = min(seconds, key=lambda system: seconds[system])
    offers, refused = list[DraftOffer](), dict[str, str]()
    for name, choice in choices.items():
        costs = draft_profile(choice, costs_of(choice.model) if choice.model else profile)
        prices, rounds = DraftPrices(programs, costs, profile, lengths, **KEPT), list[tuple[System, Round]]()
        for system, plan in plans.items():
            try:
                best = prices.best(plan, set(range(cluster.world_size)).difference(plan.ranks))
            except PlanError as error:
                refused[name] = error.found
                continue
            rounds.append((system, replace(best, token_s=seconds[fastest])))
        if not rounds:
            continue
        refused.pop(name, None)
        system, shortest = min(rounds, key=lambda pair: pair[1].seconds)
        acceptance = acceptance_of(model, name)
        offers.append(
            DraftOffer(
                name=name,
                system=system,
                guesser=names[shortest.rank],
                checkers=tuple(names[rank] for rank in plans[system].ranks),
                round_s=shortest.seconds,
                break_even=shortest.break_even,
                at_most=shortest.speedup(1.0),
                acceptance=acceptance,
                expected=None if acceptance is None else shortest.speedup(acceptance.share),
            )
        )
    return DraftAdvice(
        model=model,
        system=fastest,
        devices=tuple(names[rank] for rank in plans[fastest].ranks),
        token_s=seconds[fastest],
        offers=tuple(sorted(offers, key=lambda offer: offer.round_s)),
        refused=refused,
    )


def draft_names(num_layers: int, draft: str = "") -> list[str]:
    """Return the drafts that are compared for a model of so many layers.  draft: another one."""
    layers = (round(num_layers / share) for share in SHARES)
    names = [draft, *(f"layers:{count}" for count in layers if 0 < count < num_layers), INT4]
    return [name for name in dict.fromkeys(names) if name]


def _plans(profile: InferenceProfile, cluster: Cluster, lengths: tuple[int, ...]) -> dict[System, InferencePlan]:
    plans, lack, everyone = dict[System, InferencePlan](), None, tuple(range(cluster.world_size))
    for system in SYSTEMS:
        try:
            plans[system] = text_planner(profile, cluster, lengths, system=system)(everyone)
        except PlanError as error:
            lack = lack or error
    if not plans:
        assert lack is not None
        raise lack
    return plans
