"""Profile PAC+ on this host: seconds and bytes of every layer, from the same calls as in a run (section V-A,
'Profiling').
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.core.names import FP32_BYTES
from workbench.core.profile import Bytes, Layers
from workbench.core.run_folder import scratch_folder
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import BATCH_SIZES, SEQUENCE_LENGTHS, bytes_of_tokens, lengths_up_to
from workbench.methods.pac_plus.handlers import StageCompute
from workbench.methods.pac_plus.prepare import crossing_of, record_layout, stage_taps
from workbench.methods.training.handlers import Targets
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import attach_head
from workbench.models.parallel_adapter import ParallelAdapterStage, made_up_mask
from workbench.models.quantization import held_bytes
from workbench.models.side_layers import WORD_KINDS
from workbench.models.stack import LayerStack
from workbench.profiler.layers import BUDGET_S, Stacks, kept_bytes, profile_layers, saved_by_autograd
from workbench.profiler.timing import Call, Maker
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule


def measure_layers(
    stack: LayerStack,
    config: ParallelAdapterConfig,
    *,
    dtype: str,
    max_length: int,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    lengths: tuple[int, ...] = SEQUENCE_LENGTHS,
    budget_s: float = BUDGET_S,
    is_fast: bool = True,
) -> Layers:
    """Return the profile of every layer on one core of this host at full speed (see profiler.layers).  is_fast: see
    StageCompute.
    """
    lengths = lengths_up_to(max_length, lengths, reads_images=stack.family.reads_images)
    tap_dtype, stacks = cache_dtype(dtype), Stacks(config.num_layers, config.num_encoder_layers)
    benches = {span: _Bench(stack, config, *span, tap_dtype, max_length, is_fast=is_fast) for span in stacks.spans}
    optimizer = FlatAdamW(
        nn.ModuleList(bench.adapter for bench in benches.values()),
        learning_rate=LinearSchedule(peak=1e-3, num_steps=1000),
        weight_decay=0.01,
    )
    hidden_itemsize = next(stack.parameters()).element_size()  # norms are in the compute dtype

    def nbytes(layer: int) -> dict[str, int]:
        frozen = held_bytes(stack.stage(layer, layer + 1))
        if layer == config.num_layers - 1 and config.kind in WORD_KINDS and stack.language_model_head is not None:
            frozen += held_bytes(stack.language_model_head)  # the last device's own copy
        trained = sum(parameter.numel() for parameter in benches[stacks.span_of(layer)].adapter.parameters())
        crossing = layer_bytes(config, layer, tap_dtype.itemsize, hidden_itemsize)
        return {"frozen_bytes": frozen, "trainable_bytes": FP32_BYTES * trained} | crossing

    with scratch_folder() as folder:
        return profile_layers(
            stacks,
            benches,
            batch_sizes,
            lengths,
            budget_s=budget_s,
            layer_bytes=nbytes,
            prepared={"SB": "SF"},
            shared={kind: _cache_bench(kind, config, dtype, folder) for kind in ("LOAD", "TAPE")},
            update={STEP: lambda batch, length: optimizer.step},
        )


def layer_bytes(config: ParallelAdapterConfig, index: int, itemsize: int, hidden_itemsize: int = 4) -> dict[str, Bytes]:
    """Return the bytes that cross behind a layer, its tap and its scratch, as fields of LayerProfile.

    itemsize, hidden_itemsize: bytes of a tap's value, and of a value of the backbone's hidden state.
    """
    hidden, width = config.hidden_size * hidden_itemsize, config.width * FP32_BYTES
    taps = stage_taps(index, index + 1, config.num_encoder_layers)
    decoder_tokens = (
        config.target_length if config.num_encoder_layers is not None and index >= config.num_encoder_layers else 0
    )
    value_bytes = config.hidden_size * itemsize
    return bytes_of_tokens(decoder_tokens, output=hidden + width, gradient=width, workspace=4 * hidden) | {
        "tap_bytes": Bytes(value_bytes * taps.num_taps, value_bytes * taps.num_target_taps * config.target_length)
    }


class _Bench:
    """Calls of one stage on synthetic inputs of any size."""

    def __init__(
        self,
        stack: LayerStack,
        config: ParallelAdapterConfig,
        start: int,
        stop: int,
        dtype: torch.dtype,
        max_length: int,
        *,
        is_fast: bool = True,
    ) -> None:
        self.adapter = adapter = ParallelAdapterStage(config, start, stop).train()
        if stop == config.num_layers:
            attach_head(stack, adapter)
        self._backbone, self._hidden_dtype = stack.stage(start, stop), next(stack.parameters()).dtype
        self._compute = StageCompute(adapter, self._backbone, tap_dtype=dtype, is_fast=is_fast)
        self._config, self._dtype, self._stop, self._crossing = config, dtype, stop, crossing_of(config)
        self._max_length = max_length
        self._is_first, self._is_last = start == 0, stop == config.num_layers
        self._start, self._taps = start, stage_taps(start, stop, config.num_encoder_layers)

    @property
    def calls(self) -> dict[str, Maker]:
        """Return the calls to time, by kind of operation."""
        return {"F": self.forward, "SB": self.side_backward}

    def forward(self, batch: int, length: int) -> Call:
        """Return the backbone's forward pass."""
        source, _, decoder_ids = self._backbone.make_inputs(batch, length, max(1, self._config.target_length))
        mask = made_up_mask(batch, length)
        source = source.to(self._hidden_dtype) if source.is_floating_point() else source
        return lambda: self._compute.backbone_forward(source, mask, decoder_ids)

    def side_backward(self, batch: int, length: int) -> Call:
        """Return the side network's backward pass, prepared by its forward pass."""
        inputs = self._inputs(batch, length)
        tokens = self._crossing.tokens(self._stop, length)
        gradient = None if self._is_last else torch.randn(batch, tokens, self._config.width)
        return (lambda: self._compute.side_forward(*inputs)), (
            lambda context: self._compute.side_backward(context, gradient)
        )

    def context_bytes(self, batch: int = 4) -> Bytes:
        """Return the bytes stored between the forward and the backward pass, without weights and taps.

        Measured at the longest length, because attention keeps more for each token of a long sample.
        """

        def context_at(length: int) -> int:
            inputs = self._inputs(batch, length)
            besides = (*self._compute.adapter.parameters(), *inputs[1])
            context, nbytes = saved_by_autograd(lambda: self._compute.side_forward(*inputs), besides)
            self._compute.side_backward(context, None if self._is_last else torch.ones_like(context.output))
            return nbytes + (0 if context.fast is None else context.fast.nbytes)

        has_decoder = self._config.num_encoder_layers is not None
        return kept_bytes(
            context_at, batch, length=self._max_length, other=self._max_length // 2, has_decoder=has_decoder
        )

    def _inputs(self, batch: int, length: int) -> tuple[Tensor | None, list[Tensor], Tensor, Targets | None]:
        config = self._config
        side = None if self._is_first else torch.randn(batch, self._crossing.tokens(self._start, length), config.width)
        tokens = [length] * self._taps.num_taps + [config.target_length] * self._taps.num_target_taps
        taps = [torch.randn(batch, count, config.hidden_size).to(self._dtype) for count in tokens]
        targets = Targets.made_up(config.kind, batch, length, config.target_length) if self._is_last else None
        return side, taps, made_up_mask(batch, length), targets


def _cache_bench(kind: str, config: ParallelAdapterConfig, dtype: str, folder: Path) -> Callable[[int, int], Call]:
    """Return calls that read a batch's taps from the page cache (LOAD), as in a run after its first cached epoch, or
    write them to it (TAPE).

    folder: for the taps' file, which every size replaces; the memory map outlives it.
    """
    layout = record_layout(config, dtype)

    def make(batch: int, length: int) -> Call:
        samples = tuple(range(batch))
        manifest = CacheManifest(fingerprint="profile", samples=samples, lengths=(length,) * batch, **asdict(layout))
        cache = ActivationCache.create(folder / "cache", manifest)
        if kind == "TAPE":
            tokens = [length] * layout.num_taps + [layout.target_length] * layout.num_target_taps
            taps = [torch.randn(batch, count, layout.width).to(cache_dtype(dtype)) for count in tokens]
            return lambda: cache.write_batch(samples, taps)
        # As in a run, into an existing buffer.
        buffer = torch.empty(cache.manifest.batch_bytes(batch, length), dtype=torch.uint8)
        return lambda: cache.batch(range(batch), length, buffer)

    return make
