"""The job of every device in a P-RGE run: the steps under one plan and setting, their samples, schedule and program.

Driver and ranks build the same program from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.run_files import STEPS
from workbench.core.schedule import STEP, Schedule, Value
from workbench.methods.common.rank_results import RankResult
from workbench.methods.p_rge.adaptive import Setting
from workbench.methods.p_rge.estimator_table import ESTIMATORS
from workbench.methods.p_rge.packing import pack_length, packs_of
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.queries import chosen_passings
from workbench.methods.p_rge.query_costs import Passing, stage_costs
from workbench.methods.p_rge.schedule import Group, query_groups, query_step
from workbench.methods.p_rge.zeroth_order import StepLog, ZerothOrderConfig
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.phases import Phase, PhasedJob
from workbench.planners.problem import Problem
from workbench.schedules import insert_transfers
from workbench.schedules.costs import Crossing
from workbench.tasks.prompts import PromptBatch, collate_prompts, indices_from
from workbench.tasks.tokenize import padded_length

LOG = Path(STEPS) / "log.jsonl"
"""The log of a run's steps, in its folder."""


class Change(NamedTuple):
    """From `step` on these settings apply; `samples` were processed before it."""

    step: int
    samples: int
    setting: Setting

    def samples_before(self, step: int) -> int:
        """Return the number of samples processed before a step from `step` on."""
        return self.samples + (step - self.step) * self.setting.batch_size


def change_at(changes: Sequence[Change], step: int) -> Change:
    """Return the change that applies at a step."""
    return next(change for change in reversed(changes) if change.step <= step)


@dataclass(frozen=True, kw_only=True)
class QueryShape(StepShape):
    """The shape of a step's computation: one part's hidden states have `rows` rows of `tokens` tokens.

    That is E rows of the padded length, or packs without the padding.  sizes: (E,).  lengths: the mean number of tokens
    computed for a sample, rounded up.  target_length: tokens that a decoder reads.
    """

    rows: int
    tokens: int
    target_length: int = 0

    @classmethod
    def of(cls, batch_size: int, rows: int, tokens: int, target_length: int = 0) -> QueryShape:
        """Return the shape of a batch of E samples."""
        lengths = (-(-rows * tokens // batch_size),)
        return cls(sizes=(batch_size,), lengths=lengths, rows=rows, tokens=tokens, target_length=target_length)


def planned_step(prepared: PreparedJob, change: Change, step: int) -> PlannedStep:
    """Return a step's samples (the next E of consecutive seeded permutations, whatever E was before) and its shape."""
    train, first = prepared.train, change.samples_before(step)
    samples = indices_from(len(train), prepared.job.seed, first, change.setting.batch_size)
    rows = [train.rows[index] for index in samples]
    lengths = [len(row.ids) for row in rows]
    padded = padded_length(lengths)
    packs = packs_of(lengths, padded, prepared.packing_width)
    size = (len(rows), padded) if packs is None else (len(packs), pack_length(packs, lengths))
    shape = QueryShape.of(len(rows), *size, target_length=max(len(row.decoder_ids) for row in rows))
    return PlannedStep(samples=(tuple(samples),), shape=shape)


class PlannedEpoch(Sequence[PlannedStep]):
    """An epoch's steps.  Each is planned when it is requested, because an epoch may have many thousands."""

    def __init__(self, job: PRGERankJob, epoch: int) -> None:
        per_epoch = job.prepared.steps_per_epoch
        self._job, self._steps = job, range(epoch * per_epoch, min((epoch + 1) * per_epoch, job.prepared.num_steps))

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> PlannedStep: ...

    @overload
    def __getitem__(self, index: slice) -> list[PlannedStep]: ...

    def __getitem__(self, index: int | slice) -> PlannedStep | list[PlannedStep]:
        if isinstance(index, slice):
            return [self._planned(step) for step in self._steps[index]]
        return self._planned(self._steps[index])

    def _planned(self, step: int) -> PlannedStep:
        return planned_step(self._job.prepared, change_at(self._job.changes, step), step)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStep:
    """A step under a plan.

    groups: groups of parts, computed one after the other on each device.  passings: how each rank computes its queries.
    estimator: its entry in the estimator table.
    """

    plan: Plan
    passings: Mapping[int, Passing]
    groups: tuple[Group, ...]
    estimator: str
    schedule: Schedule

    @classmethod
    def build(
        cls, plan: Plan, passings: Mapping[int, Passing], world_size: int, estimator: str = "two_point"
    ) -> QueryStep:
        """Return the step with its transfers; ranks that the plan leaves idle do nothing."""
        groups: list[Group] = []
        first, query_parts = 0, ESTIMATORS[estimator].query_parts
        for share in plan.stages[-1].shares:
            groups += query_groups(first, share.queries, passings[share.rank].queries, query_parts)
            first += share.queries
        step = query_step(plan.stages, groups, world_size=world_size, query_parts=query_parts)
        return cls(
            plan=plan,
            passings=passings,
            groups=tuple(groups),
            estimator=estimator,
            schedule=insert_transfers(step),
        )

    @property
    def query_parts(self) -> int:
        """Return the parts of a query."""
        return ESTIMATORS[self.estimator].query_parts

    def queries(self, part: int) -> range:
        """Return the queries of the group whose first part is `part`."""
        group = next(group for group in self.groups if group[0] == part)
        return range(group[0] // self.query_parts, group[-1] // self.query_parts + 1)

    def program(self, profile: Profile, cluster: Cluster, shape: StepShape, crossing: Crossing) -> Program:
        """Return the step's program.  crossing: the hidden states sent from stage to stage."""
        assert isinstance(shape, QueryShape)
        queries, length = sum(share.queries for share in self.plan.stages[0].shares), shape.lengths[0]
        problem = Problem(
            profile,
            cluster,
            queries=queries,
            batch_size=shape.samples,
            sequence_length=length,
            estimator=self.estimator,
        )
        ranks = stage_costs(problem, self.plan)
        sized = replace(crossing, target_length=shape.target_length)

        def hidden(value: Value) -> Spec:
            tokens = sized.tokens(self.plan.stages[value.stage].stop, shape.tokens)
            return Spec(
                (self.query_parts * len(self.queries(value.part)) * shape.rows, tokens, sized.hidden_size), sized.dtype
            )

        costs = TableCosts(
            seconds_by_kind={
                "F": lambda rank, op: ranks[rank].group_s(self.passings[rank], len(self.queries(op.part))),
                STEP: lambda rank, op: ranks[rank].noise_s(queries),
            },
            # A flag that requests a pause is sent with the losses.
            bytes_by_name={
                "act": hidden,
                "loss": lambda value: Spec((self.query_parts * len(self.queries(value.part)) + 1,)),
            },
            resident_by_rank={rank: costs.resident_bytes for rank, costs in ranks.items()},
            cluster=cluster,
        )
        return Program.on(cluster, self.schedule, costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PRGERankJob(PhasedJob):
    """The steps of a run from the next one on, under one plan and one setting; the same on every rank.

    cluster, plan, passings, profile: those of the devices that take part, at full speed.
    prepared: the prepared job without the task's samples.  changes: the settings so far, each from some step on; the
    last one applies.
    records: the finished steps, from which theta is rebuilt.
    """

    prepared: PreparedJob
    passings: Mapping[int, Passing]
    changes: tuple[Change, ...]
    records: tuple[StepLog, ...] = ()

    @property
    def change(self) -> Change:
        """Return the setting, and the step and sample from which it applies."""
        return self.changes[-1]

    @property
    def begins_at(self) -> tuple[int, int]:
        """Return the epoch and the step at which these devices begin (see SessionJob)."""
        return divmod(self.first_step, self.prepared.steps_per_epoch)

    @property
    def first_step(self) -> int:
        """Return the first step of this job."""
        return len(self.records)

    @property
    def last_step(self) -> int:
        """Return the step at which to stop, exclusive."""
        return self.prepared.num_steps

    @property
    def estimator(self) -> ZerothOrderConfig:
        """Return how a step estimates its gradient."""
        return self.prepared.zeroth_order(self.change.setting)

    def query_step(self) -> QueryStep:
        """Return the layout of every step on all devices."""
        return QueryStep.build(self.plan, self.passings, self.cluster.world_size, self.prepared.options.estimator)

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see PhasedJob)."""
        step, crossing, prepared = self.query_step(), self.prepared.crossing, self.prepared
        epochs = range(-(-prepared.num_steps // prepared.steps_per_epoch))
        batch_size, target_length = (
            self.change.setting.batch_size,
            max(len(row.decoder_ids) for row in prepared.train.rows),
        )
        longest = QueryShape.of(batch_size, batch_size, prepared.longest, target_length)

        def program(shape: StepShape) -> Program:
            return step.program(self.profile, self.cluster, shape, crossing)

        phase = Phase(
            epochs=epochs,
            steps=partial(PlannedEpoch, self),
            program=program,
            last_epoch=len(PlannedEpoch(self, epochs[-1])),
            longest=PlannedStep(samples=(), shape=longest),
        )
        return (phase,)

    def batch(self, planned: PlannedStep) -> PromptBatch:
        """Return the batch of a step."""
        return collate_prompts(self.prepared.train, planned.samples[0])


def rank_job(
    prepared: PreparedJob,
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    changes: Sequence[Change],
    *,
    slowed: Profile | None = None,
    **settings: Any,
) -> PRGERankJob:
    """Return the description of a run under a plan, for every rank.

    profile: profile of the devices at full speed.  slowed: profile at their current speed, if it differs; it decides
    how each device computes its queries.  Raises PlanError if a device has too little memory for its share.
    """
    return PRGERankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        passings=chosen_passings(prepared.problem(slowed or profile, cluster, changes[-1].setting), plan),
        prepared=replace(prepared, task=prepared.task.limited(1, 1, 1)),
        changes=tuple(changes),
        **settings,
    )


@dataclass(kw_only=True)
class QueryResult(RankResult):
    """A device's results of a PRGERankJob.

    records: records of the finished steps.

    losses: those that this device knows of the step after them, by part.  nbytes: bytes sent, in total, and memory
    readings, by name.
    """

    records: list[StepLog] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
