"""The mini-batches of an epoch, and the parameters of which several stages hold copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.plan import Plan
from workbench.methods.common.steps import PlannedStep, plan_steps
from workbench.models.families import FAMILIES
from workbench.models.loading import ModelFacts
from workbench.tasks.batching import epoch_batches

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
    if not facts.shares_words:
        del holders["words"]
    if not FAMILIES[facts.family].position_bias:
        del holders["position bias"], holders["decoder position bias"]
    found = []
    for name, (holds, numel) in holders.items():
        stages = tuple(number for number, stage in enumerate(plan.stages) if holds(stage.start, stage.stop))
        if len(stages) > 1:
            found.append(SharedParameter(name, stages, numel))
    return tuple(found)


def planned_epoch(lengths: Sequence[int], plan: Plan, *, seed: int, epoch: int) -> tuple[PlannedStep, ...]:
    """Return an epoch's mini-batches, cut as the plan cuts them."""
    return plan_steps(epoch_batches(lengths, plan.mini_batch_size, seed, epoch), lengths, plan.num_micro_batches)
