"""The programs of a fine-tuning run, a rank's computation (PAC+, section II), and each operation's handler; JAX stages.

A stage's layers may be divided among processors (Confidant, section 3.3; see schedules.tensor.divide_layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.division import Division
from workbench.core.errors import ConfigError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import Op, Schedule, Value
from workbench.core.virtual_workers import VersionRule
from workbench.methods.fine_tuning.prepare import FineTuningOptions
from workbench.methods.training.handlers import StepHandlers, StepShape, Targets, joined, named
from workbench.models.cross_framework import require_jax
from workbench.models.families import FAMILIES, LayerContext, family_of
from workbench.models.layer_parts import LayerParts
from workbench.models.loading import ModelFacts, model_config
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import layer_context
from workbench.models.techniques import TechniqueStage
from workbench.runtime.executor import Handler
from workbench.schedules.hetpipe import asynchronous_1f1b
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import ORDERS, SHARE, OrderName, backpropagation
from workbench.schedules.plan_costs import Crossing, DividedCosts, PlanCosts, StashingCosts
from workbench.schedules.tensor import divide_layers

TARGET_LENGTH = 1
"""Tokens of a decoder: classification and regression need only the first."""
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class WindowShape(StepShape):
    """The shape of a window, whose parts are mini-batches.

    ahead: the parts after it whose forward passes begin in it; none if the pipeline drains.  continues: the window before, if it did not
    drain, as if that one had begun with an empty pipeline.
    """

    ahead: StepShape
    continues: WindowShape | None = None

    @property
    def all_parts(self) -> StepShape:
        """Return the parts of the window and those ahead."""
        return StepShape(sizes=self.sizes + self.ahead.sizes, lengths=self.lengths + self.ahead.lengths)


class SharedParameter(NamedTuple):
    """A parameter with copies on several stages (BackboneStage.shared_parameters).  numel: its values."""

    name: str
    stages: tuple[int, ...]
    numel: int


def shared_parameters(facts: ModelFacts, technique: str, plan: Plan) -> tuple[SharedParameter, ...]:
    """Return the trained parameters that several stages of a plan have: an encoder-decoder's in full fine-tuning, no others."""
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

    facts: None if the model is only simulated.  schedule: the order of the micro-batches; with 'asynchronous_1f1b' a step's parts are
    whole mini-batches, each of which updates the weights.  divisions: by rank, of the devices of an asynchronous pipeline whose processors
    share each layer.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        facts: ModelFacts | None,
        shared: tuple[SharedParameter, ...] = (),
        schedule: OrderName = "1f1b",
        divisions: Mapping[int, Division] | None = None,
        versions: VersionRule = "stashing",
    ) -> None:
        self._versions: VersionRule = versions
        self._profile, self._cluster, self._plan, self._shared = profile, cluster, plan, shared
        self._divisions = divisions or {}
        self._order, self._is_asynchronous = ORDERS.get(schedule), schedule == "asynchronous_1f1b"
        self._crossing = None
        if facts is not None:
            self._crossing = Crossing(
                hidden_size=facts.hidden_size, num_encoder_layers=facts.num_encoder_layers, target_length=TARGET_LENGTH
            )
        self._schedules: dict[tuple[Any, ...], Schedule] = {}

    def step(self, shape: StepShape) -> Program:
        """Return one optimizer step over pipeline stages and device groups, or several without a drain between them."""
        begun, ahead, parts = None, 0, shape
        if isinstance(shape, WindowShape):
            begun = None if shape.continues is None else len(shape.continues.ahead.sizes)
            ahead, parts = len(shape.ahead.sizes), shape.all_parts
        key = shape.sizes, begun, ahead
        if key not in self._schedules:
            self._schedules[key] = insert_transfers(self._schedule(*key))
        costs = PlanCosts(
            self._profile,
            self._cluster,
            self._plan,
            sizes=parts.sizes,
            lengths=parts.lengths,
            shared_bytes=[FP32_BYTES * parameter.numel for parameter in self._shared],
            crossing=self._crossing,
        )
        whole = StashingCosts(costs) if self._is_asynchronous else costs
        chosen = DividedCosts(whole, costs, self._divisions) if self._divisions else whole
        return Program.on(self._cluster, self._schedules[key], chosen)

    def _schedule(self, sizes: tuple[int, ...], begun: int | None, ahead: int) -> Schedule:
        world_size = self._cluster.world_size
        if self._order is None:
            whole = asynchronous_1f1b(self._plan, len(sizes), world_size=world_size, begun=begun, ahead=ahead, versions=self._versions)
            return divide_layers(whole, self._plan, self._divisions)
        stages = [parameter.stages for parameter in self._shared]
        return backpropagation(self._plan, sizes, shared=stages, world_size=world_size, order=self._order)


@dataclass(slots=True)
class StageContext:
    """Forward results for the backward pass: one autograd graph.

    hidden: the stage's input (n, t, d), a leaf; None in the first stage.  output: the stage's, or the loss in the last.
    nbytes: as profiled, because autograd does not report them.
    """

    hidden: Tensor | None
    output: Tensor
    nbytes: int = 0


class StageCompute:
    """The layers of one pipeline stage."""

    def __init__(self, model: TechniqueStage) -> None:
        self.model = model

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None) -> StageContext:
        """Run the layers; with `targets` (last stage) also head and loss (sum over samples divided by the mini-batch's samples).

        hidden_or_ids: (n, t, d) float, or (n, t) int64 in the first stage.  attention_mask: (n, t).
        """
        is_first = self.model.backbone.start == 0
        source = hidden_or_ids if is_first else hidden_or_ids.detach().requires_grad_()
        output, last_hidden = self.model(source, attention_mask)
        if targets is not None:
            output = self.loss(last_hidden, attention_mask, targets)
        return StageContext(None if is_first else source, output)

    def loss(self, last_hidden: Tensor, attention_mask: Tensor, targets: Targets) -> Tensor:
        """Return the loss of the last layer's output (see forward)."""
        logits, config = self.model.logits(last_hidden, attention_mask, targets.sample_ids, targets.epoch), self.model.config
        return task_loss(logits, targets.labels, config.kind, reduction="sum", label_std=config.label_std) / targets.total

    def backward(self, context: StageContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return the gradient of the stage's input, (n, t, d), None in the first stage."""
        torch.autograd.backward(context.output, gradient)
        return None if context.hidden is None else context.hidden.grad


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpropagationHandlers(StepHandlers):
    """One step's operations on one rank (see StepHandlers).  shared: the parameters with copies on several stages."""

    shared: tuple[SharedParameter, ...]

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return self.common() | {
            "F": self._forward,
            "B": self._backward,
            SHARE: lambda op, reads: (self._gradient(op.part).reshape(-1).clone(),),  # cloned, because it is sent during STEP
            "STEP": self._update_shared,
        }

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        batch, hidden = self.batches[op.microbatch], joined(op, reads, "act")
        source = batch.input_ids if hidden is None else hidden
        return self.forwarded(op, self.compute.forward(source, batch.attention_mask, self.targets(op)))

    def _backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        context: StageContext = named(op, reads, "ctx")[0]
        return self.written(op, self.compute.backward(context, joined(op, reads, "grad")), gacc=None)

    def _update_shared(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        arrived = {value: content for value, content in zip(op.reads, reads, strict=True) if value.name == "shared"}
        for part, parameter in enumerate(self.shared):
            if op.stage in parameter.stages:
                own = self._gradient(part)
                # In the order of the stages, on every stage: all copies get exactly the same sum.
                total = torch.zeros_like(own)
                for stage in parameter.stages:
                    total += own if stage == op.stage else arrived[Value("shared", stage, part=part)].view_as(own)
                own.copy_(total)
        return self.update(op, reads)

    def _gradient(self, part: int) -> Tensor:
        gradient = self.compute.model.shared[self.shared[part].name].grad
        assert gradient is not None
        return gradient


JAX_FAMILIES, JAX_TECHNIQUES, JAX_ACTIVATIONS = ("bert", "distilbert"), ("full", "lora"), ("gelu", "gelu_new", "relu")


def require_jax_suits(cluster: Cluster, model: str, options: FineTuningOptions) -> None:
    """Raise ConfigError if a device computes with JAX and JAX does not support the model or its trained parts here."""
    device = next((device.name for device in cluster.devices if device.framework == "jax"), None)
    if device is None:
        return
    config = model_config(model)
    wrong = [
        (config.model_type not in JAX_FAMILIES, f"a model of the family {config.model_type}", " and ".join(JAX_FAMILIES)),
        (options.technique not in JAX_TECHNIQUES, f"technique = '{options.technique}'", " and ".join(JAX_TECHNIQUES)),
        (options.lora_dropout > 0, f"lora_dropout = {options.lora_dropout:g}", "lora_dropout = 0"),
        (options.backbone_dtype != "float32", f"backbone_dtype = '{options.backbone_dtype}'", "float32"),
    ]
    for is_wrong, found, known in wrong:
        if is_wrong:
            raise ConfigError(
                f"Fine-tuning on '{device}', which computes with JAX, was asked for with {found}.",
                f"JAX stages are built for {known}.",
                "Change it, or let the device compute with torch.",
            )
    activation = activation_of(model)
    if activation not in JAX_ACTIVATIONS:
        raise ConfigError(
            f"Fine-tuning of '{model}' on '{device}', which computes with JAX, was asked for.",
            f"Its activation is '{activation}'; JAX stages have {', '.join(JAX_ACTIVATIONS)}.",
            "Choose another model, or let the device compute with torch.",
        )


def activation_of(model: str) -> str:
    """Return the name of the feed-forward network's activation."""
    config = model_config(model)
    return str(getattr(config, family_of(config.model_type).activation))


@dataclass(slots=True)
class JaxContext(StageContext):
    """Forward results for the backward pass.  hidden: the stage's input; in the first stage the embedding's output, with torch's graph.

    last: the last block's output, (n, t, d), a leaf in front of head and loss.  pullbacks: of the blocks.
    """

    last: Tensor | None = None
    pullbacks: list[Any] = field(default_factory=list)


class JaxStageCompute(StageCompute):
    """The layers of one pipeline stage: JAX runs the blocks; torch runs the first stage's embedding, and the last one's head and loss.

    heads: of the attention.  sizes: samples and tokens of the later batches, for which it is compiled before the first.
    """

    def __init__(self, model: TechniqueStage, *, activation: str, heads: int, sizes: Iterable[tuple[int, int]] = ()) -> None:
        require_jax()
        from workbench.models.jax_blocks import JaxBlocks

        super().__init__(model)
        self._blocks = JaxBlocks(model, activation=activation, heads=heads)
        self._blocks.compile(sizes)

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None) -> JaxContext:
        """Run the layers (see StageCompute)."""
        backbone = self.model.backbone
        source = backbone.embed(hidden_or_ids, attention_mask) if backbone.start == 0 else hidden_or_ids
        last, pullbacks = self._blocks.forward(source, attention_mask)
        output = last if targets is None else self.loss(last.requires_grad_(), attention_mask, targets)
        return JaxContext(source, output, last=last, pullbacks=pullbacks)

    def backward(self, context: StageContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return the gradient of the stage's input (see StageCompute)."""
        assert isinstance(context, JaxContext) and context.last is not None and context.hidden is not None
        if gradient is None:
            context.output.backward()
            gradient = context.last.grad
        assert gradient is not None
        gradient = self._blocks.backward(context.pullbacks, gradient)
        if self.model.backbone.start != 0:
            return gradient
        if context.hidden.requires_grad:
            context.hidden.backward(gradient)
        return None


@dataclass(slots=True)
class JoinContext:
    """Forward results for a join's backward pass.  hidden, total: its inputs (n, t, d), leaves of output's graph."""

    hidden: Tensor
    total: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedHandlers(BackpropagationHandlers):
    """One step's operations on one rank, layer by layer.

    parts: of the stage's layers, by number.  contexts: of the mini-batches in their forward pass.
    """

    division: Division
    parts: Mapping[int, LayerParts]
    contexts: dict[int, LayerContext] = field(default_factory=dict)

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        forward = {"BEGIN": self._begin, "ATTN": self._part, "JOIN": self._join, "COLS": self._part, "MLP": self._join, "END": self._end}
        part, join = self._part_backward, self._join_backward
        backward = {"ENDB": self._end_backward, "MLPB": join, "COLSB": part, "JOINB": join, "ATTNB": part, "BEGINB": self._begin_backward}
        return BackpropagationHandlers.table(self) | forward | backward

    def _begin(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        backbone, batch = self.compute.model.backbone, self.batches[op.microbatch]
        hidden = joined(op, reads, "act")
        if hidden is None:
            hidden = backbone.embed(batch.input_ids, batch.attention_mask)
        self.contexts[op.microbatch] = layer_context(backbone.family, backbone.rotary, batch.attention_mask, hidden.detach())
        return hidden.detach(), StageContext(None, hidden)

    def _part(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, layer = reads[0].detach().requires_grad_(), self.parts[op.stage]
        stops = list(accumulate(self.division.groups(op.kind)))
        own = stops[op.part] - self.division.groups(op.kind)[op.part], stops[op.part]
        output = layer.heads(hidden, self.contexts[op.microbatch], *own) if op.kind == "ATTN" else layer.columns(hidden, *own)
        return output.detach(), StageContext(hidden, output)

    def _join(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        layer, hidden, total = self.parts[op.stage], reads[0].detach().requires_grad_(), sum_of(reads[1:]).requires_grad_()
        if op.kind == "JOIN":
            output = layer.join_heads(hidden, total)
        elif self.division.columns:
            output = layer.join_columns(hidden, total)
        else:
            middle = layer.join_heads(hidden, total)
            output = layer.join_columns(middle, layer.columns(middle, 0, layer.num_columns))
        return output.detach(), JoinContext(hidden, total, output)

    def _end(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        backbone, hidden, targets = self.compute.model.backbone, reads[0].detach().requires_grad_(), self.targets(op)
        output = hidden if backbone.final is None else backbone.final(hidden)
        if targets is not None:
            output = self.compute.loss(output, self.batches[op.microbatch].attention_mask, targets)
        del self.contexts[op.microbatch]
        return self.forwarded(op, StageContext(hidden, output))

    def _end_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        context: StageContext = named(op, reads, "ctx")[0]
        return (self.compute.backward(context, joined(op, reads, "grad")),)

    def _join_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        context: JoinContext = reads[0]
        torch.autograd.backward(context.output, sum_of(reads[1:]))
        return context.hidden.grad, *(context.total.grad,) * (len(op.writes) - 1)

    def _part_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.compute.backward(reads[0], reads[1]),)

    def _begin_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        context, gradient = reads[0], sum_of(named(op, reads, "gpart"))
        if context.output.requires_grad:
            torch.autograd.backward(context.output, gradient)
        return self.written(op, gradient, gacc=None)


def sum_of(terms: Any) -> Tensor:
    """Return the sum of tensors (n, t, d) as a new tensor."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def divided_or_whole(division: Division | None, *, compute: Any, **own: Any) -> BackpropagationHandlers:
    """Return the handlers of a stage whose layers processors share as `division` says; None: one processor computes whole layers."""
    if division is None:
        return BackpropagationHandlers(shared=(), compute=compute, **own)
    model = compute.model
    parts = {layer: LayerParts(model, layer) for layer in range(model.backbone.start, model.backbone.stop)}
    return DividedHandlers(shared=(), compute=compute, division=division, parts=parts, **own)
