"""What a round is: its shape, the unfreezing policy, the order of initiators, and what a device sees of the data (RingAda, Algorithm 1)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.policy import plateaus
from workbench.schedules.ringada import Iteration
from workbench.tasks.tokenize import TokenizedSplit

Unfreezing = Literal["steps", "rounds", "all", "plateau", "gradient_norm"]


@dataclass(frozen=True, kw_only=True)
class RoundShape(StepShape):
    """A round: parts are micro-batches, counted through its mini-batches.

    cached: those whose frozen layers are skipped.  since: the round from which layers have this placement (see Plan.later).
    """

    iterations: tuple[Iteration, ...]
    cached: tuple[int, ...] = ()
    since: int = 0

    @property
    def lowest_trained(self) -> int:
        """Return the lowest layer that is trained in the last mini-batch (see StepShape)."""
        return self.iterations[-1].first_unfrozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(PlannedStep):
    """number: of the run's rounds, from 0."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When adapters are unfrozen, from the top, like a learning rate scheduler.

    'steps', 'rounds': one more every so many of them.  'all': from the beginning.  'plateau', 'gradient_norm': one more when in `patience`
    rounds the mean loss, or the gradient norm of the trained adapters, has not fallen `threshold` below its lowest since the last
    unfreezing.  Their course is not known before the run: they are planned and simulated as if they were 'steps'.
    """

    num_layers: int
    unfreezing: Unfreezing = "steps"
    depth: int = 1
    every: int = 40
    patience: int = 2
    threshold: float = 0.01

    @property
    def is_adaptive(self) -> bool:
        """Return whether it depends on the results of earlier rounds."""
        return self.unfreezing in ("plateau", "gradient_norm")

    def first_unfrozen(self, round_number: int, step: int) -> int:
        """Return the lowest trained layer in a mini-batch, N_TM - Dep^r.  step: mini-batches before it in the whole run."""
        passed = (round_number if self.unfreezing == "rounds" else step) // self.every
        return self._above(self.num_layers if self.unfreezing == "all" else passed)

    def adapted(self, brought: Sequence[float]) -> tuple[int, ...]:
        """Return the lowest trained layer of each round of an adaptive policy, and of the next one.  brought: loss or norm by round."""
        ends = plateaus(brought, self.patience, self.threshold)
        return tuple(self._above(bisect_right(ends, count)) for count in range(len(brought) + 1))

    def _above(self, passed: int) -> int:
        return max(0, self.num_layers - self.depth - passed)


def rounds_per_epoch(num_samples: int, samples_per_round: int) -> int:
    """Return the number of rounds that train on about as many samples as there are."""
    return max(1, round(num_samples / samples_per_round))


def initiator_order(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    """Return the ranks in the order of a round's initiators (section IV-B, 3).

    It begins with the ring's first device.  Each next initiator is the remaining device with the best channel to the current one;
    among equal channels, the next on the ring.
    """
    ring = [rank for stage in plan.stages for rank in stage.ranks]
    order, left = [ring[0]], ring[1:]
    while left:
        best = max(left, key=lambda rank: (cluster.link(order[-1], rank).bytes_per_s, -left.index(rank)))
        order.append(best)
        left.remove(best)
    return tuple(order)


def seen_by(split: TokenizedSplit, own: Sequence[int]) -> TokenizedSplit:
    """Return a split as a device sees it: other devices' samples have only their lengths, no token and no label."""
    mine = set(own)

    def hidden(sample: int) -> tuple[int | bytes, ...]:
        return tuple(bytes(len(token)) if isinstance(token, bytes) else split.pad_id for token in split.ids[sample])

    ids = tuple(split.ids[sample] if sample in mine else hidden(sample) for sample in range(len(split)))
    labels = tuple(label if sample in mine else type(label)() for sample, label in enumerate(split.labels))
    windows = tuple(window if row in mine else window.hidden() for row, window in enumerate(split.windows))
    return replace(split, ids=ids, labels=labels, windows=windows)
