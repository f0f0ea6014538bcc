"""Profile every layer of a model: seconds by kind of operation, and bytes (PAC+, section V-A, 'Profiling').

Each stack (encoder and decoder separately) consists of equal layers, of which the first also has the embedding and the
last the head.  So three layers of a stack are timed, the first, the second and the last, and the second stands for all
between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.core.profile import Bytes, LayerProfile, Layers
from workbench.profiler.grids import time_grids
from workbench.profiler.timing import Maker

BUDGET_S, UPDATE_BUDGET_S = 4.0, 0.5


class Span(NamedTuple):
    """Layers [start, stop)."""

    start: int
    stop: int


class Stacks:
    """The stacks of a model.

    num_encoder_layers: None for a single stack.

    stacks: spans of the whole stacks.  spans: all spans that are measured, each of one layer.
    """

    def __init__(self, num_layers: int, num_encoder_layers: int | None) -> None:
        cuts = (0, num_layers) if num_encoder_layers is None else (0, num_encoder_layers, num_layers)
        self.num_layers = num_layers
        self.stacks = tuple(Span(start, stop) for start, stop in itertools.pairwise(cuts))
        self.spans = tuple(dict.fromkeys(map(self.span_of, range(num_layers))))

    def span_of(self, layer: int) -> Span:
        """Return the measured layer that stands for a layer."""
        start, stop = next(stack for stack in self.stacks if layer < stack.stop)
        measured = layer if layer in (start, stop - 1) else start + 1
        return Span(measured, measured + 1)

    def inner(self, span: Span) -> Span:
        """Return the measured layer between the ends of a span's stack: the second, or the first of two."""
        start, stop = next(stack for stack in self.stacks if span.start < stack.stop)
        inner = start + 1 if stop - start > 2 else start
        return Span(inner, inner + 1)


def kept_bytes(measure_bytes: Callable[[int], int], batch: int, *, length: int, other: int, has_decoder: bool) -> Bytes:
    """Return the bytes that a backward pass needs of its forward pass.

    measure_bytes(length): bytes for `batch` samples of a length.  length: the length that counts.  other: a second
    length; for an encoder-decoder it shows the part that does not grow with the length.
    """
    own_bytes = measure_bytes(length)
    if not has_decoder or other < 1:
        return Bytes(own_bytes // (batch * length))
    per_token = (measure_bytes(other) - own_bytes) // (batch * (other - length))
    return Bytes(per_token, max(0, own_bytes // batch - per_token * length))


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

    def context_bytes(self) -> Bytes:
        """Return the bytes that the backward pass needs of the forward pass."""


def profile_layers(
    stacks: Stacks,
    benches: Mapping[Span, Bench],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    layer_bytes: Callable[[int], Mapping[str, Any]],
    prepared: Mapping[str, str] | None = None,
    shared: Mapping[str, Maker] | None = None,
    update: Mapping[str, Maker] | None = None,
    update_counts: Sequence[int] = (1,),
) -> Layers:
    """Return the profile of every layer on one core of this host at full speed.  All calls are timed in turn.

    benches: one for each of `stacks.spans`.  layer_bytes: returns a measured layer's fields of LayerProfile in bytes,
    except those of the context.
    prepared: the kinds whose preparation is an operation of another kind, which is timed with them.
    shared: calls for all layers together; each layer gets an equal part.
    update: calls that update the weights of the measured layers together, for `update_counts`; each layer gets a part
    by its trained bytes.
    """
    pairs = prepared or {}
    kinds = (*benches[stacks.spans[0]].calls, *pairs.values())
    calls = {f"{span} {kind}": maker for span in stacks.spans for kind, maker in benches[span].calls.items()}
    pairs_of_spans = {f"{span} {kind}": f"{span} {other}" for span in stacks.spans for kind, other in pairs.items()}
    like = {
        f"{span} {kind}": f"{inner} {kind}"
        for span in stacks.spans
        if (inner := stacks.inner(span)) != span
        for kind in kinds
    }
    timed = calls | dict(shared or {})
    grids = time_grids(timed, batch_sizes, lengths, like=like, prepared=pairs_of_spans, budget_s=budget_s)
    updates = time_grids(update, update_counts, (1,), budget_s=UPDATE_BUDGET_S) if update else {}
    contexts = {span: benches[span].context_bytes() for span in stacks.spans}
    sizes = {span: layer_bytes(span.start) for span in stacks.spans}
    trainable_bytes = sum(fields["trainable_bytes"] for fields in sizes.values())
    profiles = []
    for layer in range(stacks.num_layers):
        fields = sizes[span := stacks.span_of(layer)]
        times = {kind: grids[f"{span} {kind}"] for kind in kinds}
        times |= {kind: grids[kind].scaled(1 / stacks.num_layers) for kind in shared or ()}
        times |= {kind: grid.scaled(fields["trainable_bytes"] / trainable_bytes) for kind, grid in updates.items()}
        profiles.append(LayerProfile(name=f"layer {layer}", times=times, context_bytes=contexts[span], **fields))
    return tuple(profiles)
