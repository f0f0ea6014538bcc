"""What an engine is told of a fine-tuning job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.fine_tuning.layout import SharedParameter, shared_parameters
from workbench.methods.fine_tuning.programs import Programs
from workbench.models.loading import ModelFacts
from workbench.models.techniques import TechniqueConfig
from workbench.tasks.tokenize import TokenizedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """All that an engine needs to know.  The same on every rank; sent once.

    profile: what every layer costs on every device.  is_paced: emulated devices take as long; real ones are never slowed down.
    folder: shared by all devices; holds the checkpoints.  start_epoch: 0, or the first epoch that a resumed run still has to do.
    resumes: go on with that epoch's completed steps.  trace_steps: steps of each epoch kept span by span.
    """

    job: Job
    cluster: Cluster
    plan: Plan
    profile: Profile
    config: TechniqueConfig
    facts: ModelFacts
    split: TokenizedSplit
    folder: Path
    start_epoch: int = 0
    resumes: bool = False
    trace_steps: int = 3
    timeout_s: float = 20.0
    is_paced: bool = True

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Return the bytes of every layer, which are the same on all devices."""
        return self.profile.layers[0]

    def programs(self) -> Programs:
        """Return the programs of this run."""
        return Programs(self.profile, self.cluster, self.plan, self.facts, self.shared)

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters of which several stages hold copies."""
        return shared_parameters(self.facts, self.config.technique, self.plan)
