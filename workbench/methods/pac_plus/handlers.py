"""What each operation kind of PAC+ does on one rank: the runtime's dispatch table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.schedule import Op
from workbench.methods.pac_plus.cached_batches import CachedBatches
from workbench.methods.pac_plus.compute import SideContext
from workbench.methods.training.handlers import StepHandlers, joined, named
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.executor import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusHandlers(StepHandlers):
    """One step's operations on one rank (see StepHandlers): of the first epoch F, SF, SB, of later ones LOAD, SF, SB.

    tape: where F puts the taps for later epochs; None caches nothing.  cache: from which LOAD takes them.
    """

    tape: ActivationCache | None = None
    cache: CachedBatches | None = None

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return self.common() | {"F": self._forward, "LOAD": self._load, "SF": self._side_forward, "SB": self._side_backward}

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        batch, hidden = self.batches[op.microbatch], joined(op, reads, "act")
        source = batch.input_ids if hidden is None else hidden
        output, taps = self.compute.backbone_forward(source, batch.attention_mask, batch.decoder_ids)
        if self.tape is not None:
            self.tape.write_batch(batch.indices, taps)
        return self.written(op, output, tap=taps)

    def _load(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self.cache is not None
        batch = self.batches[op.microbatch]
        return (self.cache.batch(batch.indices, batch.attention_mask.shape[1]),) * len(op.writes)

    def _side_forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        mask, taps = self.batches[op.microbatch].attention_mask, named(op, reads, "tap")[0]
        return self.forwarded(op, self.compute.side_forward(joined(op, reads, "side"), taps, mask, self.targets(op)))

    def _side_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        context: SideContext = named(op, reads, "ctx")[0]
        return self.written(op, self.compute.side_backward(context, joined(op, reads, "sgrad")), gacc=None)
