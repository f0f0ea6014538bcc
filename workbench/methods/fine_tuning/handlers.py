"""What each operation kind of fine-tuning does on one rank: the runtime's dispatch table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.schedule import Op, Value
from workbench.methods.fine_tuning.compute import StageContext
from workbench.methods.fine_tuning.programs import SharedParameter
from workbench.methods.training.handlers import StepHandlers, joined, named
from workbench.runtime.executor import Handler
from workbench.schedules.pipeline import SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpropagationHandlers(StepHandlers):
    """One step's operations on one rank (see StepHandlers).  shared: the parameters of which several stages hold copies."""

    shared: tuple[SharedParameter, ...]

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return self.common() | {
            "F": self._forward,
            "B": self._backward,
            SHARE: lambda op, reads: (self._gradient(op.part).reshape(-1).clone(),),  # a clone: it is sent while STEP goes on
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
                # In the order of the stages, on each of them: every copy gets the very same sum.
                total = torch.zeros_like(own)
                for stage in parameter.stages:
                    total += own if stage == op.stage else arrived[Value("shared", stage, part=part)].view_as(own)
                own.copy_(total)
        return self.update(op, reads)

    def _gradient(self, part: int) -> Tensor:
        gradient = self.compute.model.shared[self.shared[part].name].grad
        assert gradient is not None
        return gradient
