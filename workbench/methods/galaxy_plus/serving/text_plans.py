"""Plans of devices that write texts: for texts of a usual length, with room for the keys and values of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import System
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS
from workbench.methods.galaxy_plus.planners.terms import problem_for
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.methods.galaxy_plus.serving.rescheduler import Planner
from workbench.methods.galaxy_plus.serving.serve import planner_of
from workbench.models.sharding import LayoutFacts, ModelLayout
from workbench.models.speculation import MOST_ROWS
from workbench.models.text import MAX_TOKENS

PLANNED_TOKENS = 64
"""Tokens of the text for which devices are planned, and after which the shown token comes."""
KEPT: dict[str, Any] = {"kept_tokens": MOST_ROWS * (PLANNED_TOKENS + MAX_TOKENS), "kept_texts": MOST_ROWS}
"""Texts for whose keys and values there is memory: as many as are written together, of usual lengths."""


def planned_lengths(layout: LayoutFacts | ModelLayout) -> tuple[int, ...]:
    """Return the tokens in each stack for which devices are planned."""
    longest = min(PLANNED_TOKENS, layout.max_length or PLANNED_TOKENS)
    return (longest, longest)[: len(layout.stacks)]


def text_planner(
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: tuple[int, ...],
    *,
    system: System,
    first: InferencePlan | None = None,
) -> Planner:
    """Return a system's planner.  first: the plan of all devices, instead of the planner's.  Raises PlanError if the
    model fits on no devices.
    """
    if first is None and system != "galaxy_plus":
        problem = problem_for(profile, cluster, lengths, **KEPT)
        first = INFERENCE_SYSTEMS[system](problem)
        first = replace(first, predicted_s=SequencePrice(problem)(first))
    return planner_of(profile, cluster, lengths, first=first, **KEPT)
