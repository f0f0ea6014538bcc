"""Profile a technique on this host: seconds and bytes of every layer, by the very calls that a run makes (section V-A, 'Profiling')."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.core.profile import Grid, LayerProfile
from workbench.methods.common.layers import BATCH_SIZES, SEQUENCE_LENGTHS
from workbench.methods.fine_tuning.compute import StageCompute, StageContext, Targets
from workbench.methods.fine_tuning.layout import TARGET_LENGTH
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.profiler.timing import Call, time_grids
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule

KINDS = ("F", "B")


class _Span(NamedTuple):
    """Layers [start, stop) of one stack of like layers, measured apart: the whole stack, its first or its last layer."""

    start: int
    stop: int


def measure_layers(
    stack: LayerStack,
    config: TechniqueConfig,
    *,
    max_length: int,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    lengths: tuple[int, ...] = SEQUENCE_LENGTHS,
    budget_s: float = 40.0,
) -> tuple[LayerProfile, ...]:
    """Return the profile of every layer on one core of this host at full speed.

    Each stack (encoder and decoder apart) is measured whole, then its first and its last layer; the layers between share what is left,
    so that the sum over all layers is what the whole stack takes. Embeddings and head count to the first and last layers.
    """
    lengths = (*(length for length in lengths if length < max_length), max_length)
    border, count = stack.num_encoder_layers, stack.num_layers
    stacks = [_Span(0, count)] if border is None else [_Span(0, border), _Span(border, count)]
    benches: dict[_Span, _Bench] = {}
    for own in stacks:
        for span in (own, _Span(own.start, own.start + 1), _Span(own.stop - 1, own.stop)):
            if span not in benches:
                benches[span] = _Bench(stack, config, span)
    makers: dict[str, Callable[[int, int], Call]] = {}
    for span, bench in benches.items():
        makers |= {f"{span} F": bench.forward, f"{span} B": bench.backward}
    grids = time_grids(makers, batch_sizes, lengths, budget_s=budget_s)
    contexts = {span: bench.context_bytes() for span, bench in benches.items()}
    sizes = [_parameter_bytes(stack, config, index) for index in range(count)]
    # One optimizer for all layers, as in a run: many small ones would pay their overhead each time.
    whole = benches.get(_Span(0, count)) or _Bench(stack, config, _Span(0, count))
    step = time_grids({"STEP": lambda batch, length: whole.step}, (1,), (1,), budget_s=5.0)["STEP"]
    trainable = sum(trained for _, trained in sizes)
    layers = []
    for own in stacks:
        for index in range(own.start, own.stop):
            times = {kind: _grid({span: grids[f"{span} {kind}"] for span in benches}, own, index) for kind in KINDS}
            times["STEP"] = step.scaled(sizes[index][1] / trainable)
            per_token, per_sample = _context(contexts, own, index)
            layers.append(
                LayerProfile(
                    name=f"layer {index}",
                    times=times,
                    frozen_bytes=sizes[index][0],
                    trainable_bytes=sizes[index][1],
                    context_bytes_per_token=per_token,
                    context_bytes_per_sample=per_sample,
                    **_crossing_bytes(stack, index),
                )
            )
    return tuple(layers)


def _crossing_bytes(stack: LayerStack, index: int) -> dict[str, int]:
    """Return what crosses behind a layer, either way, and its scratch, as LayerProfile's fields."""
    hidden = 4 * stack.hidden_size
    beside = TARGET_LENGTH * (stack.num_encoder_layers is not None and index >= stack.num_encoder_layers)
    return {
        "output_bytes_per_token": hidden,
        "output_bytes_per_sample": beside * hidden,
        "gradient_bytes_per_token": hidden,
        "gradient_bytes_per_sample": beside * hidden,
        "workspace_bytes_per_token": 4 * hidden,
        "workspace_bytes_per_sample": beside * 4 * hidden,
    }


def _grid(grids: dict[_Span, Grid], own: _Span, index: int) -> Grid:
    """Return a layer's seconds: measured for the first and the last of its stack, a part of what is left for those between."""
    whole, first, last = grids[own], grids[_Span(own.start, own.start + 1)], grids[_Span(own.stop - 1, own.stop)]
    if index in (own.start, own.stop - 1):
        return first if index == own.start else last
    between = own.stop - own.start - 2
    seconds = tuple(
        tuple(max(0.0, (w - f - b) / between) for w, f, b in zip(*rows, strict=True))
        for rows in zip(whole.seconds, first.seconds, last.seconds, strict=True)
    )
    return replace(whole, seconds=seconds)


def _context(contexts: dict[_Span, tuple[int, int]], own: _Span, index: int) -> tuple[int, int]:
    whole, first, last = contexts[own], contexts[_Span(own.start, own.start + 1)], contexts[_Span(own.stop - 1, own.stop)]
    if index in (own.start, own.stop - 1):
        return first if index == own.start else last
    per_token, per_sample = (max(0, w - f - b) // (own.stop - own.start - 2) for w, f, b in zip(whole, first, last, strict=True))
    return per_token, per_sample


def _parameter_bytes(stack: LayerStack, config: TechniqueConfig, index: int) -> tuple[int, int]:
    """Return the bytes of a layer's frozen and trained parameters, as a stage of this layer alone has them."""
    parameters = list(_build(stack, config, _Span(index, index + 1)).parameters())
    frozen = sum(one.numel() * one.element_size() for one in parameters if not one.requires_grad)
    return frozen, sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)


def _build(stack: LayerStack, config: TechniqueConfig, span: _Span) -> TechniqueStage:
    # A copy: what a technique puts into layers stays in them.
    return TechniqueStage(copy.deepcopy(stack.stage(*span)), config)


class _Bench:
    """Calls of one stage on made-up inputs of any size."""

    def __init__(self, stack: LayerStack, config: TechniqueConfig, span: _Span) -> None:
        self._model = _build(stack, config, span)
        self._compute = StageCompute(self._model)
        self._optimizer = FlatAdamW(self._model, learning_rate=LinearSchedule(peak=1e-3, num_steps=100_000), weight_decay=0.01)
        self._is_last = span.stop == stack.num_layers
        self._border = stack.num_encoder_layers

    def forward(self, batch: int, length: int) -> Call:
        """Return the forward pass; what the backward pass needs is kept, as in a run."""
        inputs = self._inputs(batch, length)
        return lambda: self._compute.forward(*inputs)

    def backward(self, batch: int, length: int) -> Call:
        """Return the backward pass, its forward pass not counted."""
        inputs = self._inputs(batch, length)

        def back(context: StageContext) -> Tensor | None:
            return self._compute.backward(context, None if self._is_last else torch.ones_like(context.output))

        return (lambda: self._compute.forward(*inputs)), back

    def step(self) -> None:
        """Take an optimizer step."""
        self._optimizer.step()

    def context_bytes(self, batch: int = 4, lengths: tuple[int, int] = (32, 64)) -> tuple[int, int]:
        """Return the bytes that autograd keeps between both passes, parameters not counted: (per token, per sample)."""
        if self._border is None:
            return self._kept_bytes(batch, lengths[0]) // (batch * lengths[0]), 0
        short, long = (self._kept_bytes(batch, length) for length in lengths)
        per_token = (long - short) // (batch * (lengths[1] - lengths[0]))
        return per_token, max(0, short // batch - per_token * lengths[0])

    def _kept_bytes(self, batch: int, length: int) -> int:
        inputs = self._inputs(batch, length)
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._compute.forward(*inputs)
        return sum(kept.values())

    def _inputs(self, batch: int, length: int) -> tuple[Tensor, Tensor, Targets | None]:
        source, mask, _ = self._model.backbone.make_inputs(batch, length, TARGET_LENGTH)
        # With some padding: without any, attention takes a faster path that real batches do not.
        mask[::2, -max(1, length // 8) :] = 0
        targets = None
        if self._is_last:
            labels = torch.zeros(batch, dtype=torch.float32 if self._model.config.kind == "regression" else torch.int64)
            targets = Targets(labels=labels, sample_ids=torch.arange(batch), epoch=0, total=batch)
        return source, mask, targets
