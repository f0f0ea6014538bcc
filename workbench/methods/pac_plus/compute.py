"""What one rank of PAC+ computes: backbone forward, side network forward and backward (section IV-A, Fig. 5c).

The profiler measures exactly these calls, and the runtime runs exactly these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.methods.training.handlers import Targets
from workbench.models.fast_side import FastContext, FastSide, HeadContext, unsupported
from workbench.models.parallel_adapter import ParallelAdapterStage, task_loss
from workbench.models.stack import BackboneStage


@dataclass(slots=True)
class SideContext:
    """What the side network's backward pass needs of its forward pass: one autograd graph, or what FastSide keeps.

    side_input: (n, t, d/r) leaf, None on the first stage.  output: side output, or the loss on the last stage.
    nbytes: as profiled, because autograd does not tell.  fast, head: of layers and head that ran without autograd.
    """

    side_input: Tensor | None
    output: Tensor
    nbytes: int = 0
    fast: FastContext | None = None
    head: HeadContext | None = None


class StageCompute:
    """The layers of one pipeline stage, or, for cached epochs, the whole adapter without a backbone."""

    def __init__(
        self,
        adapter: ParallelAdapterStage,
        backbone: BackboneStage | None,
        *,
        tap_dtype: torch.dtype,
        hidden_dtype: torch.dtype = torch.float32,
        is_fast: bool = True,
    ) -> None:
        """hidden_dtype: in which the backbone computes (section IV-D) and its output travels.

        is_fast: the side network by FastSide, where it has a path for it, instead of autograd.
        """
        self._fast = FastSide(adapter) if is_fast and not unsupported(adapter) else None
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

        side: (n, t, d/r), None on the first stage.  taps: (n, t, d) each, as cached, or (tokens, d) if `packs`.
        """
        if self._fast is not None:
            return self._fast_forward(self._fast, side, taps, attention_mask, targets)
        side_input = None if side is None else side.detach().requires_grad_()
        output = self.adapter(side_input, taps, attention_mask)
        if targets is None:
            return SideContext(side_input, output)
        logits = self.adapter.head(output, taps[-1], attention_mask, targets.sample_ids, targets.epoch)
        loss = self._loss(logits, targets)
        return SideContext(side_input, loss)

    def side_backward(self, context: SideContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the adapter's gradients; return that of the side input, (n, t, d/r), None on the first stage."""
        if self._fast is not None and context.fast is not None:
            return self._fast_backward(self._fast, context.fast, context, gradient)
        torch.autograd.backward(context.output, gradient)
        return None if context.side_input is None else context.side_input.grad

    @property
    def packs(self) -> bool:
        """Return whether side_forward takes taps without padding."""
        return self._fast is not None

    def _loss(self, logits: Tensor, targets: Targets) -> Tensor:
        config = self.adapter.config
        return task_loss(logits, targets.labels, config.kind, reduction="sum", label_std=config.label_std) / targets.total

    def _fast_forward(
        self, fast: FastSide, side: Tensor | None, taps: Sequence[Tensor], attention_mask: Tensor, targets: Targets | None
    ) -> SideContext:
        packing = fast.packing(attention_mask)
        packed = [packing.pack(tap) if tap.ndim == 3 else tap for tap in taps]
        output, own = fast.forward(None if side is None else packing.pack(side), packed, packing)
        if targets is None:
            return SideContext(None, packing.unpack(output), fast=own)
        logits, head = fast.head(output, packed[-1], packing, targets.sample_ids, targets.epoch)
        loss = self._loss(logits, targets)
        return SideContext(None, loss, fast=own, head=head)

    def _fast_backward(self, fast: FastSide, own: FastContext, context: SideContext, gradient: Tensor | None) -> Tensor | None:
        if context.head is not None:
            torch.autograd.backward(context.output, gradient)
            packed = fast.head_backward(context.head)
        else:
            assert gradient is not None
            packed = own.packing.pack(gradient)
        returned = fast.backward(own, packed)
        return None if returned is None else own.packing.unpack(returned)
