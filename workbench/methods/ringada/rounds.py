"""The data and the trained layers of each round: initiators, mini-batches, the unfreezing policy (RingAda, Algorithm 1).

An epoch has enough rounds to process about as many mini-batches as the training split has.  Each device iterates over its own samples
repeatedly, in its own order; an absent device skips its turns, and so its samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.methods.training.handlers import PlannedStep, StepShape, cut_mini_batch
from workbench.methods.training.policy import plateaus
from workbench.schedules.ringada import Iteration
from workbench.tasks.batching import epoch_batches
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

    def from_layer(self, first_unfrozen: int) -> Self:
        """Return the round with the layers from this one on trained."""
        return replace(self, iterations=tuple(one._replace(first_unfrozen=first_unfrozen) for one in self.iterations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(PlannedStep):
    """number: of the run's rounds, from 0.  starts[i]: the first micro-batch of iteration i."""

    number: int
    starts: tuple[int, ...]


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

    def lowest(self, num_rounds: int, num_steps: int) -> int:
        """Return the lowest layer that a run of so many rounds and mini-batches can train."""
        return 0 if self.is_adaptive else self.first_unfrozen(num_rounds - 1, num_steps - 1)

    def _above(self, passed: int) -> int:
        return max(0, self.num_layers - self.depth - passed)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of a run.

    lengths: tokens of every training sample.  owned: the samples of each device of the whole cluster, by its name.
    names: the devices that take part, in ring order of ranks (ranks by place).  initiators: their ranks in the order of a round.
    cached_from: the epoch and its round before which the devices' caches were empty; None without a cache.
    changes: the rounds at which the placement of layers changes.
    """

    lengths: tuple[int, ...]
    owned: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    initiators: tuple[int, ...]
    batch_size: int
    micro_batches: int
    local_iterations: int
    policy: Policy
    epochs: int
    seed: int
    cached_from: tuple[int, int] | None = None
    federated: bool = False
    changes: tuple[int, ...] = ()

    @property
    def rounds_per_epoch(self) -> int:
        """Return the rounds of an epoch, independent of absent devices."""
        return rounds_per_epoch(len(self.lengths), self.batch_size * self.steps_per_round)

    @property
    def steps_per_round(self) -> int:
        """Return the mini-batches of a round with all devices present, by which steps are numbered."""
        return len(self.owned) * self.local_iterations

    @property
    def num_rounds(self) -> int:
        """Return the rounds of the whole run."""
        return self.epochs * self.rounds_per_epoch

    @property
    def num_steps(self) -> int:
        """Return the mini-batches of the whole run."""
        return self.num_rounds * self.steps_per_round

    def epoch(self, epoch: int) -> tuple[Round, ...]:
        """Return an epoch's rounds."""
        return tuple(self.round(epoch * self.rounds_per_epoch + number) for number in range(self.rounds_per_epoch))

    def round(self, number: int) -> Round:
        """Return a round of the run."""
        parts: list[Sequence[int]] = []
        iterations, starts = [], []
        for place, rank in enumerate(self.initiators):
            for local in range(self.local_iterations):
                step = number * self.steps_per_round + place * self.local_iterations + local
                own = cut_mini_batch(self._mini_batch(rank, number * self.local_iterations + local), self.micro_batches)
                starts.append(len(parts))
                parts += own
                iterations.append(Iteration(rank, self.policy.first_unfrozen(number, step), len(own)))
        planned, passed = PlannedStep.of(parts, self.lengths), self._passed
        cached = tuple(m for m, samples in enumerate(parts) if all(passed.get(sample, number) < number for sample in samples))
        since = max((change for change in self.changes if change <= number), default=0)
        sizes, lengths = planned.shape.sizes, planned.shape.lengths
        shape = RoundShape(sizes=sizes, lengths=lengths, iterations=tuple(iterations), cached=cached, since=since)
        return Round(samples=planned.samples, shape=shape, number=number, starts=tuple(starts))

    def updates(self, num_rounds: int, brought: Sequence[float] = ()) -> dict[int, int]:
        """Return how often each layer's adapter was updated after so many rounds of these devices.  brought: see Policy.adapted."""
        counts, policy = dict.fromkeys(range(self.policy.num_layers), 0), self.policy
        adapted = policy.adapted(brought[:num_rounds]) if policy.is_adaptive else None
        for number in range(num_rounds):
            for at in range((1 if self.federated else len(self.initiators)) * self.local_iterations):
                step = number * self.steps_per_round + at
                first = policy.first_unfrozen(number, step) if adapted is None else adapted[number]
                for layer in range(first, policy.num_layers):
                    counts[layer] += 1
        return counts

    def _mini_batch(self, rank: int, number: int) -> Sequence[int]:
        own = self.owned[self.names[rank]]
        per_pass = len(self._pass(rank, 0))
        return [own[index] for index in self._pass(rank, number // per_pass)[number % per_pass]]

    @cached_property
    def _passed(self) -> dict[int, int]:
        """Return the round in which each sample first passes the frozen layers and is cached."""
        found: dict[int, int] = {}
        if self.cached_from is None:
            return found
        epoch, step = self.cached_from
        for rank in self.initiators:
            number = (epoch * self.rounds_per_epoch + step) * self.local_iterations
            while not found.keys() >= set(self.owned[self.names[rank]]):
                for sample in self._mini_batch(rank, number):
                    found.setdefault(sample, number // self.local_iterations)
                number += 1
        return found

    @cached_property
    def _passes(self) -> dict[tuple[int, int], list[list[int]]]:
        return {}

    def _pass(self, rank: int, number: int) -> list[list[int]]:
        if (rank, number) not in self._passes:
            lengths = [self.lengths[sample] for sample in self.owned[self.names[rank]]]
            self._passes[rank, number] = epoch_batches(lengths, self.batch_size, self.seed, number)
        return self._passes[rank, number]


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
