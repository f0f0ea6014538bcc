"""What an engine is told of a fine-tuning job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile
from workbench.methods.fine_tuning.layout import SharedParameter, shared_parameters
from workbench.models.loading import ModelFacts
from workbench.models.techniques import TechniqueConfig
from workbench.tasks.tokenize import TokenizedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """All that an engine needs to know.  The same on every rank; sent once.

    host_layers: seconds of every layer on one unslowed core, for pacing; None runs as fast as it can, and so do real devices.
    folder: shared by all devices; holds the checkpoints.  start_epoch: 0, or the first epoch that a resumed run still has to do.
    resumes: go on with that epoch's completed steps.  trace_steps: steps of each epoch kept span by span.
    """

    job: Job
    cluster: Cluster
    plan: Plan
    host_layers: tuple[LayerProfile, ...] | None
    config: TechniqueConfig
    facts: ModelFacts
    split: TokenizedSplit
    folder: Path
    start_epoch: int = 0
    resumes: bool = False
    trace_steps: int = 3
    timeout_s: float = 20.0

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters of which several stages hold copies."""
        return shared_parameters(self.facts, self.config.technique, self.plan)
