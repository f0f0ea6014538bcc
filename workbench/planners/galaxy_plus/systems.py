"""Every planner of single-shot inference by name: Galaxy+, Algorithm 1 as printed, and the baselines of section IV-A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, Paradigm
from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.baselines import galaxy, local, megatron_lm, sequence_parallel
from workbench.planners.galaxy_plus.edgeshard import edgeshard
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule
from workbench.planners.galaxy_plus.planner import plan


class InferencePlanner(Protocol):
    """Returns a plan for one sequence of `length` tokens on all or some ranks.  Raises PlanError, naming device and bytes, if none fits."""

    def __call__(
        self,
        profile: InferenceProfile,
        cluster: Cluster,
        *,
        length: int,
        decoder_length: int | None = None,
        ranks: Sequence[int] | None = None,
        memory: MemoryRule = HELD,
    ) -> InferencePlan:
        """Plan for `length` tokens, and `decoder_length` (default: the same) in a decoder behind an encoder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSystem:
    """A system of the evaluation.  label: as the paper writes it."""

    label: str
    paradigm: Paradigm
    plan: InferencePlanner


INFERENCE_SYSTEMS: dict[str, InferenceSystem] = {
    "galaxy_plus": InferenceSystem(label="Galaxy+", paradigm="hybrid", plan=plan),
    "algorithm_1": InferenceSystem(label="Galaxy+ (Algorithm 1)", paradigm="hybrid", plan=algorithm_1),
    "galaxy": InferenceSystem(label="Galaxy", paradigm="hybrid", plan=galaxy),
    "megatron_lm": InferenceSystem(label="M-LM", paradigm="tensor", plan=megatron_lm),
    "sequence_parallel": InferenceSystem(label="SP", paradigm="sequence", plan=sequence_parallel),
    "edgeshard": InferenceSystem(label="EdgeShard", paradigm="pipeline", plan=edgeshard),
    "local": InferenceSystem(label="Local", paradigm="pipeline", plan=local),
}
