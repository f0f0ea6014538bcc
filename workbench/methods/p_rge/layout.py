"""The layout of a step: samples, groups of parts, schedule, program; and its prediction.  Driver and ranks get the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts
from workbench.core.plan import Plan
from workbench.core.profile import Profile, trainable_bytes
from workbench.core.program import Program
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.schedule import STEP, Schedule, Value
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.records import traced_step
from workbench.methods.p_rge.adaptive import Setting
from workbench.methods.p_rge.packing import pack_length, packs_of
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.queries import chosen_passings
from workbench.methods.p_rge.query_costs import Passing, StepSize, stage_costs
from workbench.methods.p_rge.schedule import Group, query_groups, query_step
from workbench.schedules import insert_transfers
from workbench.schedules.costs import Crossing
from workbench.simulator import simulate
from workbench.tasks.prompts import step_indices
from workbench.tasks.tokenize import padded_length


class Change(NamedTuple):
    """From `step` on these settings apply; `samples` were processed before it."""

    step: int
    samples: int
    setting: Setting

    def samples_before(self, step: int) -> int:
        """Return the number of samples processed before a step from `step` on."""
        return self.samples + (step - self.step) * self.setting.batch_size


def samples_of(num_samples: int, seed: int, change: Change, step: int) -> list[int]:
    """Return a step's samples: the next E of consecutive seeded permutations, whatever E was before."""
    first = change.samples_before(step)
    return [step_indices(num_samples, 1, seed, at)[0] for at in range(first, first + change.setting.batch_size)]


class Shape(NamedTuple):
    """The shape of a step's computation: one part's hidden states have `rows` rows of `tokens` tokens.

    That is E rows of the padded length, or packs without the padding.  target_length: tokens that a decoder reads.
    """

    setting: Setting
    rows: int
    tokens: int
    target_length: int = 0

    @property
    def length(self) -> int:
        """Return the mean number of tokens computed for a sample, rounded up."""
        return -(-self.rows * self.tokens // self.setting.batch_size)


def shape_of(prepared: PreparedJob, change: Change, step: int) -> Shape:
    """Return the shape of a step's batch."""
    train = prepared.train
    rows = [train.rows[index] for index in samples_of(len(train), prepared.job.seed, change, step)]
    lengths = [len(row.ids) for row in rows]
    padded = padded_length(lengths)
    packs = packs_of(lengths, padded, prepared.packing_width)
    size = (len(rows), padded) if packs is None else (len(packs), pack_length(packs, lengths))
    return Shape(change.setting, *size, target_length=max(len(row.decoder_ids) for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStep:
    """A step under a plan.  groups: of parts, computed one after the other on each device.  passings: by rank."""

    plan: Plan
    passings: Mapping[int, Passing]
    groups: tuple[Group, ...]
    schedule: Schedule

    @classmethod
    def build(cls, plan: Plan, passings: Mapping[int, Passing], world_size: int) -> QueryStep:
        """Return the step with its transfers; ranks that the plan leaves idle do nothing."""
        groups: list[Group] = []
        first = 0
        for share in plan.stages[-1].shares:
            groups += query_groups(first, share.queries, passings[share.rank].queries)
            first += share.queries
        schedule = insert_transfers(query_step(plan.stages, groups, world_size=world_size))
        return cls(plan=plan, passings=passings, groups=tuple(groups), schedule=schedule)

    def queries(self, part: int) -> range:
        """Return the queries of the group whose first part is `part`."""
        group = next(group for group in self.groups if group[0] == part)
        return range(group[0] // 2, group[-1] // 2 + 1)

    def program(self, profile: Profile, cluster: Cluster, shape: Shape, crossing: Crossing) -> Program:
        """Return the step's program.  crossing: the hidden states sent from stage to stage."""
        setting = shape.setting
        size = StepSize(queries=setting.queries, batch_size=setting.batch_size, sequence_length=shape.length, memory_length=shape.length)
        ranks = stage_costs(profile, cluster, self.plan, size)
        sized = replace(crossing, target_length=shape.target_length)

        def hidden(value: Value) -> Spec:
            tokens = sized.tokens(self.plan.stages[value.stage].stop, shape.tokens)
            return Spec((2 * len(self.queries(value.part)) * shape.rows, tokens, sized.hidden_size), sized.dtype)

        costs = TableCosts(
            seconds_by_kind={
                "F": lambda rank, op: ranks[rank].group_s(self.passings[rank], len(self.queries(op.part))),
                STEP: lambda rank, op: ranks[rank].noise_s(setting.queries),
            },
            # A flag that requests a pause is sent with the losses.
            bytes_by_name={"act": hidden, "loss": lambda value: Spec((2 * len(self.queries(value.part)) + 1,))},
            resident_by_rank={rank: costs.resident_bytes for rank, costs in ranks.items()},
            cluster=cluster,
        )
        return Program.on(cluster, self.schedule, costs)


class Predictor:
    """Simulates the steps of one plan and setting on one cluster: a runtime.commands.Predictor.  Equal shapes are simulated once."""

    def __init__(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting, shape: Callable[[int], Shape]
    ) -> None:
        """shape: of each step's batch.  Raises PlanError if a device has too little memory for its share."""
        self._profile, self.cluster, self._crossing = profile, cluster, prepared.crossing(setting)
        self.passings = chosen_passings(profile, cluster, plan, prepared.size(setting))
        self._step = QueryStep.build(plan, self.passings, cluster.world_size)
        self.shape = shape
        self.timeline = lru_cache(maxsize=None)(self._simulated)

    def program(self, shape: Shape) -> Program:
        """Return the program of a step, the one that the ranks execute."""
        return self._step.program(self._profile, self.cluster, shape, self._crossing)

    def _simulated(self, shape: Shape, title: str = "") -> Timeline:
        """Return the timeline of a step; its memory too if it has a title."""
        return simulate(self.program(shape), title=title, memory=bool(title))

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        return self.timeline(self.shape(step)).makespan_s

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step in which a device computes."""
        return self.timeline(self.shape(step)).busy_s(place)


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting) -> Prediction:
    """Return every step's simulated seconds, as if nothing changed, and the timeline of a middle step of the first epoch.

    bytes: sent by all devices in a step, and for comparison by first-order data parallelism on the same devices.
    """
    predictor = Predictor(prepared, profile, cluster, plan, setting, partial(shape_of, prepared, Change(0, 0, setting)))
    per_epoch = prepared.steps_per_epoch
    middle = traced_step(min(per_epoch, prepared.num_steps))
    timeline = predictor.timeline(predictor.shape(middle), f"Step {middle + 1} of the first epoch")
    steps = tuple(
        StepRecord(
            epoch=step // per_epoch,
            step=step % per_epoch,
            samples=setting.batch_size,
            cached=False,
            predicted_s=predictor.seconds(step),
        )
        for step in range(prepared.num_steps)
    )
    epochs = tuple(
        EpochRecord(epoch=epoch, cached=False, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch))
        for epoch in range(steps[-1].epoch + 1)
    )
    trained = trainable_bytes(profile.layers[0])
    devices = sum(len(stage.shares) for stage in plan.stages)
    return Prediction(
        steps=steps,
        epochs=epochs,
        timelines={"first epoch, predicted": timeline},
        bytes={
            "sent in a step": sum(timeline.bytes_sent(rank) for rank in range(cluster.world_size)),
            # A ring all-reduce of a gradient sends 2 (n - 1) times the bytes of all trained values.
            "sent in a step of first-order data parallelism": 2 * (devices - 1) * trained,
            "kept of a step in the log": 8 * setting.queries,
        },
    )
