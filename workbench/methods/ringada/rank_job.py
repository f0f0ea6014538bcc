"""The job of a rank in a RingAda run: its rounds and their programs, the same in the driver's simulation and on every
device.

An epoch has enough rounds to process about as many mini-batches as the training split has.  Each device iterates over
its own samples repeatedly, in its own order; an absent device skips its turns, and so its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Self

from workbench.core.cluster import Cluster
from workbench.core.costs import TableCosts
from workbench.core.once import once
from workbench.core.plan import Plan, Stage
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.methods.common.scaling import TARGET_LENGTH
from workbench.methods.ringada.costs import RingLayout, ring_costs
from workbench.methods.ringada.moves import change_s, ring_homes
from workbench.methods.ringada.options import RingAdaOptions
from workbench.methods.ringada.prepare import Policy, PreparedJob, rounds_per_epoch
from workbench.methods.ringada.schedule import Iteration, federated_round, ring_round
from workbench.methods.training.handlers import PlannedStep, StepShape, cut_mini_batch
from workbench.methods.training.phases import Phase, RankJob, once_for_plan
from workbench.models.configuration import ModelFacts
from workbench.models.techniques import TechniqueConfig
from workbench.schedules.costs import Crossing
from workbench.tasks.batching import epoch_batches

USUALLY_IN_FLIGHT = 4
"""Default number of mini-batches in flight, for a plan without a value."""


@dataclass(frozen=True, kw_only=True)
class RoundShape(StepShape):
    """A round: parts are micro-batches, counted through its mini-batches.

    cached: those whose frozen layers are skipped.  since: the round from which layers have this placement (see
    Plan.later).
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
    """number: counts the run's rounds, from 0."""

    shape: RoundShape
    number: int


@dataclass(frozen=True, kw_only=True)
class RingRankJob(RankJob):
    """The description of a RingAda run for a rank.

    owned: the samples of each device of the whole cluster, by its name.  typical_length: padded tokens, for the order
    of operations.
    cache_homes[l]: the rank whose disk has layer l's cache when this job begins; none if the caches are empty.
    cache_since: the round from which they were filled.
    """

    config: TechniqueConfig
    facts: ModelFacts
    options: RingAdaOptions
    policy: Policy
    owned: Mapping[str, tuple[int, ...]]
    typical_length: int
    cache_homes: tuple[int, ...] = ()
    cache_since: int = 0

    def on_rank(self, rank: int) -> Self:
        """Return the job without other devices' tokens and labels (see RankJob)."""
        own = set(self.owned[self.cluster.devices[rank].name])
        return replace(self, split=self.split.seen(tokens=own, labels=own))

    @property
    def missing(self) -> str:
        """Describe the data of absent devices (see RankJob)."""
        names = {device.name for device in self.cluster.devices}
        away = [
            f"{len(samples)} training samples of {name}" for name, samples in self.owned.items() if name not in names
        ]
        return f"Gone while it is away: {', '.join(away)}" if away else ""

    def handed_on(self, prepared: PreparedJob) -> PreparedJob:
        """Return the job with each device's data, those of absent ones too (see RankJob)."""
        return replace(prepared, owned=self.owned)

    @property
    def start(self) -> int:
        """Return the number of the first round to do."""
        return self.start_epoch * self.rounds_per_epoch + self.start_step

    @property
    def present(self) -> Plan:
        """Return the plan of the rounds that this job does before `until` (see RankJob)."""
        return self.plan.at(self.start)

    @property
    def until(self) -> float:
        """Return the round before which all devices pause (see RankJob)."""
        return min((first for first, _ in self.plan.later if first > self.start), default=math.inf)

    @property
    def cached_from(self) -> int:
        """Return the round before which the devices' caches were empty."""
        return self.cache_since if self.cache_homes else self.start

    def going_on(self, former: Self) -> Self:
        """Return this job, starting with the caches that the devices of a former job have filled (see RankJob)."""
        is_empty = not former.cache_homes and self.start == former.start
        if (
            not self.options.cache or is_empty or self.policy.is_adaptive
        ):  # only the devices know which layers are frozen
            return self
        return replace(self, cache_since=former.cached_from, cache_homes=ring_homes(former.present.stages))

    def change_s(self, former: tuple[Stage, ...], stages: tuple[Stage, ...], first: int) -> float:
        """Return the seconds of moving layers from one assignment to another before a round (see
        methods.ringada.moves.change_s).
        """
        width, tokens = 4 * (self.crossing.hidden_size + self.crossing.side_width), self.crossing.tokens
        return change_s(
            self.profile,
            self.cluster,
            former,
            stages,
            rest_bytes=beside_bytes(self.facts, self.config),
            inputs={
                layer: width * sum(tokens(layer, length) for length in self.lengths)
                for layer in self.cached_layers(first)
            },
        )

    @property
    def changes_s(self) -> float:
        """Return the seconds of all these moves (see RankJob)."""
        pairs = pairwise(self.plan.assignments)
        return sum(self.change_s(former, stages, first) for (_, former), (first, stages) in pairs)

    def cached_layers(self, first: int) -> range:
        """Return the layers whose inputs a round, or a later one, reads from the caches."""
        if not self.options.cache:
            return range(0)
        if self.config.side_width:  # the trained layers next to the model read their taps
            return range(self.lowest, self.plan.num_layers)
        return range(self.lowest, self.policy.first_unfrozen(first, first * self.steps_per_round) + 1)

    @property
    def lowest(self) -> int:
        """Return the lowest layer that the run can train."""
        return 0 if self.policy.is_adaptive else self.policy.first_unfrozen(self.num_rounds - 1, self.num_steps - 1)

    @property
    def crossing(self) -> Crossing:
        """Return the shape of the states that cross between stages."""
        return Crossing(
            hidden_size=self.facts.hidden_size,
            side_width=self.config.side_width,
            num_encoder_layers=self.facts.num_encoder_layers,
            target_length=TARGET_LENGTH,
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of every training sample."""
        return self.split.lengths

    @cached_property
    def initiators(self) -> tuple[int, ...]:
        """Return the ranks of the initiators in the order of a round."""
        return initiator_order(self.cluster, self.plan)

    @property
    def in_flight(self) -> int:
        """Return how many mini-batches of a round may be computed at the same time."""
        return self.options.in_flight or self.plan.in_flight or USUALLY_IN_FLIGHT

    @property
    def steps_per_round(self) -> int:
        """Return the mini-batches of a round with all devices present, by which steps are numbered."""
        return len(self.owned) * self.options.local_iterations

    @property
    def rounds_per_epoch(self) -> int:
        """Return the rounds of an epoch, independent of absent devices."""
        return rounds_per_epoch(len(self.split), self.job.batch_size * self.steps_per_round)

    @property
    def num_rounds(self) -> int:
        """Return the rounds of the whole run."""
        return self.job.epochs * self.rounds_per_epoch

    @property
    def num_steps(self) -> int:
        """Return the mini-batches of the whole run."""
        return self.num_rounds * self.steps_per_round

    def planned_epoch(self, epoch: int) -> tuple[Round, ...]:
        """Return an epoch's rounds."""
        return tuple(self.round(epoch * self.rounds_per_epoch + number) for number in range(self.rounds_per_epoch))

    def round(self, number: int) -> Round:
        """Return a round of the run."""
        parts, iterations, count = list[Sequence[int]](), list[Iteration](), self.options.local_iterations
        for place, rank in enumerate(self.initiators):
            for local in range(count):
                step = number * self.steps_per_round + place * count + local
                parts_of_batch = cut_mini_batch(
                    self._mini_batch(rank, number * count + local), self.plan.num_micro_batches
                )
                parts += parts_of_batch
                iterations.append(Iteration(rank, self.policy.first_unfrozen(number, step), len(parts_of_batch)))
        planned, passed = PlannedStep.of(parts, self.lengths), self._passed
        cached = tuple(
            m for m, samples in enumerate(parts) if all(passed.get(sample, number) < number for sample in samples)
        )
        since = max((change for change, _ in self.plan.later if change <= number), default=0)
        sizes, lengths = planned.shape.sizes, planned.shape.lengths
        shape = RoundShape(sizes=sizes, lengths=lengths, iterations=tuple(iterations), cached=cached, since=since)
        return Round(samples=planned.samples, shape=shape, number=number)

    def updates(self, num_rounds: int, brought: Sequence[float] = ()) -> dict[int, int]:
        """Return how often each layer's adapter was updated after so many rounds of these devices.  brought: see
        Policy.adapted.
        """
        counts, policy = dict.fromkeys(range(self.policy.num_layers), 0), self.policy
        adapted = policy.adapted(brought[:num_rounds]) if policy.is_adaptive else None
        for number in range(num_rounds):
            for place in range((1 if self.options.federated else len(self.initiators)) * self.options.local_iterations):
                step = number * self.steps_per_round + place
                first = policy.first_unfrozen(number, step) if adapted is None else adapted[number]
                for layer in range(first, policy.num_layers):
                    counts[layer] += 1
        return counts

    def _mini_batch(self, rank: int, number: int) -> Sequence[int]:
        samples = self.owned[self.cluster.devices[rank].name]
        per_pass = len(self._pass(rank, 0))
        return [samples[index] for index in self._pass(rank, number // per_pass)[number % per_pass]]

    @cached_property
    def _passed(self) -> dict[int, int]:
        """Return the round in which each sample first passes the frozen layers and is cached."""
        first_rounds: dict[int, int] = {}
        for rank in self.initiators if self.options.cache else ():
            number = self.cached_from * self.options.local_iterations
            while not first_rounds.keys() >= set(self.owned[self.cluster.devices[rank].name]):
                for sample in self._mini_batch(rank, number):
                    first_rounds.setdefault(sample, number // self.options.local_iterations)
                number += 1
        return first_rounds

    @cached_property
    def _passes(self) -> dict[tuple[int, int], list[list[int]]]:
        return {}

    def _pass(self, rank: int, number: int) -> list[list[int]]:
        if (rank, number) not in self._passes:
            lengths = tuple(self.lengths[sample] for sample in self.owned[self.cluster.devices[rank].name])
            self._passes[rank, number] = _batches(lengths, self.job.batch_size, self.job.seed, number)
        return self._passes[rank, number]

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        return (Phase(epochs=range(self.job.epochs), steps=self.planned_epoch, program=self.program),)

    def program(self, shape: StepShape) -> Program:
        """Return a round."""
        assert isinstance(shape, RoundShape)
        key = (shape.sizes, shape.iterations, shape.cached, shape.since)
        if key not in self._schedules:
            # A round is the same, whatever the stages are in others.
            present = replace(self, plan=replace(self.plan.at(shape.since), in_flight=self.in_flight))
            self._schedules[key] = once_for_plan(present, ("round", *key[:-1]), partial(self._schedule, shape))
        return Program.on(self.cluster, self._schedules[key], self.costs(shape))

    def _schedule(self, shape: RoundShape) -> Schedule:
        """Return a round's operations, in the order that suits micro-batches of typical length."""
        plan = self.plan.at(shape.since)
        typical = self.costs(replace(shape, lengths=(self.typical_length,) * len(shape.sizes)))
        fixed: dict[str, int] = {"in_flight": self.in_flight, "world_size": self.cluster.world_size}
        if self.options.federated:
            return federated_round(plan, shape.iterations, typical.seconds, **fixed)
        of_ring = {
            "is_noted": self.policy.is_adaptive,
            "cached": shape.cached,
            "has_side": self.config.side_width > 0,
        }
        return ring_round(plan, shape.iterations, typical.seconds, **fixed, **of_ring)  # type: ignore[arg-type]

    def layout(self, shape: RoundShape) -> RingLayout:
        """Return a round under the plan that holds when it begins."""
        return RingLayout(self.plan.at(shape.since), shape.iterations, shape.sizes, shape.lengths)

    def costs(self, shape: RoundShape) -> TableCosts:
        """Return the costs of a round's operations."""
        return ring_costs(
            self.profile,
            self.cluster,
            self.layout(shape),
            crossing=self.crossing,
            head_values=3 * _head_parameters(self.config),
            beside_bytes=beside_bytes(self.facts, self.config),
        )

    @cached_property
    def _schedules(self) -> dict[object, Schedule]:
        return {}


def beside_bytes(facts: ModelFacts, config: TechniqueConfig) -> int:
    """Return the bytes that each device needs in addition to its layers: embedding, and head with gradient and
    moments.
    """
    return 4 * (facts.embedding_parameters + 4 * _head_parameters(config))


def _head_parameters(config: TechniqueConfig) -> int:
    width = config.side_width
    norm_and_up = 2 * width + (width + 1) * config.hidden_size if width else 0
    return norm_and_up + (config.hidden_size + 1) * config.num_outputs


def initiator_order(cluster: Cluster, plan: Plan) -> tuple[int, ...]:
    """Return the ranks in the order of a round's initiators (section IV-B, 3).

    It begins with the ring's first device.  Each next initiator is the remaining device with the best channel to the
    current one; among equal channels, the next on the ring.
    """
    ring = [rank for stage in plan.stages for rank in stage.ranks]
    order, left = [ring[0]], ring[1:]
    while left:
        best = max(left, key=lambda rank: (cluster.link(order[-1], rank).bytes_per_s, -left.index(rank)))
        order.append(best)
        left.remove(best)
    return tuple(order)


@once
def _batches(lengths: tuple[int, ...], batch_size: int, seed: int, number: int) -> list[list[int]]:
    """Return a device's mini-batches in one pass over its samples (see epoch_batches)."""
    return epoch_batches(lengths, batch_size, seed, number)
