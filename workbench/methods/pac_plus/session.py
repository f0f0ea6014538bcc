"""What an engine is told of a PAC+ job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.pac_plus.programs import Programs
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.quantization.config import QuantizationConfig
from workbench.tasks.tokenize import TokenizedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """All that an engine needs to know.  The same on every rank; sent once.

    profile: what every layer costs on every device.  is_paced: emulated devices take as long; real ones are never slowed down.
    folder: shared by the emulated devices; holds the initial adapter and the checkpoints.
    start_epoch: 0, or the first epoch that a resumed run still has to do.  resumes: go on with that epoch's completed steps.
    trace_steps: steps of each epoch kept span by span.  kept: folder and key of a kept activation cache that serves all epochs; None
    fills one in the first epoch.
    """

    job: Job
    cluster: Cluster
    plan: Plan
    profile: Profile
    adapter: ParallelAdapterConfig
    split: TokenizedSplit
    folder: Path
    fingerprint: str
    cache_dtype: str
    start_epoch: int = 0
    resumes: bool = False
    quantization: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(storage="float32"))
    kept: tuple[Path, str] | None = None
    trace_steps: int = 3
    timeout_s: float = 20.0
    is_paced: bool = True

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Return the bytes of every layer, which are the same on all devices."""
        return self.profile.layers[0]

    def programs(self) -> Programs:
        """Return the programs of this run."""
        return Programs(self.profile, self.cluster, self.plan, self.adapter, hidden_dtype=self.quantization.compute)

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.folder / "checkpoints"
