"""What a device is told of a run, and what it sends back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.core.program import Program
from workbench.methods.common.session import RankResult, SessionJob
from workbench.methods.p_rge.layout import Change, QueryStep, Shape, samples_of
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.models.zeroth_order import StepLog, ZerothOrderConfig
from workbench.planners.query_costs import Passing
from workbench.runtime.commands import End
from workbench.tasks.prompts import PromptBatch, collate_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob(SessionJob):
    """Some steps of a run, under one plan and one setting; the same on every rank.

    cluster, plan, passings, profile: of the devices that take part, as fast as they are when nothing slows them down.
    prepared: without the task's samples.  change: the setting, from which step and sample on.
    records: the steps that are done; theta is made from them.
    """

    prepared: PreparedJob
    passings: Mapping[int, Passing]
    change: Change
    records: tuple[StepLog, ...]

    @property
    def first_step(self) -> int:
        """Return the step with which this job begins."""
        return len(self.records)

    @property
    def last_step(self) -> int:
        """Return the first step that is not to be done."""
        return self.prepared.num_steps

    @property
    def estimator(self) -> ZerothOrderConfig:
        """Return how a step estimates its gradient."""
        return self.prepared.zeroth_order(self.change.setting)

    def query_step(self) -> QueryStep:
        """Return what every step is to every device."""
        return QueryStep.build(self.plan, self.passings, self.cluster.world_size)

    def shape(self, step: int) -> Shape:
        """Return the shape of a step's batch."""
        return self.prepared.shape(self.change, step)

    def program(self, query_step: QueryStep, step: int) -> Program:
        """Return the program of a step, the same on every rank."""
        return query_step.program(self.profile, self.cluster, self.shape(step), self.prepared.crossing(self.change.setting))

    def batch(self, step: int) -> PromptBatch:
        """Return the batch of a step."""
        train = self.prepared.train
        return collate_prompts(train, samples_of(len(train), self.job.seed, self.change, step))


class Logged(NamedTuple):
    """What a rank of torchrun tells of a step that is made."""

    record: StepLog


@dataclass(kw_only=True)
class RankPart(RankResult):
    """What a device has done of a RankJob.

    end: all steps; or it paused since that was asked for; or another device was lost in the middle of a step.
    losses: of a lost step, the parts that this device knows.  nbytes: what it sent, in all, and memory readings, by name.
    """

    end: End = "finished"
    records: list[StepLog] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    error: str = ""
