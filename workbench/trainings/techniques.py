"""One training of an executed comparison in one process, its outcome and score, and tests for differences (PAC+,
section VI-B, Table VI).

All techniques get the same batches, schedule, selection and test.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.serial import text_digest, to_json
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.tasks.batching import epoch_batches
from workbench.tasks.metrics import compute
from workbench.tasks.task import Task
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, evaluation_batches
from workbench.trainings.common import TokenizedTask

CORRELATION = ("Pearson-Spearman", "pearson", "spearman")
SCORES = {"mrpc": ("mean of accuracy and F1", "accuracy", "f1"), "stsb": CORRELATION, "sentiment-rating": CORRELATION}
"""Tasks whose score is a mean of two metrics, as in Table VI: its name and the metrics.  All others use the
accuracy."""


TAPS: Mapping[str, Callable[[int], range]] = {
    "all": lambda num_layers: range(num_layers + 1),
    "every second": lambda num_layers: range(num_layers % 2, num_layers + 1, 2),
    "later half": lambda num_layers: range(num_layers // 2, num_layers + 1),
}
"""Which taps b_0 ... b_L of a backbone's L layers a side network reads; the first of them takes the place of b_0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All inputs of a training's result.

    technique: full, lora, adapters or parallel_adapters.  dropout: rate of the dropout before the head.
    backbone: storage of the frozen weights.  samples: maximum numbers in train, validation and test.
    taps: the layers of the backbone that have a parallel adapter (see TAPS).
    averaging: decay of an exponential moving average of the weights that is scored in their place, 0 for none.
    score_every: number of steps after which validation is scored, in addition to each epoch; 0 for epochs only.
    """

    task: str
    model: str
    technique: str
    seed: int
    learning_rate: float
    epochs: int = 3
    batch_size: int = 32
    max_length: int = 128
    weight_decay: float = 0.01
    warmup_fraction: float = 0.06
    dropout: float = 0.1
    backbone: str = "float32"
    reduction: int = 8
    initialization: str = "fan_in"
    averaging: float = 0.0
    taps: str = "all"
    score_every: int = 0
    samples: tuple[int | None, int | None, int | None] = (None, None, None)

    @property
    def name(self) -> str:
        """Return its name for a progress line, with every setting that is not the default."""
        named = ("reduction", "initialization", "averaging", "taps", "backbone")
        usual = {field.name: field.default for field in fields(self)}
        special = [f"{field} {getattr(self, field)}" for field in named if getattr(self, field) != usual[field]]
        return " ".join((self.task, self.technique, *special, f"seed {self.seed}"))

    @property
    def file_name(self) -> str:
        """Return the name of its outcome's file, which differs for each setting."""
        return f"{self.task}-{self.technique}-{self.seed}-{text_digest(to_json(self))}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training.

    curve: (step, validation score), rising steps; the last is the end of the training.  best_step: the end of the epoch
    with the best validation score, whose weights scored the test split, once.  test_outputs: logits (samples, outputs)
    of that step, in the order of the sample ids.  losses: mean training loss of each epoch.
    """

    training: Training
    curve: tuple[tuple[int, float], ...]
    best_step: int
    validation_score: float
    test_score: float
    test_outputs: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]
    trainable_parameters: int


def reached(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """Return the first step with at least the target, None if there is none."""
    return next((step for step, score in curve if score >= target), None)


def score(task: Task, outputs: Sequence[Sequence[float]], labels: Sequence[float]) -> float:
    """Return a task's score in per cent, as Table VI reports it, for logits (samples, outputs) and
    labels (samples,).
    """
    return score_answers(task, answers(task, outputs), labels)


def score_answers(task: Task, predictions: Sequence[float], labels: Sequence[float]) -> float:
    """Return the score of predicted classes or numbers (samples,)."""
    names = SCORES.get(task.name, ("", "accuracy"))[1:]
    return 100.0 * sum(compute(names, predictions, labels).values()) / len(names)


def answers(task: Task, outputs: Sequence[Sequence[float]]) -> list[float]:
    """Return the predicted classes of logits (samples, outputs), or the numbers in regression."""
    if task.kind == "regression":
        return [row[0] for row in outputs]
    return [float(max(range(len(row)), key=row.__getitem__)) for row in outputs]


def score_name(task: str) -> str:
    """Return the name of a task's score."""
    return SCORES.get(task, ("accuracy",))[0]


def taped(stack: LayerStack, split: TokenizedSplit, dtype: str = "bfloat16") -> ActivationCache:
    """Return an activation cache with a split's taps (all-MiniLM-L6-v2 in bfloat16: 5.4 kB a token), whose file ends
    with the object.
    """
    lengths, num_taps = split.lengths, stack.num_layers + 1
    manifest = CacheManifest(
        fingerprint="",
        samples=tuple(range(len(split))),
        lengths=lengths,
        num_taps=num_taps,
        width=stack.hidden_size,
        dtype=dtype,
    )
    # The memory map outlives the file's name: nothing is left on the disk, even if this process is killed.
    with tempfile.TemporaryDirectory(prefix="workbench-taps-") as folder:
        cache = ActivationCache.create(Path(folder) / "cache", manifest)
    with torch.no_grad():
        for batch in evaluation_batches(split):
            cache.write_batch(batch.indices, stack(batch.input_ids, batch.attention_mask)[1])
    return cache


def taps_of(cache: ActivationCache, batch: Batch) -> list[Tensor]:
    """Return a batch's taps, (n, t, d) each, with zeros in the padding."""
    return cache.batch(batch.indices, batch.input_ids.shape[1])


class Trainee(NamedTuple):
    """A technique to be trained and scored.

    logits: (split, batch, epoch) -> logits (n, outputs); the split is 'train', 'validation' or 'test'.
    """

    module: nn.Module
    logits: Callable[[str, Batch, int], Tensor]


@torch.random.fork_rng(devices=[])
def train(training: Training, data: TokenizedTask, trainee: Trainee, progress: Callable[[str], None]) -> Outcome:
    """Train, choose the epoch on validation, score the test split once with its weights.

    Random numbers are drawn from the training's seed; the caller's generators do not change.
    """
    torch.manual_seed(training.seed)
    module, optimizer = trainee.module, make_optimizer(trainee.module, training.weight_decay)
    lengths = data.train.lengths
    per_epoch = len(epoch_batches(lengths, training.batch_size, training.seed, 0))
    mean = copy.deepcopy(_trained(module)) if training.averaging else {}
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    best: tuple[float, int, dict[str, Tensor]] | None = None
    step = 0
    for epoch in range(training.epochs):
        total = 0.0
        for indices in epoch_batches(lengths, training.batch_size, training.seed, epoch):
            module.train()
            batch = collate(data.train, indices)
            loss = task_loss(data, trainee.logits("train", batch, epoch), batch.labels)
            loss.backward()
            rate = learning_rate_at(step, training.epochs * per_epoch, training.learning_rate, training.warmup_fraction)
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(indices)
            step += 1
            for name, moment in mean.items():  # the first weights soon lose their influence
                moment.lerp_(module.get_parameter(name).detach(), 1 - min(training.averaging, step / (step + 10)))
            if training.score_every and step % training.score_every == 0 and step % per_epoch:
                curve.append((step, _score(data, trainee, "validation")[0]))
        losses.append(total / len(lengths))
        current = copy.deepcopy(_trained(module)) if mean else {}
        module.load_state_dict(mean, strict=False)  # scored in place of the trained weights
        value, _ = _score(data, trainee, "validation")
        if best is None or value > best[0]:
            best = value, step, copy.deepcopy(_trained(module))
        module.load_state_dict(current, strict=False)
        curve.append((step, value))
        progress(f"{training.name}: epoch {epoch + 1}, loss {losses[-1]:.3f}, {value:.2f}")
    assert best is not None
    module.load_state_dict(best[2], strict=False)
    test_score, test_outputs = _score(data, trainee, "test")
    return Outcome(
        training=training, curve=tuple(curve), best_step=best[1], validation_score=best[0], test_score=test_score,
        test_outputs=test_outputs, losses=tuple(losses),
        trainable_parameters=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    )  # fmt: skip


def task_loss(data: TokenizedTask, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits (n, outputs) against labels (n,): classes, or numbers, which are standardised."""
    if data.task.kind == "classification":
        return F.cross_entropy(logits, labels)
    references = torch.tensor(data.train.labels)
    return F.mse_loss(logits.squeeze(1), (labels - references.mean()) / references.std().clamp(min=1e-6))


def _score(data: TokenizedTask, trainee: Trainee, name: str) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """Return the score and the logits in the order of the samples."""
    split: TokenizedSplit = getattr(data, name)
    rows: list[tuple[float, ...]] = [()] * len(split)
    trainee.module.eval()
    with torch.no_grad():
        for batch in evaluation_batches(split):
            for index, row in zip(batch.indices, trainee.logits(name, batch, 0).float().tolist(), strict=True):
                rows[index] = tuple(row)
    return score(data.task, rows, split.labels), tuple(rows)


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
