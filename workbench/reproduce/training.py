"""What executed trainings begin with: a task's splits as token ids, and a backbone with a technique's trained parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.models.loading import load_tokenizer
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.tasks import load_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, tokenize

SPLITS = ("train", "validation", "test")
Limits = tuple[int | None, int | None, int | None]


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
        return cls(task=task, **{name: tokenize(getattr(task, name), tokenizer, max_length=max_length) for name in SPLITS})


def limited_task(name: str, data: Path | None, limits: Limits) -> Task:
    """Return a task with at most so many training, validation and test samples."""
    samples: dict[str, Any] = {f"{split}_samples": limit for split, limit in zip(SPLITS, limits, strict=True)}
    return load_task(name, data=data, **samples)


def technique_stage(stack: LayerStack, task: Any, **settings: Any) -> TechniqueStage:
    """Return a whole backbone with trained parts and a head.  task: has kind and num_outputs.  settings: others of TechniqueConfig."""
    sizes = {"hidden_size": stack.hidden_size, "num_layers": stack.num_layers, "kind": task.kind, "num_outputs": task.num_outputs}
    return TechniqueStage(stack.stage(0, stack.num_layers), TechniqueConfig(**sizes, **settings))
