"""What each operation kind of PAC+ does on one rank: the runtime's dispatch table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.profile import LayerProfile
from workbench.core.schedule import ALLREDUCE, Op, Value
from workbench.methods.common.layers import context_bytes
from workbench.methods.common.targets import Targets
from workbench.methods.pac_plus.cached_batches import CachedBatches
from workbench.methods.pac_plus.compute import SideContext, StageCompute
from workbench.methods.pac_plus.programs import CachedStep
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules.pieces import StepLayout
from workbench.tasks.tokenize import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridHandlers:
    """The first epoch's operations for one step on one rank.

    batches[m]: the whole micro-batch m.  samples[m]: its samples by position in the split.  layers: the stage's, for what is not measured.
    tape: where the taps go for the later epochs; None caches nothing.
    """

    rank: int
    layout: StepLayout
    batches: Sequence[Batch]
    samples: Sequence[Sequence[int]]
    compute: StageCompute
    optimizer: FlatAdamW
    tape: ActivationCache | None
    epoch: int
    layers: tuple[LayerProfile, ...] = ()

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {
            "F": self._forward,
            "SF": self._side_forward,
            "SB": self._side_backward,
            ALLREDUCE: lambda op, reads: (self.optimizer.gradients,),
            "STEP": self._update,
        }

    def _mask(self, microbatch: int) -> Tensor:
        first, end = self.layout.samples(self.rank, microbatch)
        return self.batches[microbatch].attention_mask[first:end]

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        first, end = self.layout.samples(self.rank, op.microbatch)
        pieces = _named(op, reads, "act")
        batch = self.batches[op.microbatch]
        source = torch.cat(pieces) if pieces else batch.input_ids[first:end]
        decoder_ids = None if batch.decoder_ids is None else batch.decoder_ids[first:end]
        output, taps = self.compute.backbone_forward(source, self._mask(op.microbatch), decoder_ids)
        if self.tape is not None:
            self.tape.write_batch(self.samples[op.microbatch][first:end], taps)
        return tuple(taps if value.name == "tap" else self._piece(value, value.stage, output, first) for value in op.writes)

    def _side_forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        first, end = self.layout.samples(self.rank, op.microbatch)
        batch = self.batches[op.microbatch]
        pieces = _named(op, reads, "side")
        last = op.stage == len(self.layout.plan.stages) - 1
        targets = (
            Targets(labels=batch.labels[first:end], sample_ids=batch.sample_ids[first:end], epoch=self.epoch, total=self.layout.num_samples)
            if last
            else None
        )
        context = self.compute.side_forward(
            torch.cat(pieces) if pieces else None, _named(op, reads, "tap")[0], self._mask(op.microbatch), targets
        )
        context.nbytes = context_bytes(self.layers, end - first, self.layout.lengths[op.microbatch])
        results = {"ctx": context, "loss": context.output.detach()}
        return tuple(
            results[value.name] if value.name in results else self._piece(value, value.stage, context.output.detach(), first)
            for value in op.writes
        )

    def _side_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        first, _ = self.layout.samples(self.rank, op.microbatch)
        context: SideContext = _named(op, reads, "ctx")[0]
        pieces = _named(op, reads, "sgrad")
        gradient = self.compute.side_backward(context, torch.cat(pieces) if pieces else None)
        return tuple(None if value.name == "gacc" else self._piece(value, value.stage - 1, gradient, first) for value in op.writes)

    def _update(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self.optimizer.step()
        return (None,) * len(op.writes)

    def _piece(self, value: Value, boundary: int, whole: Tensor | None, first: int) -> Tensor:
        assert whole is not None
        piece = self.layout.pieces(boundary, value.microbatch)[value.part]
        return whole[piece.first - first : piece.end - first]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedHandlers:
    """The later epochs' operations for one step on one rank.  batch: this rank's samples, None if it has none in this step."""

    rank: int
    step: CachedStep
    batch: Batch | None
    samples: Sequence[int]
    compute: StageCompute
    optimizer: FlatAdamW
    cache: CachedBatches
    epoch: int
    layers: tuple[LayerProfile, ...] = ()

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {
            "LOAD": self._load,
            "SF": self._side_forward,
            "SB": self._side_backward,
            ALLREDUCE: lambda op, reads: (self.optimizer.gradients,),
            "STEP": self._update,
        }

    def _load(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self.batch is not None
        return (self.cache.batch(self.samples, self.batch.attention_mask.shape[1]),) * len(op.writes)

    def _side_forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self.batch is not None
        batch = self.batch
        targets = Targets(labels=batch.labels, sample_ids=batch.sample_ids, epoch=self.epoch, total=self.step.num_samples)
        context = self.compute.side_forward(None, _named(op, reads, "tap")[0], batch.attention_mask, targets)
        context.nbytes = context_bytes(self.layers, *batch.attention_mask.shape)
        return tuple(context if value.name == "ctx" else context.output.detach() for value in op.writes)

    def _side_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self.compute.side_backward(_named(op, reads, "ctx")[0], None)
        return (None,) * len(op.writes)

    def _update(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self.optimizer.step()
        return (None,) * len(op.writes)


def _named(op: Op, reads: tuple[Any, ...], name: str) -> list[Any]:
    return [content for value, content in zip(op.reads, reads, strict=True) if value.name == name]
