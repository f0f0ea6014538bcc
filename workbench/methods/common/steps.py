"""One optimizer step: its mini-batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.plan import proportional_ranges
from workbench.tasks.tokenize import padded_length

PAD_TO_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """sizes[m]: samples of micro-batch m.  lengths[m]: its padded sequence length in tokens."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Return the samples of the mini-batch."""
        return sum(self.sizes)


def cut_mini_batch(mini_batch: Sequence[int], micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Cut a mini-batch into `micro_batches` runs of samples of nearly equal size; empty ones are left out."""
    ranges = proportional_ranges(len(mini_batch), (1,) * micro_batches)
    return tuple(tuple(mini_batch[first:end]) for first, end in ranges if end > first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """samples[m]: the positions in the split that micro-batch m holds."""

    samples: tuple[tuple[int, ...], ...]
    shape: StepShape


def plan_steps(mini_batches: Sequence[Sequence[int]], lengths: Sequence[int], micro_batches: int) -> tuple[PlannedStep, ...]:
    """Cut every mini-batch into micro-batches and note their padded lengths."""
    steps = []
    for mini_batch in mini_batches:
        samples = cut_mini_batch(mini_batch, micro_batches)
        padded = tuple(padded_length([lengths[sample] for sample in micro], PAD_TO_MULTIPLE) for micro in samples)
        steps.append(PlannedStep(samples=samples, shape=StepShape(sizes=tuple(map(len, samples)), lengths=padded)))
    return tuple(steps)
