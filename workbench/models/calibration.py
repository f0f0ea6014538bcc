"""Per-channel statistics of the backbone's activations, measured once on a calibration set and constant afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.parallel_adapter import IGNORED
from workbench.models.side_layers import SideHead
from workbench.models.stack import LayerStack

STD_FLOOR_SHARE = 0.05
"""Minimum standard deviation as a share of the tap's median one, so that constant channels do not blow up."""

STD_FLOOR_OF_MEAN = 0.01
"""Minimum as a share of the channel's own mean.  If a decoder reads only its start token, a whole tap is constant except for rounding."""


BatchLike = Any
"""A batch like workbench.tasks.tokenize.Batch: input_ids (n, t), attention_mask (n, t) with 1 for real tokens, sample_ids (n,).

labels: (n,), or (n, s) for sequence-to-sequence.  decoder_ids: (n, s), None without a decoder or if it reads only its start token.
choices: labels (words, s) of each label word, padded with IGNORED; None unless the task is sequence-to-sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStatistics:
    """mean, inverse_std: (num_taps, d) float32, for b_0 ... b_L; a decoder's embedding comes before its first layer."""

    mean: Tensor
    inverse_std: Tensor


def calibrate(stack: LayerStack, batches: Iterable[BatchLike]) -> TapStatistics:
    """Return mean and clamped 1 / standard deviation of each channel of each tap over the batches' real tokens.

    A few hundred samples are enough.  Sums are kept in float64.
    """
    sums: list[Tensor | int] = [0] * stack.num_taps
    squares: list[Tensor | int] = [0] * stack.num_taps
    counts = [0] * stack.num_taps
    border = stack.num_taps if stack.num_encoder_layers is None else stack.num_encoder_layers + 1
    with torch.no_grad():
        for batch in batches:
            _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
            real = batch.attention_mask.bool()
            target = _real_targets(batch, taps[-1])
            for index, tap in enumerate(taps):
                tokens = tap[real if index < border else target].double()  # (tokens, d)
                counts[index] += len(tokens)
                sums[index] = sums[index] + tokens.sum(dim=0)
                squares[index] = squares[index] + tokens.square().sum(dim=0)
    count = torch.tensor(counts, dtype=torch.float64)[:, None]
    mean = _stacked(sums) / count
    deviation = (_stacked(squares) / count - mean.square()).clamp(min=0).sqrt()
    floor = STD_FLOOR_SHARE * deviation.median(dim=1, keepdim=True).values
    deviation = torch.maximum(torch.maximum(deviation, floor), STD_FLOOR_OF_MEAN * mean.abs()).clamp(min=1e-6)
    return TapStatistics(mean=mean.float(), inverse_std=deviation.reciprocal().float())


def set_statistics(adapter: nn.Module, statistics: TapStatistics) -> None:
    """Write the statistics into the constant buffers of an adapter or of one stage of it."""
    modules = [(adapter.config.tap_of(int(index)), layer.down) for index, layer in adapter.layers.items()]
    if adapter.first is not None:
        modules.append((0, adapter.first))
    modules += [(int(index) + 1, projection) for index, projection in adapter.decoder_first.items()]
    if isinstance(adapter.last, SideHead):
        modules.append((len(statistics.mean) - 1, adapter.last))
    for tap, module in modules:
        module.mean.copy_(statistics.mean[tap])
        module.inverse_std.copy_(statistics.inverse_std[tap])


def _real_targets(batch: BatchLike, states: Tensor) -> Tensor:
    """Return (n, s) bool: True for the decoder states that are not padding."""
    if batch.decoder_ids is not None and batch.labels.ndim == 2:
        return batch.labels.ne(IGNORED)
    return torch.ones(states.shape[:2], dtype=torch.bool)


def _stacked(sums: list[Tensor | int]) -> Tensor:
    return torch.stack([torch.as_tensor(total) for total in sums])
