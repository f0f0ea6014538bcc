"""Predict in one process: backbone and any number of adapters, one pass over the backbone for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.models.calibration import BatchLike
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.stack import LayerStack


class LabelledBatch(BatchLike, Protocol):
    """What a batch to predict on must have besides tokens."""

    @property
    def labels(self) -> Tensor:
        """Labels (n,)."""
        ...

    @property
    def sample_ids(self) -> Tensor:
        """Stable sample numbers (n,)."""
        ...


class Predictions:
    """Logits, labels and sample ids of a split, in the order of the sample ids.

    logits: (samples, outputs) float32.  labels: (samples,).  sample_ids: (samples,) int64.
    """

    def __init__(self, logits: Sequence[Tensor], labels: Sequence[Tensor], sample_ids: Sequence[Tensor]) -> None:
        ids = torch.cat(list(sample_ids))
        order = ids.argsort()
        self.sample_ids, self.labels, self.logits = ids[order], torch.cat(list(labels))[order], torch.cat(list(logits))[order]

    def answers(self, kind: str) -> list[int] | list[float]:
        """Return the predicted classes, or the predicted numbers in regression."""
        return self.logits.squeeze(1).tolist() if kind == "regression" else self.logits.argmax(dim=1).tolist()

    def references(self) -> list[int] | list[float]:
        """Return the labels."""
        return self.labels.tolist()


def predict(stack: LayerStack, adapters: Sequence[ParallelAdapter], batches: Iterable[LabelledBatch]) -> list[Predictions]:
    """Return each adapter's predictions; the backbone runs once for each batch.

    Adapters are put into evaluation mode.  Nothing is kept of a batch's activations after it.
    """
    return _score(adapters, ((batch, _taps(stack, batch)) for batch in batches))


class ActivationMemory:
    """A split's activations kept in memory, so that later checkpoints can be scored without the backbone.

    Kept in `dtype` (bfloat16 halves the memory): (L + 1) x d values for each token, padding included.
    """

    def __init__(self, stack: LayerStack, batches: Iterable[LabelledBatch], dtype: torch.dtype = torch.float32) -> None:
        self._batches = [(batch, [tap.to(dtype) for tap in _taps(stack, batch)]) for batch in batches]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the activations take."""
        return sum(tap.nbytes for _, taps in self._batches for tap in taps)

    def predict(self, adapters: Sequence[ParallelAdapter]) -> list[Predictions]:
        """Return each adapter's predictions on the split."""
        return _score(adapters, self._batches)


def _taps(stack: LayerStack, batch: LabelledBatch) -> list[Tensor]:
    with torch.inference_mode():
        return stack(batch.input_ids, batch.attention_mask)[1]


def _score(adapters: Sequence[ParallelAdapter], batches: Iterable[tuple[LabelledBatch, list[Tensor]]]) -> list[Predictions]:
    logits: list[list[Tensor]] = [[] for _ in adapters]
    labels, sample_ids = [], []
    for adapter in adapters:
        adapter.eval()
    with torch.inference_mode():
        for batch, taps in batches:
            labels.append(batch.labels)
            sample_ids.append(batch.sample_ids)
            for adapter, into in zip(adapters, logits, strict=True):
                into.append(adapter.predict(taps, batch.attention_mask, batch.sample_ids).float())
    return [Predictions(one, labels, sample_ids) for one in logits]
