"""A task: texts, labels, splits and what counts as good."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from workbench.core.errors import ConfigError

Kind = Literal["classification", "regression"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples of a task.  pairs: second texts, or None.  labels: int (class) or float (regression).  sample_ids: stable, unique."""

    texts: tuple[str, ...]
    labels: tuple[int, ...] | tuple[float, ...]
    sample_ids: tuple[int, ...]
    pairs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.texts), len(self.labels), len(self.sample_ids), len(self.texts if self.pairs is None else self.pairs)}
        assert len(sizes) == 1, f"a split of unequal columns: {sizes}"

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: range | list[int]) -> Split:
        """Return the samples at `indices`; each keeps its sample id."""
        return Split(
            texts=tuple(self.texts[index] for index in indices),
            labels=tuple(self.labels[index] for index in indices),
            sample_ids=tuple(self.sample_ids[index] for index in indices),
            pairs=None if self.pairs is None else tuple(self.pairs[index] for index in indices),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """metrics: names in workbench.tasks.metrics; the first one chooses the epoch, larger is better.

    source: where the data came from, for reports.
    """

    name: str
    kind: Kind
    num_outputs: int
    metrics: tuple[str, ...]
    train: Split
    validation: Split
    test: Split
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            if not len(getattr(self, name)):
                raise ConfigError(
                    f"The task '{self.name}' was asked for.", f"Its {name} split has 0 samples.", "Give data, or fewer conditions."
                )

    def limited(self, train: int | None, validation: int | None, test: int | None) -> Task:
        """Return the task with at most so many samples in each split, drawn by a fixed seed; None keeps all."""
        return replace(self, train=_limit(self.train, train), validation=_limit(self.validation, validation), test=_limit(self.test, test))


def _limit(split: Split, limit: int | None) -> Split:
    if limit is None or limit >= len(split):
        return split
    if limit < 1:
        raise ConfigError(f"A split of {limit} samples was asked for.", "An empty split trains and tests nothing.", "Raise the limit.")
    # One fixed permutation: a larger limit holds all samples of a smaller one.
    order = list(range(len(split)))
    random.Random("limit").shuffle(order)
    return split.take(sorted(order[:limit]))
