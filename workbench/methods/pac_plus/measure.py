"""Profile PAC+ on this host: seconds and bytes of every layer, by the very calls that a run makes (section V-A, 'Profiling')."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.methods.pac_plus.compute import SideContext, StageCompute, Targets
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import ModelFacts
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.models.stack import LayerStack
from workbench.profiler.descriptions import ModelDescription
from workbench.profiler.timing import Call, time_grids
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SEQUENCE_LENGTHS = (8, 16, 32, 64)


def measure_layers(
    stack: LayerStack,
    config: ParallelAdapterConfig,
    *,
    dtype: str,
    max_length: int,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    lengths: tuple[int, ...] = SEQUENCE_LENGTHS,
    budget_s: float = 40.0,
) -> tuple[LayerProfile, ...]:
    """Return the profile of every layer on one core of this host at full speed.

    The whole stack, its first and its last layer are measured; the layers between share what is left, so that the sum over
    all layers is what the whole stack takes. Embedding and head count to the first and last layer.
    """
    count = stack.num_layers
    lengths = (*(length for length in lengths if length < max_length), max_length)
    spans = {"whole": (0, count), "first": (0, 1), "last": (count - 1, count)}
    makers: dict[str, Callable[[int, int], Call]] = {}
    benches = {}
    for name, (start, stop) in spans.items():
        bench = benches[name] = _Bench(stack, config, start, stop, cache_dtype(dtype))
        makers |= {f"{name} F": bench.forward, f"{name} SF": bench.side_forward, f"{name} SB": bench.side_backward}
    makers["LOAD"] = _load_bench(config, dtype)
    grids = time_grids(makers, batch_sizes, lengths, budget_s=budget_s)
    step = time_grids({"STEP": lambda batch, length: benches["whole"].step}, (1,), (1,), budget_s=2.0)["STEP"]
    trainable = [
        sum(parameter.numel() * 4 for parameter in ParallelAdapterStage(config, index, index + 1).parameters()) for index in range(count)
    ]
    contexts = [benches[name].context_bytes_per_token() for name in ("first", "whole", "last")]
    context_middle = max(0, (contexts[1] - contexts[0] - contexts[2])) // max(1, count - 2)
    layers = []
    for index in range(count):
        end = "first" if index == 0 else "last" if index == count - 1 else ""
        times = {kind: _grid_of(grids, kind, end, count) for kind in ("F", "SF", "SB")}
        times["LOAD"] = grids["LOAD"].scaled(1 / count)
        times["STEP"] = step.scaled(trainable[index] / sum(trainable))
        width, hidden = config.width * 4, config.hidden_size * 4
        layers.append(
            LayerProfile(
                name=f"layer {index}",
                times=times,
                frozen_bytes=_frozen_bytes(stack, index),
                trainable_bytes=trainable[index],
                output_bytes_per_token=hidden + width,
                gradient_bytes_per_token=width,
                context_bytes_per_token=contexts[0] if index == 0 else contexts[2] if end else context_middle,
                tap_bytes_per_token=config.hidden_size * cache_dtype(dtype).itemsize * (2 if index == 0 else 1),
                workspace_bytes_per_token=4 * hidden,
            )
        )
    if count == 1:
        layers = [replace(layers[0], times=layers[0].times | {kind: grids[f"whole {kind}"] for kind in ("F", "SF", "SB")})]
    return tuple(layers)


def scale_to_cluster(host_layers: tuple[LayerProfile, ...], cluster: Cluster, *, model: str) -> Profile:
    """Return every emulated device's profile: the host's, divided by the device's share of a core.

    Raises ConfigError if a device has no host_share.
    """
    for device in cluster.devices:
        if device.host_share is None:
            raise ConfigError(
                f"Cluster '{cluster.name}' was to be emulated here.",
                f"Device '{device.name}' has no host_share.",
                "Give each device one (0.5 is half as fast as a core of this machine), or use --mode simulate.",
            )
    return Profile(
        model=model,
        method="pac_plus",
        source="scaled",
        layers=tuple(tuple(layer.scaled(1 / (device.host_share or 1.0)) for layer in host_layers) for device in cluster.devices),
    )


def describe_facts(facts: ModelFacts) -> ModelDescription:
    """Return a loadable model's sizes as the analytic costs ask for them."""
    return ModelDescription(
        name=facts.name,
        kind="decoder" if facts.is_causal else "encoder",
        num_layers=facts.num_layers,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_key_value_heads,
        feed_forward=facts.feed_forward_size,
        vocab=facts.vocabulary_size,
        gated=facts.is_gated,
        positions=facts.max_length,
    )


def _grid_of(grids: dict[str, Grid], kind: str, end: str, count: int) -> Grid:
    if end:
        return grids[f"{end} {kind}"]
    whole, first, last = (grids[f"{name} {kind}"] for name in ("whole", "first", "last"))
    seconds = tuple(
        tuple(max(0.0, (w - f - b) / (count - 2)) for w, f, b in zip(*rows, strict=True))
        for rows in zip(whole.seconds, first.seconds, last.seconds, strict=True)
    )
    return replace(whole, seconds=seconds)


def _frozen_bytes(stack: LayerStack, index: int) -> int:
    stage = stack.stage(index, index + 1)
    return sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters())


class _Bench:
    """Calls of one stage on made-up inputs of any size."""

    def __init__(self, stack: LayerStack, config: ParallelAdapterConfig, start: int, stop: int, dtype: torch.dtype) -> None:
        adapter = ParallelAdapterStage(config, start, stop).train()
        self._compute = StageCompute(adapter, stack.stage(start, stop), tap_dtype=dtype)
        self._optimizer = FlatAdamW(adapter, learning_rate=LinearSchedule(peak=1e-3, num_steps=1000), weight_decay=0.01)
        self._config, self._dtype = config, dtype
        self._is_first, self._is_last = start == 0, stop == config.num_layers
        self._num_taps = stop - start + self._is_first

    def forward(self, batch: int, length: int) -> Call:
        """Return the backbone's forward pass."""
        mask = _mask(batch, length)
        source = torch.randint(5, 30, (batch, length)) if self._is_first else torch.randn(batch, length, self._config.hidden_size)
        return lambda: self._compute.backbone_forward(source, mask)

    def side_forward(self, batch: int, length: int) -> Call:
        """Return the side network's forward pass."""
        inputs = self._inputs(batch, length)
        return lambda: self._compute.side_forward(*inputs)

    def side_backward(self, batch: int, length: int) -> Call:
        """Return the side network's backward pass, its forward pass not counted."""
        inputs = self._inputs(batch, length)
        gradient = None if self._is_last else torch.randn(batch, length, self._config.width)
        return (lambda: self._compute.side_forward(*inputs)), (lambda context: self._compute.side_backward(context, gradient))

    def step(self) -> None:
        """Take an optimizer step."""
        self._optimizer.step()

    def context_bytes_per_token(self, batch: int = 4, length: int = 32) -> int:
        """Return the bytes that autograd keeps between both passes, weights and taps not counted, per token."""
        inputs = self._inputs(batch, length)
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self._compute.adapter.parameters()}
        own |= {inputs[1].untyped_storage().data_ptr()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            context: SideContext = self._compute.side_forward(*inputs)
        self._compute.side_backward(context, None if self._is_last else torch.ones_like(context.output))
        return sum(kept.values()) // (batch * length)

    def _inputs(self, batch: int, length: int) -> tuple[Tensor | None, Tensor, Tensor, Targets | None]:
        config = self._config
        side = None if self._is_first else torch.randn(batch, length, config.width)
        taps = torch.randn(self._num_taps, batch, length, config.hidden_size).to(self._dtype)
        labels = torch.zeros(batch) if config.kind == "regression" else torch.zeros(batch, dtype=torch.int64)
        targets = Targets(labels=labels, sample_ids=torch.arange(batch), epoch=0, total=batch) if self._is_last else None
        return side, taps, _mask(batch, length), targets


def _load_bench(config: ParallelAdapterConfig, dtype: str) -> Callable[[int, int], Call]:
    """Return calls that read a batch's taps from the page cache, as a run does after its first cached epoch."""

    def make(batch: int, length: int) -> Call:
        manifest = CacheManifest(
            fingerprint="profile",
            samples=tuple(range(batch)),
            lengths=(length,) * batch,
            num_taps=config.num_layers + 1,
            width=config.hidden_size,
            dtype=dtype,
        )
        # The memory map outlives the file's name: whatever becomes of this process, nothing is left on the disk.
        with tempfile.TemporaryDirectory(prefix="workbench-profile-", ignore_cleanup_errors=True) as folder:
            cache = ActivationCache.create(Path(folder) / "cache", manifest)
        # As in a run, into a buffer that is there already.
        buffer = torch.empty(cache.batch_bytes(batch, length), dtype=torch.uint8)
        return lambda: cache.batch(range(batch), length, buffer)

    return make


def _mask(batch: int, length: int) -> Tensor:
    """Return a mask with some padding: without any, attention takes a faster path that real batches do not."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[::2, -max(1, length // 8) :] = 0
    return mask
