"""What the last stage is told of the samples that it scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The last stage's view of some samples.  labels: (n,).  sample_ids: (n,), for the dropout.  total: the mini-batch's samples."""

    labels: Tensor
    sample_ids: Tensor
    epoch: int
    total: int
