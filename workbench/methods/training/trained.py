"""The whole model after each epoch of a run, for methods that train through the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.methods.base import SCORED, Notify, counting, ignore
from workbench.methods.training.phases import RankJob
from workbench.methods.training.prepare import PreparedTechnique
from workbench.models.evaluation import Predictions
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.models.saving import (
    TrainedDescription,
    kept_name,
    save_adapter,
    save_tokenizer,
    save_trained,
    set_trained,
)
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueStage
from workbench.models.techniques import predict as predict_split
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches


class Trained:
    """The whole model with the trained parameters after each epoch."""

    def __init__(self, prepared: PreparedTechnique, stack: LayerStack, job: RankJob) -> None:
        self._prepared, self._weights, self._quantization = prepared, job.trained, job.quantization
        self._model = TechniqueStage(stack.stage(0, stack.num_layers), prepared.config)

    def predict(self, epochs: Sequence[int], split: TokenizedSplit, notify: Notify = ignore) -> list[Predictions]:
        """Return the predictions after each of some epochs."""
        predictions = []
        for number, epoch in enumerate(epochs):
            set_trained(self._model, self._weights(epoch))
            report = counting(notify, SCORED, before=number, rounds=len(epochs))
            predictions.append(predict_split(self._model, evaluation_batches(split, report=report)))
        return predictions

    def save(self, folder: Path, epoch: int) -> Path:
        """Write the trained parameters after an epoch."""
        set_trained(self._model, self._weights(epoch))
        job, task, adapters = self._prepared.job, self._prepared.task, self._model.adapters
        quantization = self._quantization
        if isinstance(adapters, ParallelAdapterStage):  # as PAC+ saves them
            save_tokenizer(job.model, folder)
            adapter = TrainedDescription(config=adapters.config, model=kept_name(job.model), quantization=quantization)
            return save_adapter(folder, adapters.state_dict(), adapter)
        described = TrainedDescription(config=self._prepared.config, model=job.model, quantization=quantization)
        return save_trained(folder, self._model, described, class_names=task.class_names)
