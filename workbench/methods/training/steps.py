"""The optimizer steps of an epoch: mini-batches, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.plan import proportional_ranges
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import padded_length

PAD_TO_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """sizes[m]: samples of part m of a mini-batch.  lengths[m]: its padded sequence length in tokens.

    A part is a micro-batch; in an epoch from the activation cache it is a rank's share, of 0 samples if the rank has none.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Return the samples of the mini-batch."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """samples[m]: the positions in the split that part m of the mini-batch holds."""

    samples: tuple[tuple[int, ...], ...]
    shape: StepShape

    @classmethod
    def of(cls, samples: Sequence[Sequence[int]], lengths: Sequence[int]) -> PlannedStep:
        """Return the step of these parts.  lengths: tokens of every sample of the split."""
        padded = tuple(padded_length([lengths[sample] for sample in part], PAD_TO_MULTIPLE) if part else 0 for part in samples)
        return cls(samples=tuple(map(tuple, samples)), shape=StepShape(sizes=tuple(map(len, samples)), lengths=padded))


def cut_mini_batch(mini_batch: Sequence[int], micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Cut a mini-batch into `micro_batches` runs of samples of nearly equal size; empty ones are left out."""
    ranges = proportional_ranges(len(mini_batch), (1,) * micro_batches)
    return tuple(tuple(mini_batch[first:end]) for first, end in ranges if end > first)


def planned_epoch(lengths: Sequence[int], batch_size: int, micro_batches: int, *, seed: int, epoch: int) -> tuple[PlannedStep, ...]:
    """Return an epoch's mini-batches, cut into micro-batches."""
    return tuple(PlannedStep.of(cut_mini_batch(batch, micro_batches), lengths) for batch in epoch_batches(lengths, batch_size, seed, epoch))


def typical_steps(steps: Sequence[PlannedStep], batch_size: int, typical_length: int, num_steps: int) -> tuple[PlannedStep, ...]:
    """Return the `num_steps` whole mini-batches whose length is closest to a typical one, the same samples for every plan."""
    whole = [step for step in steps if step.shape.samples == batch_size] or list(steps)
    return tuple(sorted(whole, key=lambda step: abs(max(step.shape.lengths) - typical_length))[:num_steps])
