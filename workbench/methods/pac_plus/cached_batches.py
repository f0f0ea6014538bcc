"""The taps of an epoch's steps, in order, read from the activation cache ahead of the step that needs them (section V-B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.runtime.read_ahead import ReadAhead

READ_AHEAD = 2
"""Batches that wait at most: one would do if all loads took the same time."""


class TapSource(Protocol):
    """Whatever has records of activations: an ActivationCache, a KeptCache."""

    def batch(self, samples: Sequence[int], padded_length: int | None, buffer: Tensor | None = None) -> list[Tensor]:
        """Return the taps of some samples (see ActivationCache.batch)."""
        ...

    def batch_bytes(self, num_samples: int, padded_length: int) -> int:
        """Return how large a buffer `batch` needs."""
        ...


class CachedBatches:
    """Gives each step's taps when the step asks; use it as a context manager.

    steps: (samples, padded length) of every step that loads, in order.  The taps of a step stay valid until the next one asks.
    depth: how many steps to read ahead, 0 to read when asked.  packs: without padding, (tokens, width) each, as FastSide reads them.
    """

    def __init__(
        self, cache: TapSource, steps: Sequence[tuple[Sequence[int], int]], *, depth: int = READ_AHEAD, packs: bool = False
    ) -> None:
        self._cache, self._steps, self._taken, self._packs = cache, steps, 0, packs
        self._ahead = ReadAhead(self._load, len(steps), depth=depth)
        size = max((cache.batch_bytes(len(samples), length) for samples, length in steps), default=0)
        # Allocated once: fresh pages for megabytes in every step cost as much as filling them.
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(self._ahead.num_buffers)]

    def __enter__(self) -> CachedBatches:
        self._ahead.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ahead.__exit__(*exc)
        self._buffers.clear()  # now, not when a collection finds the circle through self._load

    def batch(self, samples: Sequence[int], padded_length: int) -> list[Tensor]:
        """Return the taps of the next step, which must be this one."""
        expected, length = self._steps[self._taken]
        assert list(samples) == list(expected) and padded_length == length, "steps must ask in the order that was announced"
        self._taken += 1
        return self._ahead.take()

    def _load(self, step: int) -> list[Tensor]:
        samples, padded_length = self._steps[step]
        return self._cache.batch(samples, None if self._packs else padded_length, self._buffers[step % len(self._buffers)])
