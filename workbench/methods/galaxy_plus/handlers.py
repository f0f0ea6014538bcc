"""The operations of an inference schedule on one rank: the runtime's dispatch table (Galaxy+, section III-B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.core.schedule import ALLREDUCE, BROADCAST, Op
from workbench.models.sharding import ModelShard
from workbench.models.sharding.held import What
from workbench.models.sharding.run import Run, Step
from workbench.runtime.executor import Handler
from workbench.schedules.inference import InferenceLayout

Contents = tuple[Any, ...]


class InferenceHandlers:
    """One request's operations on one rank; with `step` (and without `run`), those of one further token.

    what: the result that HEAD returns.  A value that covers several tiles is one tensor, with the tiles in token order.  If one operation
    writes several values for the next one on this rank (`ctx`), the first contains all.
    """

    def __init__(
        self, shard: ModelShard, layout: InferenceLayout, run: Run | None, *, what: What = "hidden", step: Step | None = None
    ) -> None:
        self._shard, self._layout, self._whole, self._what, self._step = shard, layout, run, what, step
        self._is_sequence = layout.plan.paradigm == "sequence"

    @property
    def _run(self) -> Run:
        assert self._whole is not None, "a single token's operations ask for no run"
        return self._whole

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        table: dict[str, Handler] = {
            "EMB": self._embed,
            "ENTER": self._enter,
            "QKV": self._query_key_value,
            "ATT": self._attend,
            "CQ": lambda op, reads: (self._shard.qkv(op.stage, _joined(reads)),),
            "CKV": lambda op, reads: (self._shard.cross_keys_values(op.stage, _joined(reads)),),
            "CATT": self._cross_attend,
            "OUT": self._leave,
            "COUT": self._leave,
            "UP": lambda op, reads: (self._shard.up(op.stage, _joined(reads)),),
            "DOWN": lambda op, reads: self._split(op, self._shard.down(op.stage, reads[0])),
            "ADD": lambda op, reads: (reads[1].add_(reads[0]),),
            "CONN": self._connect,
            "LAYER": self._layer,
            "HEAD": lambda op, reads: (self._shard.head(_joined(reads), self._what),),
            ALLREDUCE: self._term,
            BROADCAST: self._wide,
        }
        return table if self._step is None else table | self._token_table(self._step)

    def _token_table(self, step: Step) -> dict[str, Handler]:
        """Return the handlers of a single token: `ModelShard.decode` runs a whole block at the block's last operation."""

        def passed_on(op: Op, reads: Contents) -> Contents:
            return (reads[0],) * len(op.writes)

        def decode(op: Op, reads: Contents) -> Contents:
            return (self._shard.decode(op.stage, reads[0], step),)

        def layer(op: Op, reads: Contents) -> Contents:
            return (self._shard.layer_step(op.stage, reads[0], step),)

        return {
            "EMB": lambda op, reads: (self._shard.embed_step(reads[0], step),) * len(op.writes),
            **dict.fromkeys(("QKV", "ATT", "CQ", "CATT", "UP"), passed_on),
            **dict.fromkeys(("OUT", "COUT", "DOWN"), decode),
            "LAYER": layer,
        }

    def _embed(self, op: Op, reads: Contents) -> Contents:
        stack = self._layout.blocks[op.stage].stack
        return self._split(op, self._shard.embed(stack, reads[0]))

    def _enter(self, op: Op, reads: Contents) -> Contents:
        hidden = self._shard.enter(self._layout.blocks[op.stage].stack, reads[0])
        return (hidden, reads[0])[: len(op.writes)]

    def _query_key_value(self, op: Op, reads: Contents) -> Contents:
        projected = self._shard.qkv(op.stage, _joined(reads))
        return (projected, self._shard.keys_values(op.stage, projected)) if self._is_sequence else (projected,)

    def _attend(self, op: Op, reads: Contents) -> Contents:
        start, stop = self._layout.span(op)
        if self._is_sequence:
            return (self._shard.attend_own(op.stage, reads[0], reads[1:], self._run, start),)
        whole = self._shard.attend(op.stage, reads, self._run, start, stop)
        return (whole, *(None for _ in op.writes[1:]))

    def _cross_attend(self, op: Op, reads: Contents) -> Contents:
        whole = self._shard.cross_attend(op.stage, reads[:1], reads[1:], self._run)
        return (whole, *(None for _ in op.writes[1:]))

    def _leave(self, op: Op, reads: Contents) -> Contents:
        return self._split(op, self._shard.out(op.stage, reads[0]))

    def _connect(self, op: Op, reads: Contents) -> Contents:
        total = reads[0] if len(reads) == 2 else torch.add(*reads[:-1]) if len(reads) == 3 else torch.stack(reads[:-1]).sum(0)
        residual, hidden = self._shard.connect(op.stage, total, reads[-1])
        return (hidden, residual)[: len(op.writes)]

    def _layer(self, op: Op, reads: Contents) -> Contents:
        return (self._shard.layer(op.stage, reads[0], self._run, reads[1] if len(reads) > 1 else None),)

    def _term(self, op: Op, reads: Contents) -> Contents:
        """Return the tensor to sum in place; a rank that computed nothing adds nothing."""
        return (reads[0].contiguous() if reads else self._empty(op).zero_(),)

    def _wide(self, op: Op, reads: Contents) -> Contents:
        return (reads[0].contiguous() if reads else self._empty(op),)

    def _empty(self, op: Op) -> Tensor:
        stack = self._layout.blocks[op.stage].stack
        return torch.empty(1, self._layout.lengths[stack], self._layout.stacks[stack].hidden_size)

    def _split(self, op: Op, whole: Tensor) -> Contents:
        """Return a tensor split into the tiles that the operation writes."""
        if len(op.writes) == 1:
            return (whole,)
        tiles = self._layout.tiles[self._layout.blocks[op.stage].stack]
        return whole.split([tiles[value.part].tokens for value in op.writes], dim=1)


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tuple(tiles), dim=1)
