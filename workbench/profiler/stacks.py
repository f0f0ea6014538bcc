"""The cost of every layer, from a whole stack of like layers, its first and its last layer (PAC+, section V-A, 'Profiling').

Each stack (encoder and decoder apart) is measured whole, then its first and its last layer; the layers between share what is left,
so that the sum over all layers is what the whole stack takes. Embeddings and head count to the first and last layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.core.profile import Grid
from workbench.profiler.timing import Call, time_grids

Maker = Callable[[int, int], Call]
"""Returns what to time for (samples, tokens)."""


class Span(NamedTuple):
    """Layers [start, stop)."""

    start: int
    stop: int


class Stacks:
    """The stacks of a model.  num_encoder_layers: None for a single stack.

    stacks: whole.  spans: all that is measured.
    """

    def __init__(self, num_layers: int, num_encoder_layers: int | None) -> None:
        cuts = (0, num_layers) if num_encoder_layers is None else (0, num_encoder_layers, num_layers)
        self.num_layers = num_layers
        self.whole = Span(0, num_layers)
        self.stacks = tuple(Span(start, stop) for start, stop in itertools.pairwise(cuts))
        parts = [(stack, Span(stack.start, stack.start + 1), Span(stack.stop - 1, stack.stop)) for stack in self.stacks]
        self.spans = tuple(dict.fromkeys(span for three in parts for span in three))

    def times(
        self,
        makers: Mapping[Span, Mapping[str, Maker]],
        batch_sizes: Sequence[int],
        lengths: Sequence[int],
        *,
        budget_s: float,
        shared: Mapping[str, Maker] | None = None,
    ) -> list[dict[str, Grid]]:
        """Time all calls in turn and return every layer's seconds by kind.

        makers: of each of `spans`, by kind.  shared: calls of all layers together, each of which gets an equal part.
        """
        calls = {f"{span} {kind}": maker for span, kinds in makers.items() for kind, maker in kinds.items()}
        grids = time_grids(calls | dict(shared or {}), batch_sizes, lengths, budget_s=budget_s)
        kinds = makers[self.spans[0]]
        return [
            {kind: self._grid({span: grids[f"{span} {kind}"] for span in self.spans}, layer) for kind in kinds}
            | {kind: grids[kind].scaled(1 / self.num_layers) for kind in shared or ()}
            for layer in range(self.num_layers)
        ]

    def context_bytes(self, measured: Mapping[Span, tuple[int, int]], layer: int) -> dict[str, int]:
        """Return a layer's part of what spans keep for the backward pass (see kept_bytes), as LayerProfile's fields."""
        end, parts, between = self._parts(measured, layer)
        per_token, per_sample = end or (max(0, w - f - b) // between for w, f, b in zip(*parts, strict=True))
        return {"context_bytes_per_token": per_token, "context_bytes_per_sample": per_sample}

    def _grid(self, grids: Mapping[Span, Grid], layer: int) -> Grid:
        end, parts, between = self._parts(grids, layer)
        if end is not None:
            return end
        rows = zip(*(part.seconds for part in parts), strict=True)
        seconds = tuple(tuple(max(0.0, (w - f - b) / between) for w, f, b in zip(*cells, strict=True)) for cells in rows)
        return replace(parts[0], seconds=seconds)

    def _parts(self, measured: Mapping[Span, Any], layer: int) -> tuple[Any, tuple[Any, Any, Any], int]:
        """Return a first or last layer's own measurement, else None; those of the whole stack, its first and its last layer; the rest."""
        start, stop = next(stack for stack in self.stacks if layer < stack.stop)
        own = measured[Span(layer, layer + 1)] if layer in (start, stop - 1) else None
        return own, (measured[Span(start, stop)], measured[Span(start, start + 1)], measured[Span(stop - 1, stop)]), stop - start - 2


def kept_bytes(kept: Callable[[int], int], batch: int, *, at: int, other: int, has_decoder: bool) -> tuple[int, int]:
    """Return the bytes that a backward pass needs of its forward pass: (per token, per sample).

    kept(length): bytes for `batch` samples of a length.  at: the length that counts; `other` tells, of an encoder-decoder, what does not
    grow with it.
    """
    own = kept(at)
    if not has_decoder or other < 1:
        return own // (batch * at), 0
    per_token = (kept(other) - own) // (batch * (other - at))
    return per_token, max(0, own // batch - per_token * at)


def saved_by_autograd(forward: Callable[[], Any], besides: Iterable[Tensor]) -> tuple[Any, int]:
    """Return what a forward pass returns, and the bytes that autograd keeps of it.  besides: tensors that are there anyway."""
    own = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())
