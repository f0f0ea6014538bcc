"""Predict in one process: one pass over the backbone serves any number of adapters.  Calibrate their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import require_numbers
from workbench.models.parallel_adapter import IGNORED, ParallelAdapter, ParallelAdapterStage, answered, task_loss
from workbench.models.side_layers import WORD_KINDS, SideHead
from workbench.models.stack import LayerStack

STD_FLOOR_SHARE = 0.05
"""Minimum standard deviation as a share of the tap's median one, so that constant channels do not blow up."""

STD_FLOOR_OF_MEAN = 0.01
"""Minimum as a share of the channel's own mean.  If a decoder reads only its start token, a whole tap is constant
except for rounding."""


BatchLike = Any
"""A batch like workbench.tasks.tokenize.Batch: input_ids (n, t), attention_mask (n, t) with 1 for real tokens,
sample_ids (n,).

labels: (n,), (n, s) for sequence-to-sequence, (n, t) for text generation.
decoder_ids: (n, s), None without a decoder or if it reads only its start token.
choices: labels (words, s) of each label word, padded with IGNORED; None unless the task is sequence-to-sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStatistics:
    """mean, inverse_std: (num_taps, d) float32, for b_0 ... b_L; a decoder's embedding comes before its first layer."""

    mean: Tensor
    inverse_std: Tensor

    def __getitem__(self, taps: range) -> TapStatistics:
        """Return the statistics of some taps."""
        return TapStatistics(mean=self.mean[list(taps)], inverse_std=self.inverse_std[list(taps)])


def calibrate(stack: LayerStack, batches: Iterable[BatchLike]) -> TapStatistics:
    """Return mean and clamped 1 / standard deviation of each channel of each tap over the batches' real tokens.

    A few hundred samples are enough.  Sums are in float64.
    """
    sums, squares = torch.zeros(2, stack.num_taps, stack.hidden_size, dtype=torch.float64)
    counts = [0] * stack.num_taps
    border = stack.num_taps if stack.num_encoder_layers is None else stack.num_encoder_layers + 1
    with torch.no_grad():
        for batch in batches:
            _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
            real = batch.attention_mask.bool()
            has_targets = batch.decoder_ids is not None and batch.labels.ndim == 2
            target = batch.labels.ne(IGNORED) if has_targets else torch.ones(taps[-1].shape[:2], dtype=torch.bool)
            for index, tap in enumerate(taps):
                tokens = tap[real if index < border else target].double()  # (tokens, d)
                counts[index] += len(tokens)
                sums[index] += tokens.sum(dim=0)
                squares[index] += tokens.square().sum(dim=0)
    count = torch.tensor(counts, dtype=torch.float64)[:, None]
    mean = sums / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    floor = STD_FLOOR_SHARE * deviation.median(dim=1, keepdim=True).values
    deviation = torch.maximum(torch.maximum(deviation, floor), STD_FLOOR_OF_MEAN * mean.abs()).clamp(min=1e-6)
    return TapStatistics(mean=mean.float(), inverse_std=deviation.reciprocal().float())


def set_statistics(adapter: nn.Module, statistics: TapStatistics) -> None:
    """Write the statistics into the constant buffers of an adapter or of one stage of it."""
    modules = [
        (int(index) + 1 + (int(index) >= adapter.config.border), layer.down) for index, layer in adapter.layers.items()
    ]
    if adapter.first is not None:
        modules.append((0, adapter.first))
    modules += [(int(index) + 1, projection) for index, projection in adapter.decoder_first.items()]
    if isinstance(adapter.last, SideHead):
        modules.append((len(statistics.mean) - 1, adapter.last))
    for tap, module in modules:
        module.mean.copy_(statistics.mean[tap])
        module.inverse_std.copy_(statistics.inverse_std[tap])


LOWEST = torch.finfo(torch.float32).min
"""The logit of padding, so that padding is never chosen."""


class Predictions:
    """Logits, labels and sample ids of a split, ordered by sample id.

    logits: (samples, outputs) float32; for sequence-to-sequence the log-likelihoods of the label words; for text
    generation those of answer_scores; for spans and tags (rows, tokens, outputs), where rows are windows.  labels:
    (samples,), for label words the classes, otherwise as in a batch.  sample_ids: (samples,) int64.
    """

    def __init__(self, logits: Sequence[Tensor], labels: Sequence[Tensor], sample_ids: Sequence[Tensor]) -> None:
        ids = torch.cat(list(sample_ids))
        order = ids.argsort()
        self.sample_ids, self.labels, self.logits = (
            ids[order],
            _joined(labels, IGNORED)[order],
            _joined(logits, LOWEST)[order],
        )

    def answers(self, kind: str) -> list[int] | list[float]:
        """Return the predicted classes, or the predicted numbers for regression.  Raises DivergedError if outputs are
        NaN or infinite.
        """
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
    return torch.cat(
        [F.pad(part, (0, 0) * (part.ndim - 2) + (0, widest - part.shape[1]), value=fill) for part in parts]
    )


def predict(stack: LayerStack, adapters: Sequence[ParallelAdapter], batches: Iterable[BatchLike]) -> list[Predictions]:
    """Return each adapter's predictions.  The backbone runs once for each batch (its decoder once for each label word).

    Adapters are put into evaluation mode.  The activations of a batch are discarded after it.
    """
    logits: list[list[Tensor]] = [[] for _ in adapters]
    labels, sample_ids = [], []
    for adapter in adapters:
        adapter.eval()
        attach_head(stack, adapter)
    with torch.inference_mode():
        for batch in batches:
            per_word = _taps(stack, batch)
            labels.append(_classes(batch))
            sample_ids.append(batch.sample_ids)
            for adapter, into in zip(adapters, logits, strict=True):
                rows = answered(batch.labels, adapter.config.kind)
                outputs = [
                    adapter.predict(taps, batch.attention_mask, batch.sample_ids, rows=rows) for taps in per_word
                ]
                if batch.choices is None:
                    into.append(outputs[0].float() if rows is None else answer_scores(outputs[0], batch.labels))
                else:
                    scores = [word_scores(output, word) for output, word in zip(outputs, batch.choices, strict=True)]
                    into.append(torch.stack(scores, dim=1))
    return [Predictions(adapter_logits, labels, sample_ids) for adapter_logits in logits]


def attach_head(stack: LayerStack, adapter: ParallelAdapterStage) -> None:
    """Attach the backbone's language model head to a complete adapter or its last stage, for a task that predicts
    words.  Does nothing if it already has one.
    """
    if adapter.config.kind in WORD_KINDS and not adapter.has_language_model_head:
        assert stack.language_model_head is not None, "a backbone without its head"
        adapter.attach(stack.language_model_head)


def word_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood (n,) of a word's labels (s,) under logits (n, s, V)."""
    real = labels.ne(IGNORED)
    likely = logits[:, real].float().log_softmax(dim=2)
    return likely.gather(2, labels[real].expand(len(logits), -1)[:, :, None]).sum(dim=(1, 2))


def answer_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (n, 2): each answer's loss (see task_loss), and the share of its tokens that are the most likely.

    logits: (N, V) of the N tokens that have a label.  labels: (n, t), IGNORED outside of the answers.
    """
    real = labels.ne(IGNORED)
    right = torch.zeros(labels.shape, device=labels.device).masked_scatter(
        real, logits.argmax(dim=1).eq(labels[real]).float()
    )
    share = right.sum(dim=1) / real.sum(dim=1).clamp(min=1)
    return torch.stack([task_loss(logits, labels, "text_generation", reduction="none"), share], dim=1)


def _taps(stack: LayerStack, batch: BatchLike) -> list[list[Tensor]]:
    """Return the taps, for sequence-to-sequence one set per label word, which share the encoder's tensors."""
    if batch.choices is None:
        return [stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)[1]]
    assert stack.num_encoder_layers is not None and batch.decoder_ids is not None, (
        "label words for a backbone without a decoder"
    )
    memory, encoder_taps = stack.stage(0, stack.num_encoder_layers)(batch.input_ids, batch.attention_mask)
    decoder = stack.stage(stack.num_encoder_layers, stack.num_layers)
    start = batch.decoder_ids[:, :1]
    per_word = []
    for labels in batch.choices:
        decoder_ids = torch.cat([start, labels[:-1].clamp(min=0).expand(len(start), -1)], dim=1)
        per_word.append(encoder_taps + decoder(memory, batch.attention_mask, decoder_ids)[1])
    return per_word


def _classes(batch: BatchLike) -> Tensor:
    """Return the labels (n,); for sequence-to-sequence the index of each sample's label word."""
    if batch.choices is None:
        return batch.labels
    return (batch.labels[:, None] == batch.choices).all(dim=2).int().argmax(dim=1)
