"""Build the inputs of the trainings and run those without an outcome; the backbone runs once for all trainings that
share its taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from workbench.core.errors import check_choice
from workbench.core.serial import load_or_compute
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.distillation import distill, distillation_fingerprint, distilled, load_distilled
from workbench.models.evaluation import TapStatistics, calibrate, set_statistics
from workbench.models.initialization import How, copy_torch_pruned, initialize
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache
from workbench.tasks.embedded import load_unlabelled
from workbench.tasks.task import Task
from workbench.tasks.tokenize import Batch, collate, text_batches
from workbench.trainings.common import SPLITS, TokenizedTask, limited_task, technique_stage
from workbench.trainings.techniques import TAPS, Outcome, Trainee, Training, taped, taps_of, train

CALIBRATION_SAMPLES, CALIBRATED_AT_ONCE = 1024, 64
DISTILLATION_SHARE = 4
"""If a comparison uses fewer training samples, this many times as many unlabelled texts are used for distillation."""


def run_all(
    trainings: Sequence[Training], folder: Path | None, data: Path | None, progress: Callable[[str], None]
) -> dict[Training, Outcome]:
    """Return the outcome of each training: from the folder if it exists, otherwise by running it now.

    folder: None stores none.  data: a folder with the GLUE tasks, for those that need one.
    """
    outcomes: dict[Training, Outcome] = {}

    def shared(training: Training) -> tuple[Any, ...]:
        return training.task, training.model, tuple(map(str, training.samples)), training.max_length, training.backbone

    for alike in [list(group) for _, group in groupby(sorted(dict.fromkeys(trainings), key=shared), shared)]:
        inputs = Inputs(alike[0], data)
        for training in alike:
            path = None if folder is None else folder / training.file_name
            outcomes[training] = load_or_compute(path, Outcome, partial(_outcome, training, inputs, folder, progress))
            progress(f"{training.name}: test {outcomes[training].test_score:.2f}")
    return {training: outcomes[training] for training in trainings}


def task_of(training: Training, data: Path | None) -> Task:
    """Return a training's task, with its test labels.  data: see run_all."""
    return limited_task(training.task, None if training.task.startswith("sentiment") else data, training.samples)


class Inputs:
    """The inputs of trainings on the same samples and backbone; each is created when it is needed."""

    def __init__(self, training: Training, data: Path | None) -> None:
        self._training, self._folder = training, data

    @cached_property
    def data(self) -> TokenizedTask:
        """Return the task, tokenized."""
        return TokenizedTask.of(task_of(self._training, self._folder), self._training.model, self._training.max_length)

    @cached_property
    def stack(self) -> LayerStack:
        """Return the frozen backbone."""
        return backbone(self._training.model, self._training.backbone)

    @cached_property
    def taps(self) -> dict[str, ActivationCache]:
        """Return the splits' taps."""
        return {name: taped(self.stack, getattr(self.data, name)) for name in SPLITS}

    def tap_numbers(self, training: Training) -> range:
        """Return the numbers of the taps that a training's side network reads."""
        check_choice("taps", training.taps, tuple(TAPS))
        return TAPS[training.taps](self.stack.num_layers)

    def adapter(self, training: Training) -> ParallelAdapter:
        """Return a parallel adapter of a training's shape, not initialized."""
        stack, task = self.stack, self.data.task
        num_layers = len(self.tap_numbers(training)) - 1
        sizes: Any = {"hidden_size": stack.hidden_size, "num_layers": num_layers, "is_causal": stack.is_causal}
        head: Any = {
            "kind": task.kind,
            "num_outputs": task.num_outputs,
            "dropout": training.dropout,
            "seed": training.seed,
        }
        return ParallelAdapter(ParallelAdapterConfig(reduction=training.reduction, **sizes, **head))

    @cached_property
    def statistics(self) -> TapStatistics:
        """Return the statistics with which adapters standardise their inputs, from the first training samples."""
        split = self.data.train
        starts = range(0, min(len(split), CALIBRATION_SAMPLES), CALIBRATED_AT_ONCE)
        return calibrate(
            self.stack, (collate(split, range(start, min(start + CALIBRATED_AT_ONCE, len(split)))) for start in starts)
        )


def _outcome(training: Training, inputs: Inputs, folder: Path | None, progress: Callable[[str], None]) -> Outcome:
    """Train, and return the outcome."""
    return train(training, inputs.data, _trainee(training, inputs, folder, progress), progress)


def _trainee(training: Training, inputs: Inputs, folder: Path | None, progress: Callable[[str], None]) -> Trainee:
    """Return an untrained technique."""
    check_choice("technique", training.technique, ("full", "lora", "adapters", "parallel_adapters"))
    if training.technique != "parallel_adapters":
        settings = {"technique": training.technique, "dropout": training.dropout, "seed": training.seed}
        stage = technique_stage(load_stack(training.model), inputs.data.task, **settings)
        return Trainee(stage, lambda split, batch, epoch: stage.batch_logits(batch, epoch))
    how: Any = training.initialization
    check_choice("initialization", how, (*get_args(How), "torch_pruned", "distilled"))
    adapter = inputs.adapter(training)
    if how in get_args(How):
        # Weights to copy are those of the backbone before quantization.
        initialize(adapter, how, stack=inputs.stack if training.backbone == "float32" else load_stack(training.model))
    else:
        initialize(adapter, "fan_in")
        if how == "torch_pruned":
            copy_torch_pruned(adapter, load_stack(training.model))
        else:
            load_distilled(adapter, _distilled(training, adapter.config, folder, progress))
    numbers = inputs.tap_numbers(training)
    set_statistics(adapter, inputs.statistics[numbers])

    def logits(split: str, batch: Batch, epoch: int) -> Tensor:
        """Return an adapter's logits with taps from the cache: the backbone does not run."""
        taps = taps_of(inputs.taps[split], batch)
        return adapter.predict([taps[number] for number in numbers], batch.attention_mask, batch.sample_ids, epoch)

    return Trainee(adapter, logits)


def _distilled(
    training: Training, config: ParallelAdapterConfig, folder: Path | None, progress: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """Return the distilled state of a shape: one for all tasks and seeds, as a server would produce it."""
    config = replace(config, seed=0, kind="classification", num_outputs=2)
    texts = load_unlabelled()
    if training.samples[0] is not None:
        texts = texts[: DISTILLATION_SHARE * training.samples[0]]

    def make() -> dict[str, torch.Tensor]:
        batches = text_batches(texts, load_tokenizer(training.model), training.max_length, training.batch_size, 0)
        return distill(load_stack(training.model), config, batches, progress)

    return (
        make()
        if folder is None
        else distilled(folder, distillation_fingerprint(training.model, "", config, texts), make)
    )


def backbone(model: str, storage: str) -> LayerStack:
    """Return a frozen backbone with weights stored as `storage`, computing in float32 (16-bit weights compute in their
    own dtype).
    """
    stack = load_stack(model)
    if storage != "float32":
        compute = storage if storage in ("float16", "bfloat16") else "float32"
        quantize(stack, QuantizationConfig(storage=storage, compute=compute))  # type: ignore[arg-type]
    return stack
