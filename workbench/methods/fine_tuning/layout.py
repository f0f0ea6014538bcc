"""One optimizer step: who computes which samples, the schedule, the size of every value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.core.plan import Plan
from workbench.core.schedule import Schedule, Value
from workbench.methods.common.steps import PlannedStep, StepShape, plan_steps
from workbench.models.families import FAMILIES
from workbench.models.loading import ModelFacts
from workbench.schedules.backpropagation import backpropagation
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pieces import Piece, boundary_pieces
from workbench.tasks.batching import epoch_batches

__all__ = ["BackpropagationStep", "PlannedStep", "SharedParameter", "StepShape", "boundary_tokens", "planned_epoch", "shared_parameters"]

TARGET_LENGTH = 1
"""Tokens of a decoder: classification and regression need the first alone."""


class SharedParameter(NamedTuple):
    """A parameter of which several stages hold copies (BackboneStage.shared_parameters).  numel: its values."""

    name: str
    stages: tuple[int, ...]
    numel: int


def shared_parameters(facts: ModelFacts, technique: str, plan: Plan) -> tuple[SharedParameter, ...]:
    """Return the trained parameters that more than one stage of a plan holds: an encoder-decoder's in full fine-tuning, no others."""
    border = facts.num_encoder_layers
    if technique != "full" or border is None:
        return ()
    words = facts.vocabulary_size * facts.hidden_size
    holders = {
        "words": (lambda start, stop: start == 0 or start <= border < stop, words),
        "position bias": (lambda start, stop: start < border, facts.embedding_parameters - words),
        "decoder position bias": (lambda start, stop: stop > border, facts.decoder_embedding_parameters),
    }
    if not FAMILIES[facts.family].position_bias:
        del holders["position bias"], holders["decoder position bias"]
    found = []
    for name, (holds, numel) in holders.items():
        stages = tuple(number for number, stage in enumerate(plan.stages) if holds(stage.start, stage.stop))
        if len(stages) > 1:
            found.append(SharedParameter(name, stages, numel))
    return tuple(found)


def boundary_tokens(facts: ModelFacts, layers: int, length: int) -> int:
    """Return the tokens of a hidden state that `layers` layers have made: in the decoder the encoder's output goes on beside its own."""
    in_decoder = facts.num_encoder_layers is not None and layers > facts.num_encoder_layers
    return length + TARGET_LENGTH * in_decoder


def planned_epoch(lengths: Sequence[int], plan: Plan, *, seed: int, epoch: int) -> tuple[PlannedStep, ...]:
    """Return an epoch's mini-batches, cut as the plan cuts them."""
    return plan_steps(epoch_batches(lengths, plan.mini_batch_size, seed, epoch), lengths, plan.num_micro_batches)


@dataclass(frozen=True, kw_only=True)
class BackpropagationStep:
    """A step: 1F1B over pipeline stages and device groups."""

    plan: Plan
    shape: StepShape
    schedule: Schedule
    shared: tuple[SharedParameter, ...]
    _pieces: dict[tuple[int, int], tuple[Piece, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        plan: Plan,
        shape: StepShape,
        world_size: int,
        schedules: dict[tuple[int, ...], Schedule],
        shared: tuple[SharedParameter, ...] = (),
    ) -> BackpropagationStep:
        """Return the step; `schedules` keeps those already built, by micro-batch sizes."""
        if shape.sizes not in schedules:
            stages = [parameter.stages for parameter in shared]
            schedules[shape.sizes] = insert_transfers(backpropagation(plan, shape.sizes, shared=stages, world_size=world_size))
        return cls(plan=plan, shape=shape, schedule=schedules[shape.sizes], shared=shared)

    def samples(self, rank: int, microbatch: int) -> tuple[int, int]:
        """Return the range (first, end) of the micro-batch's samples that the rank computes."""
        index = self.plan.stage_of(rank)
        assert index is not None, f"rank {rank} is idle in this plan"
        stage = self.plan.stages[index]
        return stage.split(self.shape.sizes[microbatch])[stage.ranks.index(rank)]

    def pieces(self, boundary: int, microbatch: int) -> tuple[Piece, ...]:
        """Return the pieces in which activations cross from stage `boundary` to the next."""
        key = (boundary, self.shape.sizes[microbatch])
        if key not in self._pieces:
            stages = self.plan.stages
            self._pieces[key] = tuple(boundary_pieces(stages[boundary], stages[boundary + 1], key[1]))
        return self._pieces[key]

    def piece(self, value: Value) -> Piece:
        """Return the samples that an act or grad value covers."""
        return self.pieces(self.boundary(value), value.microbatch)[value.part]

    def boundary(self, value: Value) -> int:
        """Return the stage behind which an act or grad value crosses."""
        return value.stage - 1 if value.name == "grad" else value.stage
