"""Predict in one process: one pass over the backbone serves any number of adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.errors import require_numbers
from workbench.models.calibration import BatchLike
from workbench.models.parallel_adapter import IGNORED, ParallelAdapter
from workbench.models.stack import LayerStack

LOWEST = torch.finfo(torch.float32).min
"""The logit of padding, so that padding is never chosen."""


class Predictions:
    """Logits, labels and sample ids of a split, ordered by sample id.

    logits: (samples, outputs) float32; for sequence-to-sequence the log-likelihoods of the label words; for spans and tags (rows, tokens,
    outputs), where rows are windows.  labels: (samples,), classes also for label words, or as in a batch.  sample_ids: (samples,) int64.
    """

    def __init__(self, logits: Sequence[Tensor], labels: Sequence[Tensor], sample_ids: Sequence[Tensor]) -> None:
        ids = torch.cat(list(sample_ids))
        order = ids.argsort()
        self.sample_ids, self.labels, self.logits = ids[order], _joined(labels, IGNORED)[order], _joined(logits, LOWEST)[order]

    def answers(self, kind: str) -> list[int] | list[float]:
        """Return the predicted classes, or the predicted numbers for regression.  Raises DivergedError if outputs are NaN or infinite."""
        logits = require_numbers(self.logits, "Predictions")
        return logits.squeeze(1).tolist() if kind == "regression" else logits.argmax(dim=1).tolist()

    def references(self) -> list[int] | list[float]:
        """Return the labels."""
        return self.labels.tolist()


def _joined(parts: Sequence[Tensor], fill: float) -> Tensor:
    """Concatenate the parts' rows, padding dimension 1 to the widest part."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    widest = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, 0) * (part.ndim - 2) + (0, widest - part.shape[1]), value=fill) for part in parts])


def predict(stack: LayerStack, adapters: Sequence[ParallelAdapter], batches: Iterable[BatchLike]) -> list[Predictions]:
    """Return each adapter's predictions.  The backbone runs once for each batch (its decoder once for each label word).

    Adapters are put into evaluation mode.  The activations of a batch are discarded after it.
    """
    return _score(stack, adapters, ((batch, _taps(stack, batch)) for batch in batches))


class ActivationMemory:
    """Keeps a split's activations in memory, so that later checkpoints can be scored without the backbone.

    Size: d values per tap for each token, including padding, and per label word for a decoder's taps.
    """

    def __init__(self, stack: LayerStack, batches: Iterable[BatchLike]) -> None:
        self._stack = stack
        self._batches = [(batch, _taps(stack, batch)) for batch in batches]

    def predict(self, adapters: Sequence[ParallelAdapter]) -> list[Predictions]:
        """Return each adapter's predictions on the split."""
        return _score(self._stack, adapters, self._batches)


def attach_head(stack: LayerStack, adapter: ParallelAdapter) -> None:
    """Attach the backbone's language model head to a sequence-to-sequence adapter, unless it already has one."""
    if adapter.config.kind == "sequence_to_sequence" and not adapter.has_language_model_head:
        assert stack.language_model_head is not None, "a backbone of one stack"
        adapter.attach(stack.language_model_head)


def word_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood (n,) of a word's labels (s,) under logits (n, s, V)."""
    real = labels.ne(IGNORED)
    likely = logits[:, real].float().log_softmax(dim=2)
    return likely.gather(2, labels[real].expand(len(logits), -1)[:, :, None]).sum(dim=(1, 2))


def _taps(stack: LayerStack, batch: BatchLike) -> list[list[Tensor]]:
    """Return the taps, for sequence-to-sequence one set per label word, which share the encoder's tensors."""
    with torch.inference_mode():
        if batch.choices is None:
            return [stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)[1]]
        assert stack.num_encoder_layers is not None and batch.decoder_ids is not None, "label words for a backbone without a decoder"
        memory, encoder_taps = stack.stage(0, stack.num_encoder_layers)(batch.input_ids, batch.attention_mask)
        decoder = stack.stage(stack.num_encoder_layers, stack.num_layers)
        start = batch.decoder_ids[:, :1]
        per_word = []
        for labels in batch.choices:
            read = torch.cat([start, labels[:-1].clamp(min=0).expand(len(start), -1)], dim=1)
            per_word.append(encoder_taps + decoder(memory, batch.attention_mask, read)[1])
        return per_word


def _score(
    stack: LayerStack, adapters: Sequence[ParallelAdapter], batches: Iterable[tuple[BatchLike, list[list[Tensor]]]]
) -> list[Predictions]:
    logits: list[list[Tensor]] = [[] for _ in adapters]
    labels, sample_ids = [], []
    for adapter in adapters:
        adapter.eval()
        attach_head(stack, adapter)
    with torch.inference_mode():
        for batch, per_word in batches:
            labels.append(_classes(batch))
            sample_ids.append(batch.sample_ids)
            for adapter, into in zip(adapters, logits, strict=True):
                found = [adapter.predict(taps, batch.attention_mask, batch.sample_ids) for taps in per_word]
                if batch.choices is None:
                    into.append(found[0].float())
                else:
                    scores = [word_scores(one, word) for one, word in zip(found, batch.choices, strict=True)]
                    into.append(torch.stack(scores, dim=1))
    return [Predictions(one, labels, sample_ids) for one in logits]


def _classes(batch: BatchLike) -> Tensor:
    """Return the labels (n,); for sequence-to-sequence the index of each sample's label word."""
    if batch.choices is None:
        return batch.labels
    return (batch.labels[:, None] == batch.choices).all(dim=2).int().argmax(dim=1)
