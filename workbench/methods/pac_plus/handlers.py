"""A PAC+ stage: its computation, the prefetch of taps from the cache, and the handler of each operation (PAC+, IV and
V).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.schedule import Op
from workbench.methods.pac_plus.fast_side import FastContext, FastSide, HeadContext, unsupported
from workbench.methods.training.handlers import StageContext, StepHandlers, Targets, joined, named
from workbench.models.optimization import backpropagate
from workbench.models.parallel_adapter import ParallelAdapterStage, answered
from workbench.models.stack import BackboneStage
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.executor import Contents, Handler


@dataclass(slots=True)
class SideContext(StageContext):
    """Forward results for the side network's backward pass: one autograd graph, or FastSide's buffers.

    hidden: the side input, (n, t, d/r).  fast, head: contexts of layers and head that ran without autograd.
    """

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
        is_fast: bool = True,
    ) -> None:
        """is_fast: use FastSide for the side network, where it supports it, instead of autograd."""
        self._fast = FastSide(adapter) if is_fast and not unsupported(adapter) else None
        self.adapter, self.backbone, self._tap_dtype = adapter, backbone, tap_dtype

    @torch.no_grad()
    def backbone_forward(
        self, hidden_or_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the stage's output (n, t, d) and its taps, (n, t, d) each, in the cache's dtype.

        hidden_or_ids: (n, t, d) float, or (n, t) int64 on the first stage.  attention_mask: (n, t).
        decoder_ids: (n, target_length) of an encoder-decoder's targets; after its encoder t counts both (see
        BackboneStage).
        """
        assert self.backbone is not None, "the backbone was released"
        output, taps = self.backbone(hidden_or_ids, attention_mask, decoder_ids)
        return output, [tap.to(self._tap_dtype) for tap in taps]

    def side_forward(
        self, side: Tensor | None, taps: Sequence[Tensor], attention_mask: Tensor, targets: Targets | None
    ) -> SideContext:
        """Run the side network; with `targets` (last stage) also head and loss (sum over samples divided by the
        mini-batch's samples).

        side: (n, t, d/r), None on the first stage.  taps: (n, t, d) each, as cached, or (tokens, d) if `packs`.
        """
        if self._fast is not None:
            return self._fast_forward(self._fast, side, taps, attention_mask, targets)
        side_input = None if side is None else side.detach().requires_grad_()
        output = self.adapter(side_input, taps, attention_mask)
        if targets is None:
            return SideContext(side_input, output)
        rows = answered(targets.labels, self.adapter.config.kind)
        logits = self.adapter.head(output, taps[-1], attention_mask, targets.sample_ids, targets.epoch, rows)
        return SideContext(side_input, targets.loss(logits, self.adapter.config))

    def side_backward(self, context: SideContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the adapter's gradients; return the gradient of the side input, (n, t, d/r), None on the first
        stage.
        """
        if self._fast is not None and context.fast is not None:
            return self._fast_backward(self._fast, context.fast, context, gradient)
        return context.backward(gradient)

    @property
    def packs(self) -> bool:
        """Return whether side_forward accepts taps without padding."""
        return self._fast is not None

    def _fast_forward(
        self,
        fast: FastSide,
        side: Tensor | None,
        taps: Sequence[Tensor],
        attention_mask: Tensor,
        targets: Targets | None,
    ) -> SideContext:
        packing = fast.packing(attention_mask)
        packed = [packing.pack(tap) if tap.ndim == 3 else tap for tap in taps]
        output, fast_context = fast.forward(None if side is None else packing.pack(side), packed, packing)
        if targets is None:
            return SideContext(None, packing.unpack(output), fast=fast_context)
        logits, head = fast.head(output, packed[-1], packing, targets.sample_ids, targets.epoch)
        return SideContext(None, targets.loss(logits, self.adapter.config), fast=fast_context, head=head)

    def _fast_backward(
        self, fast: FastSide, fast_context: FastContext, context: SideContext, gradient: Tensor | None
    ) -> Tensor | None:
        if context.head is not None:
            backpropagate(context.output, gradient)
            packed = fast.head_backward(context.head)
        else:
            assert gradient is not None
            packed = fast_context.packing.pack(gradient)
        returned = fast.backward(fast_context, packed)
        return None if returned is None else fast_context.packing.unpack(returned)


READ_AHEAD = 2
"""Maximum number of prefetched batches: one would be enough if all loads took the same time."""


class CachedBatches:
    """Returns each step's taps on request, read from the cache in a thread ahead of the requests; use it as a context
    manager.

    It hides disk latency, and copies if a core is free.  An emulated device prefetches nothing: its one core has its
    own pace.
    steps: (samples, padded length) of every step that loads, in order.  The taps of a step stay valid until the next
    request.
    depth: number of steps to prefetch, 0 to read on request.  packs: without padding, (tokens, width) each, as FastSide
    reads them.
    """

    def __init__(
        self,
        cache: ActivationCache,
        steps: Sequence[tuple[Sequence[int], int]],
        *,
        depth: int = READ_AHEAD,
        packs: bool = False,
    ) -> None:
        self._cache, self._steps, self._depth, self._packs = cache, steps, depth, packs
        self._num_taken, self._ahead = 0, iter(range(len(steps)))
        self._pool = ThreadPoolExecutor(1, "read-ahead") if depth > 0 and steps else None
        self._waiting: deque[Future[list[Tensor]]] = deque()
        size = max((cache.manifest.batch_bytes(len(samples), length) for samples, length in steps), default=0)
        # Allocated once: in every step, new pages for megabytes would cost as much as filling them.
        self._buffers = [
            torch.empty(size, dtype=torch.uint8) for _ in range(depth + 1)
        ]  # of the waiting steps, and of the one taken

    def __enter__(self) -> CachedBatches:
        for _ in range(self._depth):
            self._submit()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._buffers.clear()  # now: who reads the steps keeps this object

    def batch(self, samples: Sequence[int], padded_length: int) -> list[Tensor]:
        """Return the taps of the next step, which must be this one; wait for them if necessary.  Raises what reading
        them raised.
        """
        step = self._num_taken
        expected, length = self._steps[step]
        assert list(samples) == list(expected) and padded_length == length, (
            "steps must ask in the order that was announced"
        )
        self._num_taken += 1
        if self._pool is None:
            return self._load(step)
        self._submit()
        return self._waiting.popleft().result()

    def _submit(self) -> None:
        if self._pool is not None and (step := next(self._ahead, None)) is not None:
            self._waiting.append(self._pool.submit(self._load, step))

    def _load(self, step: int) -> list[Tensor]:
        samples, padded_length = self._steps[step]
        return self._cache.batch(
            samples, None if self._packs else padded_length, self._buffers[step % len(self._buffers)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusHandlers(StepHandlers):
    """One step's operations on one rank (see StepHandlers): F, SF, SB in the first epoch, LOAD, SF, SB in later ones.

    tape: where F stores the taps for later epochs; None caches nothing.  cache: where LOAD reads them.
    """

    tape: ActivationCache | None = None
    cache: CachedBatches | None = None

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return self.common() | {
            "F": self._forward,
            "LOAD": self._load,
            "SF": self._side_forward,
            "SB": self._side_backward,
        }

    def _forward(self, op: Op, reads: Contents) -> Contents:
        batch, hidden = self.batches[op.microbatch], joined(op, reads, "act")
        source = batch.input_ids if hidden is None else hidden
        output, taps = self.compute.backbone_forward(source, batch.attention_mask, batch.decoder_ids)
        if self.tape is not None:
            self.tape.write_batch(batch.indices, taps)
        return self.written(op, output, tap=taps)

    def _load(self, op: Op, reads: Contents) -> Contents:
        assert self.cache is not None
        batch = self.batches[op.microbatch]
        return (self.cache.batch(batch.indices, batch.attention_mask.shape[1]),) * len(op.writes)

    def _side_forward(self, op: Op, reads: Contents) -> Contents:
        mask, taps = self.batches[op.microbatch].attention_mask, named(op, reads, "tap")[0]
        return self.forwarded(op, self.compute.side_forward(joined(op, reads, "side"), taps, mask, self.targets(op)))

    def _side_backward(self, op: Op, reads: Contents) -> Contents:
        context: SideContext = named(op, reads, "ctx")[0]
        return self.written(op, self.compute.side_backward(context, joined(op, reads, "sgrad")), gacc=None)
