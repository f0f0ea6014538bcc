"""Per-channel statistics of the backbone's activations, measured once on a calibration set and constant afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.models.stack import LayerStack

STD_FLOOR_SHARE = 0.05
"""Deviations are clamped to this share of the tap's median one: constant channels exist, and must not blow up."""


class BatchLike(Protocol):
    """What a batch must have."""

    @property
    def input_ids(self) -> Tensor:
        """Token ids (n, t)."""
        ...

    @property
    def attention_mask(self) -> Tensor:
        """1 for real tokens (n, t)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStatistics:
    """mean, inverse_std: (L + 1, d) float32, for b_0 ... b_L."""

    mean: Tensor
    inverse_std: Tensor


def calibrate(stack: LayerStack, batches: Iterable[BatchLike]) -> TapStatistics:
    """Return mean and clamped 1 / deviation of each channel of each tap over the batches' real tokens.

    Some hundred samples are enough.  Sums are kept in float64.
    """
    count = 0
    total = squares = torch.zeros(stack.num_layers + 1, stack.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            _, taps = stack(batch.input_ids, batch.attention_mask)
            tokens = torch.stack([tap[batch.attention_mask.bool()] for tap in taps]).double()  # (L + 1, tokens, d)
            count += tokens.shape[1]
            total = total + tokens.sum(dim=1)
            squares = squares + tokens.square().sum(dim=1)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    floor = STD_FLOOR_SHARE * deviation.median(dim=1, keepdim=True).values
    deviation = torch.maximum(deviation, floor).clamp(min=1e-6)
    return TapStatistics(mean=mean.float(), inverse_std=deviation.reciprocal().float())


def set_statistics(adapter: nn.Module, statistics: TapStatistics) -> None:
    """Write the statistics into an adapter's (or a stage's) constant buffers."""
    projections = {int(index) + 1: layer.down for index, layer in adapter.layers.items()}
    if adapter.first is not None:
        projections[0] = adapter.first
    modules = [(tap, module) for tap, module in projections.items()]
    if adapter.last is not None:
        modules.append((len(statistics.mean) - 1, adapter.last))
    for tap, module in modules:
        module.mean.copy_(statistics.mean[tap])
        module.inverse_std.copy_(statistics.inverse_std[tap])
