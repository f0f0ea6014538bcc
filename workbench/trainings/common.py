"""Code shared by trainings in one process: a task's splits as token ids, a backbone with trained parts, its loss and
score, and stored results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from workbench.core.serial import load_or_compute, text_digest
from workbench.models.loading import load_tokenizer
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage, predict
from workbench.tasks import load_task
from workbench.tasks.metrics import LOSS, score
from workbench.tasks.task import Task
from workbench.tasks.tokenize import Batch, TokenizedSplit, evaluation_batches, tokenize

SPLITS = ("train", "validation", "test")
Limits = tuple[int | None, int | None, int | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTraining:
    """Settings of a training whose result is stored.

    limits: maximum numbers of samples of the train, validation and test splits.
    """

    model: str = "all-MiniLM-L6-v2"
    task: str = "sentiment"
    data: Path | None = None
    limits: Limits = (None, None, None)

    @property
    def digest(self) -> str:
        """Return the name of its stored result, which differs for every setting."""
        return text_digest(repr(self))

    def place(self, folder: Path, item: str, way: str, seed: int) -> Path:
        """Return the file of its result in a folder.  way: how it is trained."""
        return folder / item / f"{way}-{seed}-{self.digest}.json"

    def outcome(self, folder: Path | None, item: str, way: str, seed: int, kind: type[T], train: Callable[[], T]) -> T:
        """Return the folder's result for the same settings, or train now.  folder: None stores nothing."""
        path = None if folder is None else self.place(folder, item, way, seed)
        return load_or_compute(path, kind, train)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedTask:
    """A task with its splits as token ids."""

    task: Task
    train: TokenizedSplit
    validation: TokenizedSplit
    test: TokenizedSplit

    @classmethod
    def of(cls, task: Task, model: str, max_length: int) -> TokenizedTask:
        """Tokenize the splits for a model."""
        tokenizer = load_tokenizer(model)
        return cls(
            task=task, **{name: tokenize(getattr(task, name), tokenizer, max_length=max_length) for name in SPLITS}
        )


def limited_task(name: str, data: Path | None, limits: Limits) -> Task:
    """Return a task with limited numbers of training, validation and test samples."""
    samples: dict[str, Any] = {f"{split}_samples": limit for split, limit in zip(SPLITS, limits, strict=True)}
    return load_task(name, data=data, **samples)


def technique_stage(stack: LayerStack, task: Any, **settings: Any) -> TechniqueStage:
    """Return a whole backbone with trained parts and a head.

    task: an object with kind and num_outputs.  settings: other fields of TechniqueConfig.
    """
    sizes = {
        "hidden_size": stack.hidden_size,
        "num_layers": stack.num_layers,
        "kind": task.kind,
        "num_outputs": task.num_outputs,
    }
    return TechniqueStage(stack.stage(0, stack.num_layers), TechniqueConfig(**sizes, **settings))


def batch_loss(model: TechniqueStage, batch: Batch, epoch: int = 0) -> Tensor:
    """Return a whole model's mean loss over a mini-batch.  epoch: selects the head's dropout."""
    return task_loss(model.batch_logits(batch, epoch), batch.labels, model.config.kind)


def split_metrics(model: TechniqueStage, data: TokenizedTask, split: str) -> dict[str, float]:
    """Return the task's metrics on a split, per cent, a loss in nats.  The model is put into evaluation mode."""
    tokenized = getattr(data, split)
    metrics = score(data.task, getattr(data.task, split), tokenized, predict(model, evaluation_batches(tokenized)))
    return {name: value if name == LOSS else 100 * value for name, value in metrics.items()}
