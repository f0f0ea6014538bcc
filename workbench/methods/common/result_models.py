"""Load the trained model of a result's folder: what predicts with it, and what writes texts with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.methods.common.model_card import Result
from workbench.models import evaluation, saving, techniques
from workbench.models.configuration import model_facts
from workbench.models.loading import load_model, load_stack
from workbench.models.lora import PEFT_CONFIG
from workbench.models.matmul import head_of
from workbench.models.merging import merged_lora
from workbench.models.quantization import quantize
from workbench.models.saving import TrainedDescription
from workbench.models.sharding.whole import WholeModel
from workbench.models.stack import LayerStack
from workbench.models.text import CachedModel, RecomputedModel
from workbench.models.text_batch import BatchModel
from workbench.tasks.prompts.encoding import EncodedRow
from workbench.tasks.prompts.scoring import batch_of
from workbench.tasks.tokenize import Batch

WritingModel = BatchModel | None
"""None for a model that writes no text."""


def load_head_model(
    folder: Path,
) -> tuple[TrainedDescription[Any], Callable[[Iterable[Batch]], evaluation.Predictions], WritingModel]:
    """Return a saved adapter or fine-tuned model: its description, its predictor, and what a writer of texts needs."""
    if not (folder / saving.DESCRIPTION).is_file():
        loaded = list[Any]()

        def load(name: str, *, with_head: bool) -> LayerStack:
            if not with_head:
                return load_stack(name)
            loaded.append(load_model(name))
            return LayerStack(loaded[0].base_model, language_model_head=head_of(loaded[0]))

        model, described = saving.load_trained(folder, load)
        # The trained parts are inside the model's own layers.
        return described, partial(techniques.predict, model), CachedModel(loaded[0]) if loaded else None
    adapter, about = saving.load_adapter(folder)
    generates = about.config.kind == "text_generation"
    stack = load_stack(about.model, with_head=generates)
    if about.quantization is not None:
        quantize(stack, about.quantization)
    evaluation.attach_head(stack, adapter.eval())

    def logits_of(ids: list[int]) -> Tensor:
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        taps = stack(torch.tensor([ids]), mask)[1]
        return adapter.head(adapter(None, taps, mask)[:, -1:], taps[-1][:, -1:], mask, torch.zeros(1), 0)[:, -1]

    writing = RecomputedModel(logits_of) if generates else None
    return about, lambda batches: evaluation.predict(stack, [adapter], batches)[0], writing


def writing_model(folder: Path, about: Result, described: TrainedDescription[Any], model: Any) -> WritingModel:
    """Return what a writer of texts needs for weights that were trained by prompts."""
    if not model.predicts_words:
        return None
    if (folder / PEFT_CONFIG).is_file() and described.quantization is None:
        return WholeModel(merged_lora(about.job.model, folder))
    if model_facts(about.job.model).num_encoder_layers is not None:
        return None

    def logits_of(ids: list[int]) -> Tensor:
        row = EncodedRow(ids=tuple(ids), targets=(0,), first_position=len(ids) - 1)
        return model.logits_at(batch_of([row], [0], 0, [0]))[:, 0]

    return RecomputedModel(logits_of)
