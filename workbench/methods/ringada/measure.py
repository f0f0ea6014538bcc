"""Profile serial adapters on this host: seconds and bytes of every layer, from the same calls as in a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.names import FP32_BYTES
from workbench.core.profile import Bytes, Grid, LayerProfile, Layers, Profile
from workbench.core.run_folder import scratch_folder
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import BATCH_SIZES, SEQUENCE_LENGTHS, TARGET_LENGTH, crossing_bytes, lengths_up_to
from workbench.methods.ringada.compute import PrefixCache, RingCompute, RingOptimizer
from workbench.methods.ringada.schedule import BACKWARD, EMBED, FORWARD, HEAD, HEAD_STEP, LOAD, LOWEST, PREFIX
from workbench.methods.training.handlers import StageContext, Targets
from workbench.models.parallel_adapter import made_up_mask
from workbench.models.quantization import held_bytes
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig
from workbench.profiler.grids import time_grids
from workbench.profiler.layers import BUDGET_S, Span, Stacks, kept_bytes, profile_layers, saved_by_autograd
from workbench.profiler.timing import Call, Maker
from workbench.runtime.flat_optimizer import LinearSchedule
from workbench.schedules.costs import Crossing


def measure_layers(
    stack: LayerStack,
    config: TechniqueConfig,
    *,
    max_length: int,
    caches: bool = False,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    lengths: tuple[int, ...] = SEQUENCE_LENGTHS,
    budget_s: float = BUDGET_S,
) -> Layers:
    """Return the profile of every layer on one core of this host at full speed (see profiler.layers and
    methods.ringada.schedule).

    caches: whether frozen layers keep their inputs.
    """
    lengths = lengths_up_to(max_length, lengths, reads_images=stack.family.reads_images)
    stacks = Stacks(stack.num_layers, stack.num_encoder_layers)
    benches = {span: _Bench(stack, config, span) for span in stacks.spans}

    def nbytes(layer: int) -> dict[str, int]:
        frozen = held_bytes(stack.layers[layer])
        trained = FP32_BYTES * sum(parameter.numel() for parameter in benches[stacks.span_of(layer)].parameters(layer))
        return {"frozen_bytes": frozen, "trainable_bytes": trained} | crossing_bytes(stack, layer)

    profiles = profile_layers(
        stacks,
        benches,
        batch_sizes,
        lengths,
        budget_s=0.8 * budget_s,
        layer_bytes=nbytes,
        prepared={BACKWARD: FORWARD},
    )
    first, last = benches[Span(0, 1)], benches[Span(stack.num_layers - 1, stack.num_layers)]
    at_ends: dict[str, Maker] = {EMBED: first.embed, HEAD: last.score, LOWEST: partial(last.backward, is_lowest=True)}
    ends = time_grids(at_ends, batch_sizes, lengths, budget_s=0.15 * budget_s)
    steps = {STEP: partial(first.optimizer.update, range(1), 0), HEAD_STEP: partial(first.optimizer.update_head, 0)}
    ends |= time_grids(
        {kind: lambda *size, step=step: step for kind, step in steps.items()}, (1,), (1,), budget_s=0.05 * budget_s
    )
    of_all = {kind: ends.pop(kind) for kind in (LOWEST, STEP)}
    keep_times: Grid | None = None
    if caches:
        with scratch_folder() as folder:
            of_cache: dict[str, Maker] = {LOAD: partial(last.load, folder), "KEEP": partial(last.keep, folder)}
            grids = time_grids(of_cache, batch_sizes, lengths, budget_s=0.1 * budget_s)
        of_all[LOAD], keep_times = grids[LOAD], grids["KEEP"]

    def with_common_times(index: int, layer: LayerProfile) -> LayerProfile:
        """Return a layer's profile with the times that all layers share, and those of the first and the last layer."""
        times = layer.times | of_all | (ends if index in (0, stack.num_layers - 1) else {})
        return replace(
            layer, times=times if keep_times is None else times | {PREFIX: layer.times[PREFIX].plus(keep_times)}
        )

    return tuple(with_common_times(index, layer) for index, layer in enumerate(profiles))


def from_adapters(profile: Profile, cluster: Cluster, embedding_bytes: int, *, caches: bool = False) -> Profile:
    """Convert the catalogue's costs of adapters to a ring's: frozen layers separate, the lowest adapter's backward pass
    alone.

    embedding_bytes: bytes of the embedding, which belongs to the first layer there.  caches: whether frozen layers keep
    their inputs, which a device's storage writes and reads at its rates.
    """

    def changed(layer: LayerProfile, rank: int, index: int) -> LayerProfile:
        device = cluster.devices[rank]
        frozen = layer.frozen_bytes - (embedding_bytes if index == 0 else 0)
        forward = layer.times[FORWARD]

        def of_input(seconds: Callable[[float], float]) -> Grid:
            sizes = forward.batch_sizes, forward.sequence_lengths
            return Grid.of(*sizes, lambda *size: seconds(layer.output_bytes(*size)))

        load, prefix = of_input(device.loaded_s), forward.plus(of_input(device.stored_s)) if caches else forward
        if "SF" in layer.times:  # Parallel Adapters
            side = {LOAD: load, FORWARD: layer.times["SF"], BACKWARD: layer.times["SB"], LOWEST: layer.times["SB"]}
            return replace(layer.with_times({PREFIX: prefix} | side), frozen_bytes=frozen)
        # An adapter has two matrix products forward, three backward: its weights' gradients and its narrow activation's
        # gradient.
        share = 1.5 * layer.trainable_bytes / (frozen + layer.trainable_bytes)
        times = {PREFIX: prefix, LOWEST: forward.scaled(share), LOAD: load}
        return replace(layer.with_times(times), frozen_bytes=frozen)

    return profile.with_layers(changed)


class _Bench:
    """Calls of one stage on synthetic inputs of any size."""

    def __init__(self, stack: LayerStack, config: TechniqueConfig, span: Span) -> None:
        self._stage = copy.deepcopy(stack.stage(*span))  # a copy: adapters that are inserted into layers stay in them
        self._part, self.layers, self._kind = self._stage.part(*span), range(*span), config.kind
        self._compute = RingCompute(config, self._stage)
        self._side_width = self._compute.side_width
        schedule = LinearSchedule(peak=1e-3, num_steps=100_000)
        self.optimizer = RingOptimizer(
            self._compute,
            schedule,
            0.01,
            updates=lambda rounds, brought: dict.fromkeys(self.layers, rounds),
            keeps_head=True,
        )
        self._has_decoder = stack.num_encoder_layers is not None

    @property
    def calls(self) -> dict[str, Maker]:
        """Return the calls to time, by kind of operation."""
        return {PREFIX: self.frozen, BACKWARD: self.backward}

    def embed(self, batch: int, length: int) -> Call:
        """Return the embedding's forward pass."""
        ids, mask, _ = self._stage.make_inputs(batch, length, TARGET_LENGTH)
        return lambda: self._compute.embed(ids, mask)

    def frozen(self, batch: int, length: int) -> Call:
        """Return the forward pass of frozen layers, without a side network."""
        hidden, mask = self._inputs(batch, length)
        first_unfrozen = self.layers.start if self._side_width else self.layers.stop
        return lambda: self._compute.ahead(hidden, mask, self.layers, first_unfrozen)

    def keep(self, folder: Path, batch: int, length: int) -> Call:
        """Return the call that writes a layer's input to a cache in a folder."""
        prefix, layer, hidden = self._cached(folder, batch, length)
        return lambda: prefix.keep(layer, range(batch), hidden)

    def load(self, folder: Path, batch: int, length: int) -> Call:
        """Return the call that reads it, from the page cache."""
        prefix, layer, _ = self._cached(folder, batch, length)
        return lambda: prefix.read(layer, range(batch), length)

    def score(self, batch: int, length: int) -> Call:
        """Return the head's forward and backward pass."""
        hidden, mask = self._inputs(batch, length)
        targets = Targets.made_up(self._kind, batch, length)
        last = hidden[:, length:] if self._has_decoder else hidden
        states = [last, *self._side(hidden)]
        return lambda: self._compute.score(states, mask, targets)

    def context_bytes(self, batch: int = 4) -> Bytes:
        """Return the bytes that autograd keeps between both passes, without parameters."""

        def context_at(length: int) -> int:
            states, mask = self._states(batch, length)
            return saved_by_autograd(
                lambda: self._compute.forward(states, mask, self.layers, is_lowest=False),
                [
                    *self._stage.parameters(),
                    *(parameter for layer in self.layers for parameter in self.parameters(layer)),
                ],
            )[1]

        return kept_bytes(context_at, batch, length=32, other=64, has_decoder=self._has_decoder)

    def backward(self, batch: int, length: int, *, is_lowest: bool = False) -> Call:
        """Return the backward pass, prepared by its forward pass.  is_lowest: the layers' input needs no gradient."""
        states, mask = self._states(batch, length)

        def back(context: StageContext) -> Tensor | None:
            return context.backward(torch.ones_like(context.output))

        return (lambda: self._compute.forward(states, mask, self.layers, is_lowest=is_lowest)), back

    def _cached(self, folder: Path, batch: int, length: int) -> tuple[PrefixCache, int, Tensor]:
        hidden, _ = self._inputs(batch, length)
        crossing = Crossing(hidden_size=hidden.shape[2], target_length=hidden.shape[1] - length, num_encoder_layers=0)
        # Every size replaces the file of the one before, whose memory map outlives it.
        prefix = PrefixCache(folder=folder, lengths=(length,) * batch, crossing=crossing)
        prefix.keep(self.layers.start, range(batch), hidden)
        return prefix, self.layers.start, hidden

    def parameters(self, layer: int) -> list[Tensor]:
        """Return the trained parameters of a layer."""
        return [parameter for module in self._compute.trained[layer].values() for parameter in module.parameters()]

    def _side(self, hidden: Tensor) -> list[Tensor]:
        return [torch.randn(*hidden.shape[:2], self._side_width)] if self._side_width else []

    def _states(self, batch: int, length: int) -> tuple[list[Any], Tensor]:
        """Return the input of trained layers, and the mask."""
        hidden, mask = self._inputs(batch, length)
        side = self._side(hidden)
        if not side:
            return [hidden], mask
        _, (_, taps) = self._compute.ahead(hidden, mask, self.layers, self.layers.start)
        return [(*side, taps), *side], mask

    def _inputs(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        return self._part.make_inputs(batch, length, TARGET_LENGTH)[0], made_up_mask(batch, length)
