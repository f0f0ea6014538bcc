"""The single phase of a RingAda run: every epoch's rounds, the same in the driver's simulation and on every device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

from workbench.core.plan import Plan, Stage
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.methods.common.session import LOADING, RankResult, RankSession
from workbench.methods.fine_tuning.handlers import TARGET_LENGTH
from workbench.methods.ringada.compute import Config, RingCompute, RingOptimizer
from workbench.methods.ringada.handlers import RingHandlers
from workbench.methods.ringada.prefix import PrefixCache
from workbench.methods.ringada.prepare import PreparedJob, RingAdaOptions
from workbench.methods.ringada.rounds import Policy, Round, Rounds, RoundShape, initiator_order, seen_by
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.phases import Phase, RankJob, StagePhase
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import ModelFacts
from workbench.models.techniques import TechniqueConfig
from workbench.planners.ringada import change_s, ring_homes
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import LinearSchedule
from workbench.runtime.memory import read_memory
from workbench.schedules.plan_costs import Crossing
from workbench.schedules.ringada import RingCosts, federated_round, ring_round
from workbench.tasks.tokenize import collate

USUALLY_IN_FLIGHT = 4
"""Default number of mini-batches in flight, for a plan without a value."""


class Kept(NamedTuple):
    """The caches on the devices' disks.  since: epoch and round from which they were filled.  homes[l]: the rank with layer l's cache."""

    since: tuple[int, int]
    homes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RingRankJob(RankJob):
    """The description of a RingAda run for a rank.

    owned: the samples of each device of the whole cluster, by its name.  typical_length: padded tokens, for the order of operations.
    kept: the caches on the devices' disks when this job begins.  adapter: of Parallel Adapters, None for serial ones.
    """

    config: TechniqueConfig
    facts: ModelFacts
    options: RingAdaOptions
    policy: Policy
    owned: Mapping[str, tuple[int, ...]]
    typical_length: int
    kept: Kept | None = None
    adapter: ParallelAdapterConfig | None = None

    def on_rank(self, rank: int) -> Self:
        """Return the job without other devices' tokens and labels (see RankJob)."""
        return replace(self, split=seen_by(self.split, self.owned[self.cluster.devices[rank].name]))

    @property
    def missing(self) -> str:
        """Describe whose data no device has now (see RankJob)."""
        names = {device.name for device in self.cluster.devices}
        away = [f"{len(own)} training samples of {name}" for name, own in self.owned.items() if name not in names]
        return f"Gone while it is away: {', '.join(away)}" if away else ""

    def handed_on(self, prepared: PreparedJob) -> PreparedJob:
        """Return the job with each device's data, those of absent ones too (see RankJob)."""
        return replace(prepared, owned=self.owned)

    @property
    def start(self) -> int:
        """Return the number of the first round to do."""
        return self.start_epoch * self.rounds.rounds_per_epoch + self.start_step

    @property
    def present(self) -> Plan:
        """Return the plan of the rounds that this job does before `until` (see RankJob)."""
        return self.plan.at(self.start)

    @property
    def until(self) -> float:
        """Return the round before which all devices pause (see RankJob)."""
        return min((first for first, _ in self.plan.later if first > self.start), default=math.inf)

    def going_on(self, former: Self) -> Self:
        """Return this job, starting with the caches that the devices of a former job have filled (see RankJob)."""
        is_empty = former.kept is None and self.start == former.start
        if not self.options.cache or is_empty or self.policy.is_adaptive:  # only the devices know which layers are frozen
            return self
        since = former.kept.since if former.kept else (former.start_epoch, former.start_step)
        return replace(self, kept=Kept(since, ring_homes(former.present.stages)))

    def change_s(self, former: tuple[Stage, ...], stages: tuple[Stage, ...], first: int) -> float:
        """Return the seconds of moving layers from one assignment to another before a round (see planners.ringada.change_s)."""
        of_state = crossing(self.facts, self.side_width)
        width, tokens = 4 * (of_state.hidden_size + of_state.side_width), of_state.tokens
        return change_s(
            self.profile,
            self.cluster,
            former,
            stages,
            rest_bytes=beside_bytes(self.facts, self.adapter or self.config),
            inputs={layer: width * sum(tokens(layer, length) for length in self.split.lengths) for layer in self.cached_layers(first)},
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
        rounds = self.rounds
        lowest = self.policy.lowest(rounds.num_rounds, rounds.num_steps)
        if self.adapter is not None:  # the trained layers next to the model read their taps
            return range(lowest, self.plan.num_layers)
        return range(lowest, self.policy.first_unfrozen(first, first * rounds.steps_per_round) + 1)

    @property
    def side_width(self) -> int:
        """Return the width of the network next to the model, 0 of serial adapters."""
        return 0 if self.adapter is None else self.adapter.width

    @cached_property
    def rounds(self) -> Rounds:
        """Return the run's rounds."""
        job = self.job
        return Rounds(
            lengths=self.split.lengths,
            owned=self.owned,
            names=tuple(device.name for device in self.cluster.devices),
            initiators=initiator_order(self.cluster, self.plan),
            batch_size=job.batch_size,
            micro_batches=self.plan.num_micro_batches,
            local_iterations=self.options.local_iterations,
            policy=self.policy,
            epochs=job.epochs,
            seed=job.seed,
            federated=self.options.federated,
            cached_from=None if not self.options.cache else self.kept.since if self.kept else (self.start_epoch, self.start_step),
            changes=tuple(first for first, _ in self.plan.later),
        )

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        return (Phase(epochs=range(self.job.epochs), steps=self.rounds.epoch, program=self.program),)

    def program(self, shape: StepShape) -> Program:
        """Return a round."""
        assert isinstance(shape, RoundShape)
        key = (shape.sizes, shape.iterations, shape.cached, shape.since)
        plan = self.plan.at(shape.since)
        if key not in self._schedules:
            typical = self.costs(replace(shape, lengths=(self.typical_length,) * len(shape.sizes)))
            in_flight = self.options.in_flight or plan.in_flight or USUALLY_IN_FLIGHT
            fixed: dict[str, int] = {"in_flight": in_flight, "world_size": self.cluster.world_size}
            if self.options.federated:
                made = federated_round(plan, shape.iterations, typical.seconds, **fixed)
            else:
                has_side = self.adapter is not None
                of_ring = {"is_noted": self.policy.is_adaptive, "cached": shape.cached, "has_side": has_side}
                made = ring_round(plan, shape.iterations, typical.seconds, **fixed, **of_ring)  # type: ignore[arg-type]
            self._schedules[key] = made
        return Program.on(self.cluster, self._schedules[key], self.costs(shape))

    def costs(self, shape: RoundShape) -> RingCosts:
        """Return the costs of a round's operations."""
        return RingCosts(
            self.profile,
            self.cluster,
            self.plan.at(shape.since),
            shape.iterations,
            sizes=shape.sizes,
            lengths=shape.lengths,
            crossing=crossing(self.facts, self.side_width),
            head_values=3 * _head_parameters(self.adapter or self.config),
            beside_bytes=beside_bytes(self.facts, self.adapter or self.config),
        )

    @cached_property
    def _schedules(self) -> dict[object, Schedule]:
        return {}


def crossing(facts: ModelFacts, side_width: int = 0) -> Crossing:
    """Return the shape of the states that cross between stages."""
    encoder = facts.num_encoder_layers
    return Crossing(hidden_size=facts.hidden_size, side_width=side_width, num_encoder_layers=encoder, target_length=TARGET_LENGTH)


def beside_bytes(facts: ModelFacts, config: Config) -> int:
    """Return the bytes of each device besides its layers: embedding, and head with gradient and moments."""
    return 4 * (facts.embedding_parameters + 4 * _head_parameters(config))


def _head_parameters(config: Config) -> int:
    norm_and_up = (2 * config.width + (config.width + 1) * config.hidden_size) if isinstance(config, ParallelAdapterConfig) else 0
    return norm_and_up + (config.hidden_size + 1) * config.num_outputs


class RingPhase(StagePhase[RingRankJob]):
    """A block of layers with their adapters, embedding and head.

    With an adaptive policy, the earlier rounds determine each round's depth.
    """

    def __init__(self, session: RankSession[RingRankJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        self._prefix: PrefixCache | None = None

    def shape(self, planned: PlannedStep) -> RoundShape:
        """Return the next round with its current depth (see RankPhase)."""
        shape = planned.shape
        assert isinstance(shape, RoundShape)
        if not isinstance(self.optimizer, RingOptimizer) or self.optimizer.history is None:
            return shape
        return shape.from_layer(self.rank_job.policy.adapted(self.optimizer.history[: self.optimizer.num_steps].tolist())[-1])

    def load(self, epoch: int) -> None:
        """Load the block (see RankPhase)."""
        self.session.progress.phase(LOADING)
        rank_job = self.rank_job
        if self.index is not None:
            stage, rounds, job = rank_job.present.stages[self.index], rank_job.rounds, rank_job.job
            backbone = rank_job.load_backbone(stage.start, stage.stop)
            first = backbone
            if stage.start > 0:
                first = rank_job.load_backbone(0, 1)
                first.layers.clear()  # on all devices but the first, only the embedding
            self.compute = RingCompute(rank_job.adapter or rank_job.config, backbone, first)
            schedule = LinearSchedule(peak=job.peak_learning_rate, num_steps=rounds.num_steps, warmup_fraction=job.warmup_fraction)
            keeps_head = rank_job.options.federated or self.session.rank == rounds.initiators[0]
            num_noted = rounds.num_rounds if rank_job.policy.is_adaptive else 0
            self.optimizer = RingOptimizer(
                self.compute, schedule, job.weight_decay, updates=rounds.updates, keeps_head=keeps_head, num_noted=num_noted
            )
            if rank_job.options.cache:
                folder = self.session.context.own_folder(rank_job.folder) / "prefix"
                lengths, lowest = rank_job.split.lengths, rank_job.policy.lowest(rounds.num_rounds, rounds.num_steps)
                of_state = crossing(rank_job.facts, rank_job.side_width)
                self._prefix = PrefixCache(folder=folder, lengths=lengths, crossing=of_state, lowest=lowest)
                if rank_job.kept is not None:
                    start_s, now_homes = self.session.context.now_s(), ring_homes(rank_job.present.stages)
                    moving = [(layer, rank_job.kept.homes[layer], now_homes[layer]) for layer in rank_job.cached_layers(rank_job.start)]
                    if rank_job.adapter is not None:
                        last = rank_job.plan.num_layers
                        moving.append((last, self.session.rank, self.session.rank))  # the last hidden states of its own samples stay
                        moving += [(last + 1, holder, receiver) for layer, holder, receiver in moving if layer == 0]  # the embedding's
                    self._prefix.take_over(moving, self.session.rank, self.session.run, rank_job.cluster)
                    self.result.spent_s["moving the cache"] = self.session.context.now_s() - start_s
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a round (see RankPhase)."""
        assert isinstance(planned, Round) and isinstance(planned.shape, RoundShape) and isinstance(self.optimizer, RingOptimizer)
        rank_job, iterations, sizes = self.rank_job, self.shape(planned).iterations, planned.shape.sizes
        if self._prefix is not None and rank_job.adapter is None:
            self._prefix.forget_above(iterations[0].first_unfrozen)
        self.optimizer.num_steps = planned.number + 1  # counts only once the round is done; the state of a failed round is not saved
        spans = [range(start, start + one.num_micro_batches) for start, one in zip(planned.starts, iterations, strict=True)]
        return RingHandlers(
            rank=self.session.rank,
            number=planned.number,
            by_loss=rank_job.policy.unfreezing == "plateau",
            plan=rank_job.present,
            iterations=iterations,
            iteration_of=[at for at, span in enumerate(spans) for _ in span],
            totals=[sum(sizes[span.start : span.stop]) for span in spans],
            first_step=planned.number * rank_job.rounds.steps_per_round,
            batches=[collate(rank_job.split, samples) for samples in planned.samples],
            compute=self.compute,
            optimizer=self.optimizer,
            epoch=epoch,
            layers=rank_job.layers,
            prefix=self._prefix,
            cached=planned.shape.cached,
        ).table()

    def release(self) -> None:
        """Free memory and disk (see RankPhase)."""
        if self._prefix is not None:
            self.result.nbytes["activation cache"] = self._prefix.nbytes
            self._prefix.forget_above(-1)
        super().release()


def phases_on(session: RankSession[RingRankJob], result: RankResult) -> tuple[RingPhase, ...]:
    """Return the phase as a rank does it."""
    return (RingPhase(session, session.rank_job.phases()[0], result),)
