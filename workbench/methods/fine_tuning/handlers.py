"""The programs of a fine-tuning run, a rank's computation (PAC+, section II), and the handler of each
operation kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.costs import TableCosts
from workbench.core.names import FP32_BYTES
from workbench.core.once import once_for
from workbench.core.plan import KEEP, Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.core.virtual_workers import VersionRule
from workbench.methods.common.scaling import TARGET_LENGTH
from workbench.methods.training.handlers import StageContext, StepHandlers, StepShape, joined, named
from workbench.models.configuration import ModelFacts
from workbench.models.families import FAMILIES
from workbench.runtime.executor import Contents, Handler
from workbench.schedules.costs import Crossing, context_bytes, plan_costs
from workbench.schedules.division import Division
from workbench.schedules.hetpipe import asynchronous_1f1b
from workbench.schedules.least import BACKPROPAGATION, least_s
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import ORDERS, SHARE, OrderName, backpropagation
from workbench.schedules.recomputation import AGAIN, CONTEXT, GRADIENT, INPUT, READ
from workbench.schedules.tensor import divide_layers


@dataclass(frozen=True, kw_only=True)
class WindowShape(StepShape):
    """The shape of a window, whose parts are mini-batches.

    ahead: the parts after it whose forward passes begin in it; empty if the pipeline drains.  continues: the previous
    window, if it did not drain.  If that window is long enough, it is described as if it had begun with an empty
    pipeline.
    """

    ahead: StepShape
    continues: WindowShape | None = field(default=None, hash=False)  # hash(None) differs from process to process

    @property
    def all_parts(self) -> StepShape:
        """Return the parts of the window and those ahead."""
        return StepShape(sizes=self.sizes + self.ahead.sizes, lengths=self.lengths + self.ahead.lengths)


class SharedParameter(NamedTuple):
    """A parameter with copies on several stages (BackboneStage.shared_parameters).  numel: its number of values."""

    name: str
    stages: tuple[int, ...]
    numel: int


def shared_parameters(facts: ModelFacts, technique: str, plan: Plan) -> tuple[SharedParameter, ...]:
    """Return the trained parameters that several stages of a plan have.  Only full fine-tuning of an encoder-decoder
    has any.
    """
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
    shared = []
    for name, (holds, numel) in holders.items():
        stages = tuple(number for number, stage in enumerate(plan.stages) if holds(stage.start, stage.stop))
        if len(stages) > 1:
            shared.append(SharedParameter(name, stages, numel))
    return tuple(shared)


@dataclass(frozen=True)
class Programs:
    """Programs of one plan on one cluster; schedules are built once for each shape.

    facts: None if the model is only simulated.  schedule: the order of the micro-batches; with 'asynchronous_1f1b' a
    step's parts are whole mini-batches, each of which updates the weights.  divisions: by rank, the divisions of an
    asynchronous pipeline's devices whose processors share each layer.  side_width: see TechniqueConfig.
    """

    profile: Profile
    cluster: Cluster
    plan: Plan
    facts: ModelFacts | None
    shared: tuple[SharedParameter, ...] = ()
    schedule: OrderName = "1f1b"
    divisions: Mapping[int, Division] = field(default_factory=dict)
    versions: VersionRule = "stashing"
    side_width: int = 0
    _schedules: dict[tuple[Any, ...], Schedule] = field(default_factory=dict, init=False)

    @property
    def _crossing(self) -> Crossing | None:
        if self.facts is None:
            return None
        return Crossing(
            hidden_size=self.facts.hidden_size + self.side_width,
            side_width=self.side_width,
            num_encoder_layers=self.facts.num_encoder_layers,
            target_length=TARGET_LENGTH,
        )

    def step(self, shape: StepShape) -> Program:
        """Return one optimizer step over pipeline stages and device groups, or several without a drain between them."""
        num_begun, ahead, parts = None, 0, shape
        if isinstance(shape, WindowShape):
            num_begun = None if shape.continues is None else len(shape.continues.ahead.sizes)
            ahead, parts = len(shape.ahead.sizes), shape.all_parts
        key = shape.sizes, num_begun, ahead
        if key not in self._schedules:
            self._schedules[key] = once_for(
                lambda: (*key, *self._settings), lambda: insert_transfers(self._schedule(*key))
            )
        return Program.on(self.cluster, self._schedules[key], self._costs(parts))

    def least_s(self, shape: StepShape) -> float:
        """Return a lower bound of the simulated seconds of a step, 0 if it is not that of a pipeline that keeps its
        activations.
        """
        order = ORDERS.get(self.schedule)
        if order is None or any(stage.activations != KEEP for stage in self.plan.stages):
            return 0.0
        return least_s(self.plan, shape.sizes, shape.lengths, self._costs(shape), order, BACKPROPAGATION)

    def _costs(self, shape: StepShape) -> TableCosts:
        return plan_costs(
            self.profile,
            self.cluster,
            self.plan,
            sizes=shape.sizes,
            lengths=shape.lengths,
            shared_bytes=[FP32_BYTES * parameter.numel for parameter in self.shared],
            crossing=self._crossing,
            stashes_weights=self.schedule not in ORDERS,
            divisions=self.divisions,
        )

    @property
    def _settings(self) -> tuple[object, ...]:
        """Return all that a schedule depends on besides the sizes."""
        stages = self.plan.stages
        # Without recomputation it is the same however the layers are cut.
        has_layers = self.schedule not in ORDERS or any(stage.activations != KEEP for stage in stages)
        parts = stages if has_layers else tuple(stage.shares for stage in stages)
        shared = tuple(parameter.stages for parameter in self.shared)
        order, divisions = ORDERS.get(self.schedule, self.versions), tuple(sorted(self.divisions.items()))
        return parts, self.cluster.world_size, order, shared, divisions

    def _schedule(self, sizes: tuple[int, ...], num_begun: int | None, ahead: int) -> Schedule:
        world_size, order = self.cluster.world_size, ORDERS.get(self.schedule)
        if order is None:
            schedule = asynchronous_1f1b(
                self.plan, len(sizes), world_size=world_size, num_begun=num_begun, ahead=ahead, versions=self.versions
            )
            return divide_layers(schedule, self.plan, self.divisions)
        stages = [parameter.stages for parameter in self.shared]
        return backpropagation(self.plan, sizes, shared=stages, world_size=world_size, order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpropagationHandlers(StepHandlers):
    """One step's operations on one rank (see StepHandlers).  shared: the parameters with copies on several stages."""

    shared: tuple[SharedParameter, ...]

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return self.common() | {
            "F": self._forward,
            "B": self._backward,
            **dict.fromkeys((AGAIN, READ), self._again),
            SHARE: lambda op, reads: (
                self._gradient(op.part).reshape(-1).clone(),
            ),  # cloned, because it is sent during STEP
            "STEP": self._update_shared,
        }

    def _forward(self, op: Op, reads: Contents) -> Contents:
        batch, hidden = self.batches[op.microbatch], joined(op, reads, "act")
        source = batch.input_ids if hidden is None else hidden
        values = [value for value in op.writes if value.name not in (CONTEXT, "act", "loss")]
        if values:
            return self._first_pass(op, values, source)
        return self.forwarded(op, self.compute.forward(source, batch.attention_mask, self.targets(op)))

    def _first_pass(self, op: Op, values: Sequence[Value], source: Tensor) -> Contents:
        """Run a stage that does not keep its activations.  values: those that it writes for its backward pass."""
        batch = self.batches[op.microbatch]
        keeps_last = values[-1].name.startswith(CONTEXT)
        output, inputs, context = self.compute.first_pass(
            source, batch.attention_mask, self.targets(op), keeps_last=keeps_last
        )
        if context is not None:
            context.nbytes = context_bytes(self.layers[-1:], *batch.attention_mask.shape)
            inputs.append(context)
        contents = {value.name: content for value, content in zip(values, inputs, strict=True)}
        return self.written(op, output, loss=output, **contents)

    def _again(self, op: Op, reads: Contents) -> Contents:
        mask = self.batches[op.microbatch].attention_mask
        context = self.compute.again(op.part, named(op, reads, f"{INPUT}{op.part}")[0], mask)
        layers = self.layers[op.part - self.compute.model.backbone.start :][:1]
        context.nbytes = context_bytes(layers, *mask.shape)
        return (context,)

    def _backward(self, op: Op, reads: Contents) -> Contents:
        if op.part == NONE:
            context: StageContext = named(op, reads, CONTEXT)[0]
            return self.written(op, self.compute.backward(context, joined(op, reads, GRADIENT)), gacc=None)
        context = named(op, reads, f"{CONTEXT}{op.part}")[0]
        from_layer = named(op, reads, f"{GRADIENT}{op.part + 1}")
        gradient = self.compute.backward(context, from_layer[0] if from_layer else joined(op, reads, GRADIENT))
        return self.written(op, gradient, gacc=None, **{f"{GRADIENT}{op.part}": gradient})

    def _update_shared(self, op: Op, reads: Contents) -> Contents:
        arrived = {value: content for value, content in zip(op.reads, reads, strict=True) if value.name == "shared"}
        for part, parameter in enumerate(self.shared):
            if op.stage in parameter.stages:
                own_gradient = self._gradient(part)
                # In the order of the stages, on every stage: all copies get exactly the same sum.
                total = torch.zeros_like(own_gradient)
                for stage in parameter.stages:
                    total += (
                        own_gradient
                        if stage == op.stage
                        else arrived[Value("shared", stage, part=part)].view_as(own_gradient)
                    )
                own_gradient.copy_(total)
        return self.update(op, reads)

    def _gradient(self, part: int) -> Tensor:
        gradient = self.compute.model.shared[self.shared[part].name].grad
        assert gradient is not None
        return gradient
