"""The programs of a fine-tuning run: built alike by the driver, which simulates them, and by every rank, which executes them."""

from __future__ import annotations

from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.methods.training.steps import StepShape
from workbench.models.facts import ModelFacts
from workbench.models.families import FAMILIES
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import ORDERS, OrderName, backpropagation
from workbench.schedules.plan_costs import Crossing, PlanCosts

TARGET_LENGTH = 1
"""Tokens of a decoder: classification and regression need the first alone."""
FP32_BYTES = 4


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


class Programs:
    """Programs of one plan on one cluster; schedules are built once for each shape.

    facts: None for a model that is only priced.  schedule: the order of the micro-batches.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        facts: ModelFacts | None,
        shared: tuple[SharedParameter, ...] = (),
        schedule: OrderName = "1f1b",
    ) -> None:
        self._profile, self._cluster, self._plan, self._shared = profile, cluster, plan, shared
        self._order = ORDERS[schedule]
        self._crossing = None
        if facts is not None:
            self._crossing = Crossing(
                hidden_size=facts.hidden_size, num_encoder_layers=facts.num_encoder_layers, target_length=TARGET_LENGTH
            )
        self._schedules: dict[tuple[int, ...], Schedule] = {}

    def step(self, shape: StepShape) -> Program:
        """Return one optimizer step over pipeline stages and device groups."""
        if shape.sizes not in self._schedules:
            stages = [parameter.stages for parameter in self._shared]
            schedule = backpropagation(self._plan, shape.sizes, shared=stages, world_size=self._cluster.world_size, order=self._order)
            self._schedules[shape.sizes] = insert_transfers(schedule)
        costs = PlanCosts(
            self._profile,
            self._cluster,
            self._plan,
            sizes=shape.sizes,
            lengths=shape.lengths,
            shared_bytes=[FP32_BYTES * parameter.numel for parameter in self._shared],
            crossing=self._crossing,
        )
        return Program.on(self._cluster, self._schedules[shape.sizes], costs)
