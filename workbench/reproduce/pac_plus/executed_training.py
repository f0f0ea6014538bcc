"""Train one technique on one task in one process: the same batches, schedule, selection and test for all of them (PAC+, Table VI)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.evaluation import TapStatistics, calibrate
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueStage
from workbench.reproduce.pac_plus.executed_runs import Outcome, Training, score
from workbench.reproduce.training import TokenizedTask
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, evaluation_batches

_CALIBRATION_BATCHES = 16


class TappedSplit:
    """A tokenized split and its taps, (L + 1) x d values for each real token, without padding.

    dtype: of the stored values; bfloat16 halves the memory (all-MiniLM-L6-v2: 5.4 kB a token).
    """

    def __init__(self, stack: LayerStack, split: TokenizedSplit, dtype: torch.dtype = torch.bfloat16) -> None:
        self.split = split
        lengths = torch.tensor(split.lengths)
        self._starts = lengths.cumsum(0) - lengths
        # Padding points to the row of zeros at the end.
        self._taps: list[Tensor] = []
        with torch.no_grad():
            for batch in evaluation_batches(split):
                taps = stack(batch.input_ids, batch.attention_mask)[1]
                if not self._taps:
                    self._taps = [torch.zeros(int(lengths.sum()) + 1, stack.hidden_size, dtype=dtype) for _ in taps]
                rows, real = self._rows(batch.indices, batch.input_ids.shape[1]), batch.attention_mask.bool()
                for kept, tap in zip(self._taps, taps, strict=True):
                    kept[rows[real]] = tap[real].to(dtype)

    def batch(self, indices: Sequence[int]) -> tuple[Batch, list[Tensor]]:
        """Return samples as a padded batch and their taps, (n, t, d) each, with zeros in the padding."""
        batch = collate(self.split, indices)
        rows = self._rows(batch.indices, batch.input_ids.shape[1])
        return batch, [kept[rows] for kept in self._taps]

    def _rows(self, indices: Sequence[int], width: int) -> Tensor:
        at = torch.arange(width)[None]
        starts = self._starts[list(indices)][:, None]
        ends = torch.tensor([len(self.split.ids[index]) for index in indices])[:, None]
        return torch.where(at < ends, starts + at, len(self._taps[0]) - 1)


def statistics_of(stack: LayerStack, split: TokenizedSplit) -> TapStatistics:
    """Return the statistics with which adapters standardise their inputs, from the first samples of a split."""
    size = 64
    starts = range(0, min(len(split), size * _CALIBRATION_BATCHES), size)
    return calibrate(stack, (collate(split, range(at, min(at + size, len(split)))) for at in starts))


class Trainee(NamedTuple):
    """A technique to be trained and scored.

    logits: (split, sample indices, epoch) -> logits (n, outputs) and labels (n,); the split is 'train', 'validation' or 'test'.
    """

    module: nn.Module
    logits: Callable[[str, Sequence[int], int], tuple[Tensor, Tensor]]


def adapter_trainee(adapter: ParallelAdapter, splits: dict[str, TappedSplit]) -> Trainee:
    """Return a parallel adapter with taps from memory: the backbone does not run."""

    def logits(split: str, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        batch, taps = splits[split].batch(indices)
        return adapter.predict(taps, batch.attention_mask, batch.sample_ids, epoch), batch.labels

    return Trainee(adapter, logits)


def backbone_trainee(stage: TechniqueStage, data: TokenizedTask) -> Trainee:
    """Return a whole backbone with trainable parts inside it, and its head."""

    def logits(split: str, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        batch = collate(getattr(data, split), indices)
        _, last_hidden = stage(batch.input_ids, batch.attention_mask)
        return stage.logits(last_hidden, batch.attention_mask, batch.sample_ids, epoch), batch.labels

    return Trainee(stage, logits)


def train(training: Training, data: TokenizedTask, trainee: Trainee, progress: Callable[[str], None]) -> Outcome:
    """Train, choose the epoch on validation, score the test split once with its weights.

    Random numbers are drawn from the training's seed; the caller's generators do not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        return _train(training, data, trainee, progress)


def _train(training: Training, data: TokenizedTask, trainee: Trainee, progress: Callable[[str], None]) -> Outcome:
    module, optimizer = trainee.module, make_optimizer(trainee.module, training.weight_decay)
    lengths = data.train.lengths
    per_epoch = len(epoch_batches(lengths, training.batch_size, training.seed, 0))
    average = _Average(module, training.averaging)
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    best: tuple[float, int, dict[str, Tensor]] | None = None
    step, seconds = 0, 0.0
    for epoch in range(training.epochs):
        total = 0.0
        for indices in epoch_batches(lengths, training.batch_size, training.seed, epoch):
            began = time.perf_counter()
            module.train()
            logits, labels = trainee.logits("train", indices, epoch)
            loss = task_loss(data, logits, labels)
            loss.backward()
            rate = learning_rate_at(step, training.epochs * per_epoch, training.learning_rate, training.warmup_fraction)
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            average.follow()
            total += loss.item() * len(indices)
            step += 1
            seconds += time.perf_counter() - began
            if training.score_every and step % training.score_every == 0 and step % per_epoch:
                curve.append((step, _score(data, trainee, "validation")[0]))
        losses.append(total / len(lengths))
        with average:
            found, _ = _score(data, trainee, "validation")
            if best is None or found > best[0]:
                best = found, step, copy.deepcopy(_trained(module))
        curve.append((step, found))
        progress(f"{training.name}: epoch {epoch + 1}, loss {losses[-1]:.3f}, {found:.2f}")
    assert best is not None
    module.load_state_dict(best[2], strict=False)
    validation_score, validation_outputs = _score(data, trainee, "validation")
    test_score, test_outputs = _score(data, trainee, "test")
    return Outcome(
        training=training, curve=tuple(curve), best_step=best[1], validation_score=validation_score, test_score=test_score,
        validation_outputs=validation_outputs, test_outputs=test_outputs, losses=tuple(losses),
        trainable_parameters=sum(one.numel() for one in module.parameters() if one.requires_grad), seconds=seconds,
    )  # fmt: skip


def task_loss(data: TokenizedTask, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits (n, outputs) against labels (n,): classes, or numbers, which are standardised."""
    if data.task.kind == "classification":
        return F.cross_entropy(logits, labels)
    known = torch.tensor(data.train.labels)
    return F.mse_loss(logits.squeeze(1), (labels - known.mean()) / known.std().clamp(min=1e-6))


def _score(data: TokenizedTask, trainee: Trainee, name: str) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """Return the score and the logits in the order of the samples."""
    split: TokenizedSplit = getattr(data, name)
    rows: list[tuple[float, ...]] = [()] * len(split)
    trainee.module.eval()
    with torch.no_grad():
        for batch in evaluation_batches(split):
            logits, _ = trainee.logits(name, batch.indices, 0)
            for index, row in zip(batch.indices, logits.float().tolist(), strict=True):
                rows[index] = tuple(row)
    return score(data.task, rows, split.labels), tuple(rows)


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


class _Average:
    """An exponential moving average of the trained weights; inside `with`, it replaces the module's weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self._mean = copy.deepcopy(_trained(module)) if decay else {}
        self._own: dict[str, Tensor] = {}
        self._steps = 0

    def follow(self) -> None:
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))  # the first weights soon lose their influence
        if self._decay:
            for name, parameter in _trained(self._module).items():
                self._mean[name].lerp_(parameter, 1 - decay)

    def __enter__(self) -> None:
        if self._decay:
            self._own = copy.deepcopy(_trained(self._module))
            self._module.load_state_dict(self._mean, strict=False)

    def __exit__(self, *exception: object) -> None:
        if self._decay:
            self._module.load_state_dict(self._own, strict=False)
