"""Splits with the backbone's activations in memory: one pass of the backbone, then any number of trainings (PAC+, section IV-B)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.models.calibration import TapStatistics, calibrate
from workbench.models.stack import LayerStack
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate, evaluation_batches

_CALIBRATION_BATCHES = 16


class TappedSplit:
    """A tokenized split and its taps, (L + 1) x d values for each real token, without padding.

    dtype: of the values that are kept; bfloat16 halves the memory (all-MiniLM-L6-v2: 5.4 kB a token).
    """

    def __init__(self, stack: LayerStack, split: TokenizedSplit, dtype: torch.dtype = torch.bfloat16) -> None:
        self.split = split
        lengths = torch.tensor(split.lengths)
        self._starts = lengths.cumsum(0) - lengths
        # One row of zeros at the end is what padding points to.
        self._taps: list[Tensor] = []
        with torch.no_grad():
            for batch in evaluation_batches(split):
                taps = stack(batch.input_ids, batch.attention_mask)[1]
                if not self._taps:
                    self._taps = [torch.zeros(int(lengths.sum()) + 1, stack.hidden_size, dtype=dtype) for _ in taps]
                rows, real = self._rows(batch.indices, batch.input_ids.shape[1]), batch.attention_mask.bool()
                for kept, tap in zip(self._taps, taps, strict=True):
                    kept[rows[real]] = tap[real].to(dtype)

    def batch(self, indices: Sequence[int]) -> tuple[Batch, list[Tensor]]:
        """Return samples as a padded batch and their taps, (n, t, d) each; zeros where there is padding."""
        batch = collate(self.split, indices)
        rows = self._rows(batch.indices, batch.input_ids.shape[1])
        return batch, [kept[rows] for kept in self._taps]

    def _rows(self, indices: Sequence[int], width: int) -> Tensor:
        at = torch.arange(width)[None]
        starts = self._starts[list(indices)][:, None]
        ends = torch.tensor([len(self.split.ids[index]) for index in indices])[:, None]
        return torch.where(at < ends, starts + at, len(self._taps[0]) - 1)


def statistics_of(stack: LayerStack, split: TokenizedSplit) -> TapStatistics:
    """Return the statistics that adapters standardise their inputs by, from the first samples of a split."""
    size = 64
    starts = range(0, min(len(split), size * _CALIBRATION_BATCHES), size)
    return calibrate(stack, (collate(split, range(at, min(at + size, len(split)))) for at in starts))
