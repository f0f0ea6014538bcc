"""Build the inputs of the trainings and run those without an outcome; the backbone runs once for all trainings that share its taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from workbench.core.errors import check_choice
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.distillation import distill, distillation_fingerprint, distilled, load_distilled
from workbench.models.evaluation import TapStatistics, set_statistics
from workbench.models.initialization import How, copy_torch_pruned, initialize
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.reproduce.pac_plus.executed_runs import Outcome, Training
from workbench.reproduce.pac_plus.executed_training import (
    TappedSplit,
    Trainee,
    adapter_trainee,
    backbone_trainee,
    statistics_of,
    train,
)
from workbench.reproduce.result import kept_or_made
from workbench.reproduce.training import SPLITS, TokenizedTask, limited_task, technique_stage
from workbench.tasks.embedded import load_unlabelled
from workbench.tasks.task import Task
from workbench.tasks.tokenize import text_batches

DISTILLATION_SHARE = 4
"""If a comparison uses fewer training samples, this many times as many unlabelled texts are used for distillation."""


def run_all(
    trainings: Sequence[Training], folder: Path | None, data: Path | None, progress: Callable[[str], None]
) -> dict[Training, Outcome]:
    """Return the outcome of each training: from the folder if it exists, otherwise by running it now.

    folder: None stores none.  data: a folder with the GLUE tasks, for those that need one.
    """
    bench = _Bench(data, folder, progress)
    found: dict[Training, Outcome] = {}
    for training in sorted(dict.fromkeys(trainings), key=_grouping):  # stable: trainings that share taps are consecutive
        path = None if folder is None else folder / training.file_name
        found[training] = kept_or_made(path, Outcome, partial(bench.outcome, training))
        progress(f"{training.name}: test {found[training].test_score:.2f}")
    return {training: found[training] for training in trainings}


def task_of(training: Training, data: Path | None) -> Task:
    """Return a training's task, with its test labels.  data: see run_all."""
    return limited_task(training.task, None if training.task.startswith("sentiment") else data, training.samples)


def tokenized_task(training: Training, data: Path | None) -> TokenizedTask:
    """Return a training's task, tokenized."""
    return TokenizedTask.of(task_of(training, data), training.model, training.max_length)


def _grouping(training: Training) -> tuple[Any, ...]:
    return training.task, training.model, tuple(str(one) for one in training.samples), training.backbone


class _Bench:
    """State shared by consecutive trainings; only the last of each kind is kept."""

    def __init__(self, data: Path | None, folder: Path | None, progress: Callable[[str], None]) -> None:
        self._data, self._folder, self._progress = data, folder, progress
        self._kept: dict[str, tuple[Any, Any]] = {}

    def _once(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        if kind not in self._kept or self._kept[kind][0] != key:
            self._kept.pop(kind, None)  # free the old one before the new one is made
            self._kept[kind] = (key, make())
        return self._kept[kind][1]

    def outcome(self, training: Training) -> Outcome:
        """Train now."""
        return train(training, self.task(training), self.trainee(training), self._progress)

    def task(self, training: Training) -> TokenizedTask:
        """Return the training's task, tokenized."""
        key = (training.task, training.model, training.samples, training.max_length)
        tokenized: TokenizedTask = self._once("task", key, partial(tokenized_task, training, self._data))
        return tokenized

    def trainee(self, training: Training) -> Trainee:
        """Return an untrained technique."""
        check_choice("technique", training.technique, ("full", "lora", "adapters", "parallel_adapters"))
        if training.technique == "parallel_adapters":
            return self._adapter_trainee(training)
        data, stack = self.task(training), load_stack(training.model)
        stage = technique_stage(stack, data.task, technique=training.technique, dropout=training.dropout, seed=training.seed)
        return backbone_trainee(stage, data)

    def _adapter_trainee(self, training: Training) -> Trainee:
        data = self.task(training)
        key = (*_grouping(training), training.max_length)

        def tap() -> tuple[LayerStack, dict[str, TappedSplit], TapStatistics]:
            stack = backbone(training.model, training.backbone)
            splits = {name: TappedSplit(stack, getattr(data, name)) for name in SPLITS}
            return stack, splits, statistics_of(stack, data.train)

        stack, splits, statistics = self._once("taps", key, tap)
        adapter = ParallelAdapter(adapter_config(stack, training, data))
        self._initialize(adapter, training, stack)
        set_statistics(adapter, statistics)
        return adapter_trainee(adapter, splits)

    def _initialize(self, adapter: ParallelAdapter, training: Training, stack: LayerStack) -> None:
        how: Any = training.initialization
        check_choice("initialization", how, (*get_args(How), "torch_pruned", "distilled"))
        if how in get_args(How):
            # Weights to copy are those of the backbone before quantization.
            initialize(adapter, how, stack=stack if training.backbone == "float32" else load_stack(training.model))
            return
        initialize(adapter, "fan_in")
        if how == "torch_pruned":
            copy_torch_pruned(adapter, load_stack(training.model))
        else:
            load_distilled(adapter, self._distilled(training, adapter.config))

    def _distilled(self, training: Training, config: ParallelAdapterConfig) -> dict[str, torch.Tensor]:
        """Return the distilled state of a shape: one for all tasks and seeds, as a server would produce it."""
        config = replace(config, seed=0, kind="classification", num_outputs=2)
        texts = load_unlabelled()
        if training.samples[0] is not None:
            texts = texts[: DISTILLATION_SHARE * training.samples[0]]

        def make() -> dict[str, torch.Tensor]:
            batches = text_batches(texts, load_tokenizer(training.model), training.max_length, training.batch_size, 0)
            return distill(load_stack(training.model), config, batches, self._progress)

        fingerprint = distillation_fingerprint(training.model, "", config, texts)
        if self._folder is not None:
            return distilled(self._folder, fingerprint, make)
        state: dict[str, torch.Tensor] = self._once("distilled", fingerprint, make)
        return state


def adapter_config(stack: LayerStack, training: Training, data: TokenizedTask) -> ParallelAdapterConfig:
    """Return the shape of a training's parallel adapter."""
    return ParallelAdapterConfig(
        hidden_size=stack.hidden_size, num_layers=stack.num_layers, reduction=training.reduction, is_causal=stack.is_causal,
        kind=data.task.kind, num_outputs=data.task.num_outputs, dropout=training.dropout, seed=training.seed,
    )  # fmt: skip


def backbone(model: str, storage: str) -> LayerStack:
    """Return a frozen backbone with weights stored as `storage`, computing in float32 (16-bit weights compute in their own dtype)."""
    stack = load_stack(model)
    if storage != "float32":
        compute = storage if storage in ("float16", "bfloat16") else "float32"
        quantize(stack, QuantizationConfig(storage=storage, compute=compute))  # type: ignore[arg-type]
    return stack
