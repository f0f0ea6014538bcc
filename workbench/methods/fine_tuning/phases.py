"""The one phase of a fine-tuning run: every epoch forward and back through a pipeline's stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from workbench.core.errors import MissingDataError
from workbench.methods.common.folder import checkpoint_path, moments_path
from workbench.methods.common.reporting import LOADING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.fine_tuning.programs import Programs, SharedParameter, shared_parameters
from workbench.methods.training.phases import Phase, RankJob, StagePhase, make_optimizer
from workbench.methods.training.steps import PlannedStep
from workbench.models.loading import ModelFacts, import_family, load_stage
from workbench.models.lora import require_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.models.tensor_files import save_tensors
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory

WEIGHT = "weight/"
JOURNAL_BYTES = 32_000_000
"""A stage with more parameters and moments than this is kept after every epoch only: to copy them after every step would cost more
time than a crash of the program loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRankJob(RankJob):
    """All that a rank is told of a fine-tuning run.  config: what is trained.  facts: the model's shape."""

    config: TechniqueConfig
    facts: ModelFacts

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters of which several stages hold copies."""
        return shared_parameters(self.facts, self.config.technique, self.plan)

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        programs = Programs(self.profile, self.cluster, self.plan, self.facts, self.shared)
        return (Phase(epochs=range(self.job.epochs), steps=self.planned_epoch, program=programs.step),)

    def checkpoints(self, epoch: int) -> tuple[Path, ...]:
        """Return every stage's parameters (see RankJob)."""
        return tuple(checkpoint_path(self.folder, epoch, stage) for stage in range(len(self.plan.stages))) if epoch >= 0 else ()

    def prepare_imports(self) -> None:
        """Import what the model needs (see RankJob)."""
        import_family(self.job.model)
        if self.config.technique == "lora":
            require_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with what a technique trains in them.  What is kept of an epoch: parameters, and until the next one moments."""

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        if self.index is not None:
            stage = self.rank_job.plan.stages[self.index]
            model = TechniqueStage(load_stage(self.rank_job.job.model, stage.start, stage.stop), self.rank_job.config)
            self.compute = StageCompute(model)
            self.optimizer = make_optimizer(self.rank_job, model, self.steps_per_epoch)
            self.writes_journal = self.is_writer and self.optimizer.state_bytes <= JOURNAL_BYTES
            if epoch:
                files = (path(self.rank_job.folder, epoch - 1, self.index) for path in (checkpoint_path, moments_path))
                tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
                self.optimizer.load_named_tensors(tensors, num_steps=epoch * self.steps_per_epoch)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    @contextmanager
    def epoch(self, epoch: int, begin: int) -> Iterator[None]:
        """Drop the moments that a whole epoch has replaced (see RankPhase)."""
        if self.is_writer:
            moments_path(self.rank_job.folder, epoch - 2, self.stage).unlink(missing_ok=True)
        yield

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        return BackpropagationHandlers(shared=self.rank_job.shared, **self.own(planned, epoch)).table()

    def save(self, epoch: int) -> None:
        """Write parameters and moments, each file whole or not at all, the parameters last: they make the epoch count."""
        if self.is_writer and self.optimizer is not None:
            tensors = self.optimizer.named_tensors()
            weights = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
            moments = {name: tensor for name, tensor in tensors.items() if name not in weights}
            save_tensors(moments_path(self.rank_job.folder, epoch, self.stage), moments)
            save_tensors(checkpoint_path(self.rank_job.folder, epoch, self.stage), weights)


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase as a rank does it."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)


def load_weights(rank_job: FineTuningRankJob, epoch: int) -> dict[str, torch.Tensor]:
    """Return the trained parameters of all stages as they were after an epoch.  Raises MissingDataError if a stage's are not there."""
    found: dict[str, torch.Tensor] = {}
    for stage, path in enumerate(rank_job.checkpoints(epoch)):
        if not path.is_file():
            raise MissingDataError(
                f"Stage {stage} as it was after epoch {epoch + 1} was asked for.",
                f"'{path}' is not there.",
                "Give --workdir a folder that all devices share.",
            )
        found |= {name.removeprefix(WEIGHT): tensor for name, tensor in load_file(path).items()}
    return found
