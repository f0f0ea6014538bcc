"""Does the start matter?  The same training from different initial weights, its activations in memory (PAC+, section IV-C, Fig. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.calibration import calibrate, set_statistics
from workbench.models.distillation import Distillation, distill, load_distilled
from workbench.models.evaluation import ActivationMemory
from workbench.models.initialization import initialize
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.stack import LayerStack
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, evaluation_batches
from workbench.widgets.progress import bar

WAYS = ("distilled", "pruned", "fan_in", "gaussian", "zero", "all_zero")
WARM_UP, WEIGHT_DECAY = 0.06, 0.01
MIN_BATCH = 2  # distillation compares the sentences of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """One way to begin.  scores: (steps done, share of the validation samples that are right)."""

    way: str
    scores: tuple[tuple[int, float], ...]

    def steps_to(self, target: float) -> int | None:
        """Return after how many steps the score first reached `target`, None if never."""
        return next((step for step, score in self.scores if score >= target), None)


def learning_curves(
    stack: LayerStack,
    config: ParallelAdapterConfig,
    train: TokenizedSplit,
    validation: TokenizedSplit,
    *,
    ways: Sequence[str] = WAYS,
    epochs: int = 2,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    every: int = 4,
) -> tuple[LearningCurve, ...]:
    """Return the validation score every `every` steps for each way of initialising; order, dropout and rates are the same for all.

    The backbone runs once for each batch.  'distilled' learns from the training sentences without their labels, one epoch.
    """
    batches = [
        collate(train, indices) for epoch in range(epochs) for indices in epoch_batches(train.lengths, batch_size, config.seed, epoch)
    ]
    with torch.no_grad():
        taps = [[tap.clone() for tap in stack(batch.input_ids, batch.attention_mask)[1]] for batch in bar(batches, "backbone")]
    scored = ActivationMemory(stack, evaluation_batches(validation))
    steps_per_epoch = len(batches) // epochs
    statistics = calibrate(stack, batches[:steps_per_epoch])
    curves = []
    for way in ways:
        adapter = ParallelAdapter(config)
        if way == "distilled":
            enough: list[Batch] = [batch for batch in batches[:steps_per_epoch] if len(batch.input_ids) >= MIN_BATCH]
            load_distilled(adapter, distill(stack, config, lambda _, enough=enough: enough, Distillation(epochs=1)))  # type: ignore[misc]
        else:
            initialize(adapter, way, stack=stack)  # type: ignore[arg-type]
        set_statistics(adapter, statistics)
        optimizer = make_optimizer(adapter, WEIGHT_DECAY)
        scores = [(0, _score(scored, adapter))]
        for step, (batch, tapped) in enumerate(bar(list(zip(batches, taps, strict=True)), f"training from '{way}' weights")):
            set_learning_rate(optimizer, learning_rate_at(step, len(batches), learning_rate, WARM_UP))
            logits = adapter.train().predict(tapped, batch.attention_mask, batch.sample_ids, epoch=step // steps_per_epoch)
            task_loss(logits, batch.labels, config.kind, label_std=config.label_std).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0 or step + 1 == len(batches):
                scores.append((step + 1, _score(scored, adapter)))
        curves.append(LearningCurve(way=way, scores=tuple(scores)))
    return tuple(curves)


def _score(scored: ActivationMemory, adapter: ParallelAdapter) -> float:
    [predicted] = scored.predict([adapter])
    right = [mine == theirs for mine, theirs in zip(predicted.answers("classification"), predicted.references(), strict=True)]
    return sum(right) / len(right)
