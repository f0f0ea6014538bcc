"""What one rank of PAC+ computes: backbone forward, side network forward and backward (section IV-A, Fig. 5c).

The profiler measures exactly these calls, and the runtime runs exactly these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.parallel_adapter import ParallelAdapterStage, task_loss
from workbench.models.stack import BackboneStage


@dataclass(slots=True)
class SideContext:
    """What the side network's backward pass needs of its forward pass: one autograd graph.

    side_input: (n, t, d/r) leaf, None on the first stage.  output: side output, or the loss on the last stage.
    nbytes: as profiled, because autograd does not tell.
    """

    side_input: Tensor | None
    output: Tensor
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The last stage's view of some samples.  labels: (n,).  sample_ids: (n,), for the dropout.  total: the mini-batch's samples."""

    labels: Tensor
    sample_ids: Tensor
    epoch: int
    total: int


class StageCompute:
    """The layers of one pipeline stage, or, for cached epochs, the whole adapter without a backbone."""

    def __init__(
        self,
        adapter: ParallelAdapterStage,
        backbone: BackboneStage | None,
        *,
        tap_dtype: torch.dtype,
        hidden_dtype: torch.dtype = torch.float32,
    ) -> None:
        """hidden_dtype: in which the backbone computes (section IV-D) and its output travels."""
        self.adapter, self.backbone, self._tap_dtype, self.hidden_dtype = adapter, backbone, tap_dtype, hidden_dtype

    @torch.no_grad()
    def backbone_forward(
        self, hidden_or_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the stage's output (n, t, d) and its taps, (n, t, d) each, in the cache's type.

        hidden_or_ids: (n, t, d) float, or (n, t) int64 on the first stage.  attention_mask: (n, t).
        decoder_ids: (n, target_length) of an encoder-decoder's targets; behind its encoder t counts both (see BackboneStage).
        """
        assert self.backbone is not None, "the backbone was released"
        output, taps = self.backbone(hidden_or_ids, attention_mask, decoder_ids)
        return output, [tap.to(self._tap_dtype) for tap in taps]

    def side_forward(self, side: Tensor | None, taps: Sequence[Tensor], attention_mask: Tensor, targets: Targets | None) -> SideContext:
        """Run the side network; with `targets` (last stage) also head and loss, the sum over samples divided by the mini-batch's.

        side: (n, t, d/r), None on the first stage.  taps: (n, t, d) each, as cached.
        """
        side_input = None if side is None else side.detach().requires_grad_()
        output = self.adapter(side_input, taps, attention_mask)
        if targets is None:
            return SideContext(side_input, output)
        logits = self.adapter.head(output, taps[-1], attention_mask, targets.sample_ids, targets.epoch)
        loss = task_loss(logits, targets.labels, self.adapter.config.kind, reduction="sum") / targets.total
        return SideContext(side_input, loss)

    def side_backward(self, context: SideContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the adapter's gradients; return that of the side input, (n, t, d/r), None on the first stage."""
        torch.autograd.backward(context.output, gradient)
        return None if context.side_input is None else context.side_input.grad
