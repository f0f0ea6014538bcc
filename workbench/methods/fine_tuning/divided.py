"""The operations of a stage whose layers several processors share (Confidant, section 3.3; see
schedules.tensor.divide_layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor

from workbench.core.schedule import Op
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.training.handlers import StageContext, joined, named
from workbench.models.layer_inputs import Contexts
from workbench.models.optimization import backpropagate
from workbench.models.sharding.trained import TrainedLayer
from workbench.runtime.executor import Contents, Handler
from workbench.schedules.division import Division


@dataclass(slots=True)
class JoinContext:
    """Forward results for a join's backward pass.  hidden, total: its inputs (n, t, d), leaves of output's graph."""

    hidden: Tensor
    total: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedHandlers(BackpropagationHandlers):
    """One step's operations on one rank, layer by layer.

    parts: the stage's layers, by number.  contexts: the contexts of mini-batches during their forward pass.
    """

    division: Division
    parts: Mapping[int, TrainedLayer]
    contexts: dict[int, Contexts] = field(default_factory=dict)

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        forward = {
            "BEGIN": self._begin,
            "ATTN": self._part,
            "JOIN": self._join,
            "COLS": self._part,
            "MLP": self._join,
            "END": self._end,
        }
        join = self._join_backward

        def part(op: Op, reads: Contents) -> Contents:
            return (self.compute.backward(reads[0], reads[1]),)

        backward = {
            "ENDB": self._end_backward,
            "MLPB": join,
            "COLSB": part,
            "JOINB": join,
            "ATTNB": part,
            "BEGINB": self._begin_backward,
        }
        return BackpropagationHandlers.table(self) | forward | backward

    def _begin(self, op: Op, reads: Contents) -> Contents:
        backbone, batch = self.compute.model.backbone, self.batches[op.microbatch]
        hidden = joined(op, reads, "act")
        if hidden is None:
            hidden = backbone.embed(batch.input_ids, batch.attention_mask)
        self.contexts[op.microbatch] = backbone.contexts(batch.attention_mask, hidden.detach())
        return hidden.detach(), StageContext(None, hidden)

    def _part(self, op: Op, reads: Contents) -> Contents:
        hidden, layer = reads[0].detach().requires_grad_(), self.parts[op.stage]
        stops = list(accumulate(self.division.groups(op.kind)))
        span = stops[op.part] - self.division.groups(op.kind)[op.part], stops[op.part]
        output = (
            layer.heads(hidden, self.contexts[op.microbatch], *span)
            if op.kind == "ATTN"
            else layer.columns(hidden, *span)
        )
        return output.detach(), StageContext(hidden, output)

    def _join(self, op: Op, reads: Contents) -> Contents:
        layer, hidden, total = (
            self.parts[op.stage],
            reads[0].detach().requires_grad_(),
            sum_of(reads[1:]).requires_grad_(),
        )
        if op.kind == "JOIN":
            output = layer.join_heads(hidden, total)
        elif self.division.columns:
            output = layer.join_columns(hidden, total)
        else:
            middle = layer.join_heads(hidden, total)
            output = layer.join_columns(middle, layer.columns(middle, 0, layer.num_columns))
        return output.detach(), JoinContext(hidden, total, output)

    def _end(self, op: Op, reads: Contents) -> Contents:
        backbone, hidden, targets = self.compute.model.backbone, reads[0].detach().requires_grad_(), self.targets(op)
        output = hidden if backbone.final is None else backbone.final(hidden)
        if targets is not None:
            output = self.compute.loss(output, self.batches[op.microbatch].attention_mask, targets)
        del self.contexts[op.microbatch]
        return self.forwarded(op, StageContext(hidden, output))

    def _end_backward(self, op: Op, reads: Contents) -> Contents:
        context: StageContext = named(op, reads, "ctx")[0]
        return (self.compute.backward(context, joined(op, reads, "grad")),)

    def _join_backward(self, op: Op, reads: Contents) -> Contents:
        context: JoinContext = reads[0]
        backpropagate(context.output, sum_of(reads[1:]))
        return context.hidden.grad, *(context.total.grad,) * (len(op.writes) - 1)

    def _begin_backward(self, op: Op, reads: Contents) -> Contents:
        context, gradient = reads[0], sum_of(named(op, reads, "gpart"))
        if context.output.requires_grad:
            backpropagate(context.output, gradient)
        return self.written(op, gradient, gacc=None)


def sum_of(terms: Any) -> Tensor:
    """Return the sum of tensors (n, t, d) as a new tensor."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def divided_or_whole(division: Division | None, *, compute: Any, **arguments: Any) -> BackpropagationHandlers:
    """Return the handlers of a stage whose layers processors share as `division` says; None: one processor computes
    whole layers.
    """
    if division is None:
        return BackpropagationHandlers(shared=(), compute=compute, **arguments)
    model = compute.model
    parts = {layer: TrainedLayer(model, layer) for layer in range(model.backbone.start, model.backbone.stop)}
    return DividedHandlers(shared=(), compute=compute, division=division, parts=parts, **arguments)
