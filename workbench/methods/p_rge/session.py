"""What a device is told of a run, and what it sends back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.methods.common.session import SessionJob, StepTrace
from workbench.methods.p_rge.layout import Change
from workbench.models.quantization import FloatType
from workbench.models.zeroth_order import StepLog, TrainableConfig, ZerothOrderConfig
from workbench.planners.query_costs import Passing
from workbench.runtime.commands import End
from workbench.schedules.plan_costs import Crossing
from workbench.tasks.prompts import EncodedPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob(SessionJob):
    """Some steps of a run, under one plan and one setting; the same on every rank.

    cluster, plan, passings, profile: of the devices that take part, as fast as they are when nothing slows them down.
    train: the prompts.  compute_dtype: as in PRGEOptions.  crossing, packing_width: as in PreparedJob.
    change: the setting, from which step and sample on.
    records: the steps that are done; theta is made from them.  last_step: the first that is not to be done.
    steps_per_epoch: for counting only.
    """

    passings: Mapping[int, Passing]
    train: EncodedPrompts
    trainable: TrainableConfig
    compute_dtype: FloatType | None
    crossing: Crossing
    packing_width: int
    estimator: ZerothOrderConfig
    change: Change
    records: tuple[StepLog, ...]
    last_step: int
    steps_per_epoch: int

    @property
    def first_step(self) -> int:
        """Return the step with which this job begins."""
        return len(self.records)


class Logged(NamedTuple):
    """What a rank of torchrun tells of a step that is made."""

    record: StepLog


@dataclass(kw_only=True)
class RankPart:
    """What a device has done of a RankJob.

    end: all steps; or it paused since that was asked for; or another device was lost in the middle of a step.
    losses: of a lost step, the parts that this device knows.  nbytes: what it sent, in all, and memory readings, by name.
    """

    rank: int
    end: End
    steps: list[StepTrace] = field(default_factory=list)
    records: list[StepLog] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    late_s: float = 0.0
    paced_s: float = 0.0
    error: str = ""
