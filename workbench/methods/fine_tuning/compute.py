"""What one rank computes: forward and backward through its layers (PAC+, section II).

The profiler measures exactly these calls, and the runtime runs exactly these calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.methods.training.handlers import Targets
from workbench.models.parallel_adapter import task_loss
from workbench.models.techniques import TechniqueStage


@dataclass(slots=True)
class StageContext:
    """What the backward pass needs of the forward pass: one autograd graph.

    hidden: the stage's input (n, t, d), a leaf; None in the first stage.  output: the stage's, or the loss in the last.
    nbytes: as profiled, because autograd does not tell.
    """

    hidden: Tensor | None
    output: Tensor
    nbytes: int = 0


class StageCompute:
    """The layers of one pipeline stage."""

    def __init__(self, model: TechniqueStage) -> None:
        self.model = model

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None) -> StageContext:
        """Run the layers; with `targets` (last stage) also head and loss, the sum over samples divided by the mini-batch's.

        hidden_or_ids: (n, t, d) float, or (n, t) int64 in the first stage.  attention_mask: (n, t).
        """
        is_first = self.model.backbone.start == 0
        source = hidden_or_ids if is_first else hidden_or_ids.detach().requires_grad_()
        output, last_hidden = self.model(source, attention_mask)
        if targets is not None:
            logits = self.model.logits(last_hidden, attention_mask, targets.sample_ids, targets.epoch)
            config = self.model.config
            output = task_loss(logits, targets.labels, config.kind, reduction="sum", label_std=config.label_std) / targets.total
        return StageContext(None if is_first else source, output)

    def backward(self, context: StageContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return that of the stage's input, (n, t, d), None in the first stage."""
        torch.autograd.backward(context.output, gradient)
        return None if context.hidden is None else context.hidden.grad
