"""One optimizer step of PAC+: who computes which samples, the schedule, and the size of every value."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from workbench.core.plan import Plan, Stage
from workbench.core.schedule import RECV, SEND, Op, Schedule, Value
from workbench.methods.common.steps import StepShape
from workbench.schedules.cached import cached_step
from workbench.schedules.hybrid import hybrid_1f1b
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pieces import Piece, boundary_pieces


@dataclass(frozen=True, kw_only=True)
class HybridStep:
    """A step of the first epoch: hybrid 1F1B over pipeline stages and device groups (section V-A)."""

    plan: Plan
    shape: StepShape
    schedule: Schedule
    _pieces: dict[tuple[int, int], tuple[Piece, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls, plan: Plan, shape: StepShape, world_size: int, schedules: dict[tuple[int, ...], Schedule], *, backbone_only: bool = False
    ) -> HybridStep:
        """Return the step; `schedules` keeps those already built, by micro-batch sizes.

        backbone_only: leave out all training, to fill the activation cache again.
        """
        if shape.sizes not in schedules:
            whole = insert_transfers(hybrid_1f1b(plan, shape.sizes, world_size=world_size))
            schedules[shape.sizes] = _backbone_part(whole) if backbone_only else whole
        return cls(plan=plan, shape=shape, schedule=schedules[shape.sizes])

    def samples(self, rank: int, microbatch: int) -> tuple[int, int]:
        """Return the range (first, end) of the micro-batch's samples that the rank computes."""
        stage = self.plan.stages[self._stage(rank)]
        return stage.split(self.shape.sizes[microbatch])[stage.ranks.index(rank)]

    def pieces(self, boundary: int, microbatch: int) -> tuple[Piece, ...]:
        """Return the pieces in which activations cross from stage `boundary` to the next."""
        key = (boundary, self.shape.sizes[microbatch])
        if key not in self._pieces:
            stages = self.plan.stages
            self._pieces[key] = tuple(boundary_pieces(stages[boundary], stages[boundary + 1], key[1]))
        return self._pieces[key]

    def num_samples(self, value: Value) -> int:
        """Return the samples that an act, side or sgrad piece, or a rank's tap or ctx, covers."""
        if value.name in ("tap", "ctx", "loss"):
            first, end = self.samples(value.part, value.microbatch)
            return end - first
        piece = self.pieces(self.boundary(value), value.microbatch)[value.part]
        return piece.end - piece.first

    def boundary(self, value: Value) -> int:
        """Return the stage behind which an act, side or sgrad piece crosses."""
        return value.stage - 1 if value.name == "sgrad" else value.stage

    def _stage(self, rank: int) -> int:
        stage = self.plan.stage_of(rank)
        assert stage is not None, f"rank {rank} is idle in this plan"
        return stage


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """A step of the later epochs: data parallel from the activation cache (section V-B).

    sizes[rank], lengths[rank]: samples and padded length of each rank; 0 samples: the rank only takes part in the all-reduce.
    """

    stage: Stage
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """Return the step's schedule."""
        return cached_step(self.stage, [self.sizes[rank] for rank in self.stage.ranks], world_size=len(self.sizes))

    @property
    def samples(self) -> int:
        """Return the samples of the mini-batch."""
        return sum(self.sizes)


def _backbone_part(schedule: Schedule) -> Schedule:
    """Return the schedule with nothing but backbone forward passes and the transfers between them."""

    def belongs(op: Op) -> bool:
        return op.kind == "F" or (op.kind in (SEND, RECV) and (op.reads or op.writes)[0].name == "act")

    return Schedule(ops=tuple(tuple(op for op in ops if belongs(op)) for ops in schedule.ops), inputs=schedule.inputs)
