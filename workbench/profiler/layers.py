"""Profile every layer of a model: seconds by kind of operation, and bytes (PAC+, section V-A, 'Profiling').

The cost of each layer follows from a stack of equal layers, its first and its last layer.
Each stack (encoder and decoder separately) is measured as a whole, then its first and its last layer.  The layers
between share the remaining time, so that the sum over all layers is the time of the whole stack.  Embeddings and head
count to the first and last layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.core.profile import Grid, LayerProfile, Layers
from workbench.profiler.timing import Maker, time_grids

UPDATE_BUDGET_S = 5.0


class Span(NamedTuple):
    """Layers [start, stop)."""

    start: int
    stop: int


class Stacks:
    """The stacks of a model.

    num_encoder_layers: None for a single stack.

    stacks: spans of the whole stacks.  spans: all spans that are measured.
    """

    def __init__(self, num_layers: int, num_encoder_layers: int | None) -> None:
        cuts = (0, num_layers) if num_encoder_layers is None else (0, num_encoder_layers, num_layers)
        self.num_layers = num_layers
        self.whole = Span(0, num_layers)
        self.stacks = tuple(Span(start, stop) for start, stop in itertools.pairwise(cuts))
        parts = [(stack, Span(stack.start, stack.start + 1), Span(stack.stop - 1, stack.stop)) for stack in self.stacks]
        self.spans = tuple(dict.fromkeys(span for three in parts for span in three))

    def context_bytes(self, measured: Mapping[Span, tuple[int, int]], layer: int) -> dict[str, int]:
        """Return a layer's part of the bytes that spans keep for the backward pass (see kept_bytes), as LayerProfile's
        fields.
        """
        end, parts, between = self._parts(measured, layer)
        per_token, per_sample = end or (max(0, w - f - b) // between for w, f, b in zip(*parts, strict=True))
        return {"context_bytes_per_token": per_token, "context_bytes_per_sample": per_sample}

    def grid(self, grids: Mapping[Span, Grid], layer: int) -> Grid:
        """Return a layer's part of the seconds of spans."""
        end, parts, between = self._parts(grids, layer)
        if end is not None:
            return end
        rows = zip(*(part.seconds for part in parts), strict=True)
        seconds = tuple(
            tuple(max(0.0, (w - f - b) / between) for w, f, b in zip(*cells, strict=True)) for cells in rows
        )
        return replace(parts[0], seconds=seconds)

    def _parts(self, measured: Mapping[Span, Any], layer: int) -> tuple[Any, tuple[Any, Any, Any], int]:
        """Return a layer's own times (None between first and last), those of stack, first and last layer, and the
        number between.
        """
        start, stop = next(stack for stack in self.stacks if layer < stack.stop)
        own_times = measured[Span(layer, layer + 1)] if layer in (start, stop - 1) else None
        return (
            own_times,
            (measured[Span(start, stop)], measured[Span(start, start + 1)], measured[Span(stop - 1, stop)]),
            stop - start - 2,
        )


def kept_bytes(
    measure_bytes: Callable[[int], int], batch: int, *, length: int, other: int, has_decoder: bool
) -> tuple[int, int]:
    """Return the bytes that a backward pass needs of its forward pass: (per token, per sample).

    measure_bytes(length): bytes for `batch` samples of a length.  length: the length that counts.  other: a second
    length; for an encoder-decoder it shows the part that does not grow with the length.
    """
    own_bytes = measure_bytes(length)
    if not has_decoder or other < 1:
        return own_bytes // (batch * length), 0
    per_token = (measure_bytes(other) - own_bytes) // (batch * (other - length))
    return per_token, max(0, own_bytes // batch - per_token * length)


def saved_by_autograd(forward: Callable[[], Any], existing: Iterable[Tensor]) -> tuple[Any, int]:
    """Return the result of a forward pass, and the bytes that autograd keeps for it.

    existing: tensors that exist anyway and do not count.
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in existing}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return result, sum(saved.values())


class Bench(Protocol):
    """The calls of a span of layers on made-up inputs of any size, the same calls as in a run."""

    @property
    def calls(self) -> Mapping[str, Maker]:
        """Return the calls to time, by kind of operation."""

    def context_bytes(self) -> tuple[int, int]:
        """Return the bytes that the backward pass needs of the forward pass: (per token, per sample)."""


def profile_layers(
    stacks: Stacks,
    benches: Mapping[Span, Bench],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    *,
    budget_s: float,
    layer_bytes: Callable[[int], Mapping[str, int]],
    shared: Mapping[str, Maker] | None = None,
    update: Mapping[str, Maker] | None = None,
    update_counts: Sequence[int] = (1,),
) -> Layers:
    """Return the profile of every layer on one core of this host at full speed.  All calls are timed in turn.

    benches: one for each of `stacks.spans`.  layer_bytes: returns a layer's fields of LayerProfile in bytes, except
    those of the context.
    shared: calls for all layers together; each layer gets an equal part.
    update: calls that update the weights of all layers together, for `update_counts`; each layer gets a part by its
    trained bytes.
    """
    calls = {f"{span} {kind}": maker for span in stacks.spans for kind, maker in benches[span].calls.items()} | dict(
        shared or {}
    )
    grids = time_grids(calls, batch_sizes, lengths, budget_s=budget_s)
    updates = time_grids(update, update_counts, (1,), budget_s=UPDATE_BUDGET_S) if update else {}
    contexts = {span: benches[span].context_bytes() for span in stacks.spans}
    sizes = [dict(layer_bytes(layer)) for layer in range(stacks.num_layers)]
    trainable_bytes = sum(fields["trainable_bytes"] for fields in sizes)
    profiles = []
    for layer, fields in enumerate(sizes):
        times = {
            kind: stacks.grid({span: grids[f"{span} {kind}"] for span in stacks.spans}, layer)
            for kind in benches[stacks.spans[0]].calls
        }
        times |= {kind: grids[kind].scaled(1 / stacks.num_layers) for kind in shared or ()}
        times |= {kind: grid.scaled(fields["trainable_bytes"] / trainable_bytes) for kind, grid in updates.items()}
        fields |= stacks.context_bytes(contexts, layer)
        profiles.append(LayerProfile(name=f"layer {layer}", times=times, **fields))
    return tuple(profiles)
