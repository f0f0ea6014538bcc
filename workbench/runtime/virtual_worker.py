"""Execute HetPipe's operations on one rank with real tensors: weight versions, pushes, merges and pulls (Park et al., USENIX ATC 2020).

Weights are one flat tensor, layer after layer, so that a shard (VirtualWorkers.shards) is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workbench.core.costs import Spec
from workbench.core.schedule import MERGE, PULL, STEP, Op, Schedule, Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.runtime.executor import Handler
from workbench.schedules.hetpipe import PUSH

Call = Callable[..., Tensor]
"""Runs a layer of the stage, counted from 0, with the weights of the operation: call(layer, inputs...)."""
Compute = Callable[[Call, int, Tensor | None], Tensor]
"""What a stage does: (call, batch, what the stage before sent or None) -> what the next one gets; on the last stage the loss."""


class VirtualWorkerStage:
    """The stage of one rank.

    layers: a module for each layer of the stage, all of whose parameters are trained; they keep their first values until `load`.
    step: (weights, gradient) -> new weights, all flat.  boundary: the shape and type of what crosses a boundary, of an act or grad value.
    """

    def __init__(
        self,
        workers: VirtualWorkers,
        rank: int,
        layers: Sequence[nn.Module],
        compute: Compute,
        *,
        step: Callable[[Tensor, Tensor], Tensor],
        boundary: Callable[[Value], Spec],
    ) -> None:
        self._layers, self._compute, self._step, self._boundary = list(layers), compute, step, boundary
        start = next(stage.start for plan in workers.pipelines for stage in plan.stages if rank in stage.ranks)
        ends = [0]
        for layer in self._layers:
            ends.append(ends[-1] + sum(parameter.numel() for parameter in layer.parameters()))
        self._shards = {
            number: slice(ends[shard.start - start], ends[shard.stop - start])
            for number, shard in enumerate(workers.shards())
            if rank in shard.owners
        }
        self._first = torch.cat([parameter.detach().flatten() for layer in self._layers for parameter in layer.parameters()])
        self._wave = torch.zeros_like(self._first)  # own updates since the last push
        self._pushed: dict[int, Tensor] = {}  # own updates of each wave that the last pull did not bring back

    def inputs(self, schedule: Schedule, rank: int) -> dict[Value, Any]:
        """Return the contents of schedule.inputs[rank]."""
        contents: dict[Value, Any] = {}
        for value in schedule.inputs[rank]:
            if value.name == "weight":
                contents[value] = self._first
            else:
                contents[value] = self._first[self._shards[value.stage]].clone() if value.name == "global" else None
        return contents

    def spec(self, value: Value) -> Spec:
        """Return the shape and type of a value that this rank receives."""
        if value.name in ("push", "global"):
            shard = self._shards[value.stage]
            return Spec((shard.stop - shard.start,))
        return self._boundary(value)

    def handlers(self) -> Mapping[str, Handler]:
        """Return the executor's dispatch table."""
        return {"F": self._forward, "B": self._backward, STEP: self._update, PUSH: self._push, MERGE: self._merge, PULL: self._pull}

    def load(self, weights: Tensor) -> None:
        """Set the layers' parameters to a version of the weights."""
        with torch.no_grad():
            for layer, views in zip(self._layers, self._views(weights), strict=True):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(views[name])

    def _views(self, weights: Tensor) -> Iterator[dict[str, Tensor]]:
        at = 0
        for layer in self._layers:
            views = {}
            for name, parameter in layer.named_parameters():
                views[name] = weights[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
            yield views

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        named = _by_name(op, reads)
        weights = named["weight"].detach().requires_grad_()
        source = named["act"].detach().requires_grad_() if "act" in named else None
        views = list(self._views(weights))
        with torch.enable_grad():
            output = self._compute(lambda layer, *inputs: functional_call(self._layers[layer], views[layer], inputs), op.microbatch, source)
        context = (weights, source, output)
        return tuple(context if value.name == "ctx" else output.detach() for value in op.writes)

    def _backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        named = _by_name(op, reads)
        weights, source, output = named["ctx"]
        torch.autograd.backward(output, named.get("grad"))
        return tuple(source.grad if value.name == "grad" else weights.grad for value in op.writes)

    def _update(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        named = _by_name(op, reads)
        weights = self._step(named["weight"], named["gacc"])
        self._wave += weights - named["weight"]
        return (weights,)

    def _push(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self._pushed[op.microbatch] = self._wave
        pushes = tuple(self._wave[self._shards[value.stage]].clone() for value in op.writes)
        self._wave = torch.zeros_like(self._wave)
        return pushes

    def _merge(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.stack(reads).sum(dim=0),)

    def _pull(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the global weights of the waves up to op.microbatch, plus this virtual worker's later updates."""
        self._pushed = {wave: update for wave, update in self._pushed.items() if wave > op.microbatch}
        weights = self._wave.clone()
        for update in self._pushed.values():
            weights += update
        for value, content in zip(op.reads, reads, strict=True):
            if value.name == "global":
                weights[self._shards[value.stage]] += content
        return (weights,)


def _by_name(op: Op, reads: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((value.name for value in op.reads), reads, strict=True))
