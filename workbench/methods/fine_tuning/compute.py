"""The layers of one pipeline stage, trained through the backbone: forward, backward, and layer by layer again."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from torch import Tensor
from torch.nn.functional import pad

from workbench.methods.training.handlers import StageContext, Targets
from workbench.models.parallel_adapter import answered
from workbench.models.recomputation import LayerInput, SingleLayers
from workbench.models.techniques import TechniqueStage


class StageCompute:
    """The layers of one pipeline stage.

    folder: where `first_pass` stores activations; None: they are computed again.
    """

    folder: Path | None = None

    def __init__(self, model: TechniqueStage) -> None:
        self.model = model

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None) -> StageContext:
        """Run the layers; with `targets` (last stage) also head and loss (sum over samples divided by the mini-batch's
        samples).

        hidden_or_ids: (n, t, d) float, or (n, t) int64 in the first stage.  attention_mask: (n, t).
        """
        is_first = self.model.backbone.start == 0
        source = hidden_or_ids if is_first else hidden_or_ids.detach().requires_grad_()
        output, last_hidden = self.model(source, attention_mask)
        if targets is not None:
            output = self.loss(last_hidden, attention_mask, targets)
        return StageContext(None if is_first else source, output)

    def first_pass(
        self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None, *, keeps_last: bool
    ) -> tuple[Tensor, list[LayerInput], StageContext | None]:
        """Run the layers as `forward` does, but keep only their inputs (see schedules.recomputation).

        Returns the output or the loss; the inputs; and if `keeps_last` the last layer's context, instead of its input.
        """
        loss = None if targets is None else (lambda last_hidden: self.loss(last_hidden, attention_mask, targets))
        output, inputs, last = self._layers.first_pass(
            hidden_or_ids, attention_mask, loss, keeps_last=keeps_last, folder=self.folder
        )
        return output, inputs, None if last is None else StageContext(*last)

    def again(self, layer: int, given: LayerInput, attention_mask: Tensor) -> StageContext:
        """Compute one layer's activations again, or read them, for its backward pass."""
        self._layers.again(layer, given, attention_mask)
        return StageContext(given.leaf, given.output)

    @cached_property
    def _layers(self) -> SingleLayers:
        return SingleLayers(self.model)

    def loss(self, last_hidden: Tensor, attention_mask: Tensor, targets: Targets) -> Tensor:
        """Return the loss of the last layer's output (see forward)."""
        rows = answered(targets.labels, self.model.config.kind)
        logits = self.model.logits(last_hidden, attention_mask, targets.sample_ids, targets.epoch, rows)
        return targets.loss(logits, self.model.config)

    def backward(self, context: StageContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return the gradient of the stage's input, (n, t, d), None in
        the first stage.

        With Parallel Adapters both gradients are (n, t, d
        r), those of the side network's state only.
        """
        config = self.model.config
        if config.side_width and gradient is not None:
            gradient = pad(gradient, (config.hidden_size, 0))
        input_gradient = context.backward(gradient)
        return (
            input_gradient[..., config.hidden_size :].contiguous()
            if config.side_width and input_gradient is not None
            else input_gradient
        )
