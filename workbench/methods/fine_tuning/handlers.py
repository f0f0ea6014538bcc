"""What each operation kind does on one rank: the runtime's dispatch table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.profile import LayerProfile
from workbench.core.schedule import ALLREDUCE, Op, Value
from workbench.methods.common.layers import context_bytes
from workbench.methods.fine_tuning.compute import StageCompute, StageContext, Targets
from workbench.methods.fine_tuning.layout import SharedParameter
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules.backpropagation import SHARE
from workbench.schedules.pieces import StepLayout
from workbench.tasks.tokenize import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpropagationHandlers:
    """One step's operations on one rank.  batches[m]: the whole micro-batch m.  layers: the stage's, for what is not measured."""

    rank: int
    layout: StepLayout
    shared: tuple[SharedParameter, ...]
    batches: Sequence[Batch]
    compute: StageCompute
    optimizer: FlatAdamW
    epoch: int
    layers: tuple[LayerProfile, ...] = ()

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {
            "F": self._forward,
            "B": self._backward,
            ALLREDUCE: lambda op, reads: (self.optimizer.gradients,),
            SHARE: lambda op, reads: (self._gradient(op.part).reshape(-1).clone(),),  # a clone: it is sent while STEP goes on
            "STEP": self._update,
        }

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        first, end = self.layout.samples(self.rank, op.microbatch)
        batch = self.batches[op.microbatch]
        pieces = _named(op, reads, "act")
        source = torch.cat(pieces) if pieces else batch.input_ids[first:end]
        is_last = op.stage == len(self.layout.plan.stages) - 1
        targets = (
            Targets(labels=batch.labels[first:end], sample_ids=batch.sample_ids[first:end], epoch=self.epoch, total=self.layout.num_samples)
            if is_last
            else None
        )
        context = self.compute.forward(source, batch.attention_mask[first:end], targets)
        context.nbytes = context_bytes(self.layers, end - first, self.layout.lengths[op.microbatch])
        results = {"ctx": context, "loss": context.output.detach()}
        return tuple(
            results[value.name] if value.name in results else self._piece(value, context.output.detach(), first) for value in op.writes
        )

    def _backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        first, _ = self.layout.samples(self.rank, op.microbatch)
        context: StageContext = _named(op, reads, "ctx")[0]
        pieces = _named(op, reads, "grad")
        gradient = self.compute.backward(context, torch.cat(pieces) if pieces else None)
        return tuple(None if value.name == "gacc" else self._piece(value, gradient, first) for value in op.writes)

    def _update(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        arrived = {value: content for value, content in zip(op.reads, reads, strict=True) if value.name == "shared"}
        for part, parameter in enumerate(self.shared):
            if op.stage in parameter.stages:
                own = self._gradient(part)
                # In the order of the stages, on each of them: every copy gets the very same sum.
                total = torch.zeros_like(own)
                for stage in parameter.stages:
                    total += own if stage == op.stage else arrived[Value("shared", stage, part=part)].view_as(own)
                own.copy_(total)
        self.optimizer.step()
        return (None,) * len(op.writes)

    def _gradient(self, part: int) -> Tensor:
        gradient = self.compute.model.shared[self.shared[part].name].grad
        assert gradient is not None
        return gradient

    def _piece(self, value: Value, whole: Tensor | None, first: int) -> Tensor:
        assert whole is not None
        piece = self.layout.piece(value)
        return whole[piece.first - first : piece.end - first]


def _named(op: Op, reads: tuple[Any, ...], name: str) -> list[Any]:
    return [content for value, content in zip(op.reads, reads, strict=True) if value.name == name]
