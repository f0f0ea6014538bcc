"""A job: what to fine-tune, on what, how.  Notebooks, papermill and the command line all fill in this one form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """method, model, task: names (a model may also be a folder or a hub name).  batch_size: samples of one optimizer step.

    train_samples, validation_samples, test_samples: None takes the task's whole split.
    max_length: word pieces at which a sample is cut.  micro_batches: how many a mini-batch is cut into.
    data: a local folder for tasks that are not embedded.  options: the method's own settings.
    """

    method: str = "pac_plus"
    model: str = "all-MiniLM-L6-v2"
    task: str = "sentiment"
    epochs: int = 3
    seed: int = 0
    batch_size: int = 32
    micro_batches: int = 4
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup_fraction: float = 0.06
    max_length: int = 64
    train_samples: int | None = None
    validation_samples: int | None = None
    test_samples: int | None = None
    data: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "micro_batches", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"A job with {name} = {getattr(self, name)} was asked for.", "It must be at least 1.", f"Raise {name}.")
        for name in ("train_samples", "validation_samples", "test_samples"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"A job with {name} = {count} was asked for.", "An empty split trains nothing.", f"Raise {name}.")
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"A batch_size of {self.batch_size} in {self.micro_batches} micro_batches was asked for.",
                f"{self.batch_size} is not a multiple of {self.micro_batches}.",
                "Change one of them.",
            )
        if not self.learning_rate > 0 or self.weight_decay < 0 or not 0 <= self.warmup_fraction < 1:
            raise ConfigError(
                f"learning_rate {self.learning_rate}, weight_decay {self.weight_decay} and "
                f"warmup_fraction {self.warmup_fraction} were asked for.",
                "They must be above 0, at least 0, and in [0, 1).",
                "Change them.",
            )
