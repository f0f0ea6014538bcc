"""Dropout without state: a mask is a function of seed, epoch, sample and feature, never of who computes it or when.

However a mini-batch is divided among devices, and whether an epoch is resumed or runs from the cache, the masks are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers: torch's int64 wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def keep_mask(sample_ids: Tensor, num_features: int, *, rate: float, seed: int, epoch: int) -> Tensor:
    """Return (n, num_features) bool, False with probability `rate`; sample_ids: (n,) int64."""
    stream = _mix(_mix(torch.tensor(seed) + _GOLDEN) + epoch)
    samples = _mix(stream + sample_ids.long() * _GOLDEN)
    features = torch.arange(1, num_features + 1, device=sample_ids.device) * _GOLDEN
    bits = _mix(samples[:, None] + features) >> 40 & 0xFFFFFF
    return bits >= round(rate * 0x1000000)


def stateless_dropout(inputs: Tensor, sample_ids: Tensor, *, rate: float, seed: int, epoch: int) -> Tensor:
    """Return inputs (n, ...) with features dropped at `rate` and the others scaled by 1 / (1 - rate)."""
    if rate == 0:
        return inputs
    keep = keep_mask(sample_ids, inputs[0].numel(), rate=rate, seed=seed, epoch=epoch).view(inputs.shape)
    return inputs * keep.to(inputs.dtype).mul_(1 / (1 - rate))


def ids_of_texts(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (n,) int64 sample numbers made of the tokens themselves, for data whose samples have no numbers.

    input_ids, attention_mask: (n, t).  Padding does not count, nor do a sample's neighbours: the same text has the same number.
    """
    positions = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device) * _GOLDEN
    return _mix((_mix(input_ids.long() + positions) * attention_mask.long()).sum(dim=1))


def _mix(value: Tensor) -> Tensor:
    # >> keeps the sign in torch, and a mixer needs zeros to come in from the left: mask them.
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * _FIRST
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * _SECOND
    return value ^ (value >> 31 & 0x1FFFFFFFF)
