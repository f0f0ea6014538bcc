"""The one phase of a fine-tuning run: every epoch forward and back through a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.reporting import LOADING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers, Programs, SharedParameter, StageCompute, shared_parameters
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import Phase, RankJob, StagePhase, make_optimizer
from workbench.models.loading import ModelFacts, import_family
from workbench.models.lora import require_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory

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
        programs = Programs(self.profile, self.cluster, self.plan, self.facts, self.shared, self.schedule)
        return (Phase(epochs=range(self.job.epochs), steps=self.planned_epoch, program=programs.step),)

    def prepare_imports(self) -> None:
        """Import what model and technique need (see SessionJob)."""
        import_family(self.job.model)
        if self.config.technique == "lora":
            require_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with what a technique trains in them."""

    journal_bytes = JOURNAL_BYTES

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        if self.index is not None:
            stage = self.rank_job.plan.stages[self.index]
            model = TechniqueStage(self.rank_job.load_backbone(stage.start, stage.stop), self.rank_job.config)
            self.compute = StageCompute(model)
            self.optimizer = make_optimizer(self.rank_job, model, self.steps_per_epoch)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        return BackpropagationHandlers(shared=self.rank_job.shared, **self.own(planned, epoch)).table()


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase as a rank does it."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)
