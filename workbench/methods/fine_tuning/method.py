"""Fine-tuning through the backbone as a Method: what is particular to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.common.layers import BATCH_SIZES
from workbench.methods.common.scaling import kept_layers
from workbench.methods.common.session import RankResult
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.methods.fine_tuning.phases import FineTuningRankJob, phases_on
from workbench.methods.fine_tuning.planning import plan_job, rank_job
from workbench.methods.fine_tuning.prepare import PreparedJob, check_plan, prepare, require_known
from workbench.methods.training.method import AnalyticTechnique, TrainingMethod
from workbench.methods.training.worker import train
from workbench.models.evaluation import Predictions
from workbench.models.loading import load_stack
from workbench.models.stack import LayerStack
from workbench.models.technique_saving import TrainedDescription, save_trained, set_trained
from workbench.models.techniques import TechniqueStage
from workbench.models.techniques import predict as predict_split
from workbench.planners.memory import check as check_memory
from workbench.profiler.analytic import TechniqueSizes
from workbench.runtime.context import RankContext
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches


def run_rank(context: RankContext, rank_job: FineTuningRankJob) -> RankResult:
    """Do this rank's part of a run."""
    return train(context, rank_job, phases_on)


def measure_rank(context: RankContext, asked: tuple[PreparedJob, bool]) -> tuple[LayerProfile, ...]:
    """Return what this device's own core takes for every layer.  asked: the job, and whether to measure again."""
    prepared, refresh = asked
    return FineTuning().host_layers(prepared, ignore, refresh=refresh)


class FineTuning(TrainingMethod[PreparedJob]):
    """Full fine-tuning, LoRA or Adapters, on one device or on several: what PAC+ is compared with."""

    name = "fine_tuning"
    run_rank = staticmethod(run_rank)
    measure_rank = staticmethod(measure_rank)

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Refuse what does not exist (see Method)."""
        require_known(job)

    def prepare(self, job: Job, notify: Notify) -> PreparedJob:
        """Find model and data (see Method)."""
        require_known(job)
        notify(Event("phase", message=f"Loading {job.task} and {job.model}"))
        return prepare(job)

    def host_layers(self, prepared: PreparedJob, notify: Notify, *, refresh: bool = False) -> tuple[LayerProfile, ...]:
        """Return every layer's cost on this host (see TrainingMethod)."""
        key = {
            "model": prepared.job.model,
            # The name alone may be a folder in which another model lies by now.
            "shape": asdict(prepared.facts),
            "batch_sizes": BATCH_SIZES,
            "technique": asdict(replace(prepared.config, seed=0, label_mean=0.0, label_std=1.0)),
            "max_length": prepared.longest,
        }

        def measure() -> tuple[LayerProfile, ...]:
            return measure_layers(load_stack(prepared.job.model), prepared.config, max_length=prepared.longest)

        return kept_layers(prepared, self.name, key, measure, notify, refresh=refresh)

    def technique(self, prepared: PreparedJob) -> AnalyticTechnique:
        """Return the technique's sizes (see TrainingMethod)."""
        config = prepared.config
        sizes = TechniqueSizes(
            lora_rank=config.lora_rank, lora_dropout=config.lora_dropout > 0, bottleneck=config.bottleneck, adapter_norms=config.train_norms
        )
        return AnalyticTechnique(config.technique, sizes)

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Plan all epochs in the job's paradigm (see Method)."""
        return plan_job(prepared, profile, cluster)

    def check_plan(self, prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
        """Refuse a plan of another model, cluster or batch (see TrainingMethod)."""
        check_plan(prepared, cluster, plan)

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Refuse what would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        if folder is not None:
            check_memory(profile, cluster, plan, sequence_length=prepared.longest)

    def rank_job(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> FineTuningRankJob:
        """Return what every rank is told (see TrainingMethod)."""
        return rank_job(prepared, profile, cluster, plan)

    def require_devices(self, prepared: PreparedJob, *, is_real: bool) -> None:
        """Nothing depends on the devices."""

    def begin(self, prepared: PreparedJob, stack: LayerStack, folder: Path, *, is_new: bool, notify: Notify) -> None:
        """Nothing is needed: initial weights follow from the seed."""

    def trained(self, prepared: PreparedJob, stack: LayerStack, rank_job: Any) -> _Trained:
        """Return what a run has trained (see TrainingMethod)."""
        return _Trained(prepared, stack, rank_job)

    def keep(self, prepared: PreparedJob, folder: Path) -> tuple[str, ...]:
        """Nothing is kept for later runs."""
        return ()


class _Trained:
    """The whole model with what was trained after any epoch."""

    def __init__(self, prepared: PreparedJob, stack: LayerStack, job: FineTuningRankJob) -> None:
        self._prepared, self._weights = prepared, job.trained
        self._model = TechniqueStage(stack.stage(0, stack.num_layers), prepared.config)

    def predict(self, epochs: Sequence[int], split: TokenizedSplit) -> list[Predictions]:
        """Return the predictions after each of some epochs."""
        found = []
        for epoch in epochs:
            set_trained(self._model, self._weights(epoch))
            found.append(predict_split(self._model, evaluation_batches(split)))
        return found

    def save(self, folder: Path, epoch: int, notes: dict[str, Any]) -> Path:
        """Write what was trained as it was after an epoch."""
        set_trained(self._model, self._weights(epoch))
        job = self._prepared.job
        about = TrainedDescription(config=self._prepared.config, model=job.model, task=job.task, max_length=job.max_length, notes=notes)
        return save_trained(folder, self._model, about)
