"""Weights as a stage of an asynchronous pipeline computes with them: those before its last updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor


class StaleWeights:
    """The stashed versions of some weights (PipeDream).  delay: updates between the version that computes a mini-batch
    and the one that its gradient updates.

    Call `use_old` before a forward pass, `use_newest` before the optimizer's step, and `keep` after it.
    """

    def __init__(self, weights: Iterable[Tensor], delay: int) -> None:
        self.weights = tuple(weights)
        self._versions = deque([self._copies()], maxlen=delay + 1)

    def use_old(self) -> None:
        """Compute the next mini-batch with the oldest stored version."""
        self._load(self._versions[0])

    def use_newest(self) -> None:
        """Update the newest version next."""
        self._load(self._versions[-1])

    def keep(self) -> None:
        """Keep the updated weights as the newest version."""
        self._versions.append(self._copies())

    def _copies(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def _load(self, version: list[Tensor]) -> None:
        for weight, stale in zip(self.weights, version, strict=True):
            weight.copy_(stale)
