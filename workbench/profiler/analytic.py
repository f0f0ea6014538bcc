"""Turn counted FLOPs and bytes into a profile by each device's speed (PAC+, section V-A, 'Profiling'); the counts are in layer_costs.py."""

from __future__ import annotations

from typing import Literal

from workbench.core.cluster import Cluster, Device
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.profiler.descriptions import FP32_BYTES, MODELS, ModelDescription, describe
from workbench.profiler.layer_costs import LayerCost, Technique, TechniqueSizes, layer_costs, total_flops

__all__ = [
    "MODELS",
    "LayerCost",
    "ModelDescription",
    "Technique",
    "TechniqueSizes",
    "analytic_profile",
    "describe",
    "layer_costs",
    "total_flops",
]

ADAMW_FLOPS_PER_PARAM = 12
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


def analytic_profile(
    model: ModelDescription | str,
    cluster: Cluster,
    *,
    technique: Technique = "parallel_adapters",
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES,
    sequence_lengths: tuple[int, ...] = (128,),
    sizes: TechniqueSizes | None = None,
    reduction: int = 8,
    head: Literal["classification", "language"] = "classification",
    num_labels: int = 2,
    overhead_s: float = 0.0,
) -> Profile:
    """Return a profile computed from sizes and each device's flops_per_s.

    overhead_s: added to every operation of every layer.  Bytes per token are those at the longest sequence length.
    """
    described = describe(model) if isinstance(model, str) else model
    chosen = TechniqueSizes(reduction=reduction) if sizes is None else sizes
    grid = {
        (batch, length): layer_costs(
            described,
            technique,
            batch=batch,
            sequence_length=length,
            sizes=chosen,
            head=head,
            num_labels=num_labels,
        )
        for batch in batch_sizes
        for length in sequence_lengths
    }
    rows = []
    for device in cluster.devices:
        rows.append(
            tuple(
                _layer_profile(described, layer, grid, device, batch_sizes, sequence_lengths, overhead_s, chosen.backbone_bytes)
                for layer in range(described.stack_layers)
            )
        )
    return Profile(model=described.name, method=technique, source="analytic", layers=tuple(rows))


def _layer_profile(
    model: ModelDescription,
    layer: int,
    grid: dict[tuple[int, int], tuple[LayerCost, ...]],
    device: Device,
    batch_sizes: tuple[int, ...],
    sequence_lengths: tuple[int, ...],
    overhead_s: float,
    backbone_bytes: float,
) -> LayerProfile:
    longest = grid[batch_sizes[-1], sequence_lengths[-1]][layer]

    def table(seconds: dict[tuple[int, int], float]) -> Grid:
        cells = tuple(tuple(seconds[batch, length] for length in sequence_lengths) for batch in batch_sizes)
        return Grid(batch_sizes=batch_sizes, sequence_lengths=sequence_lengths, seconds=cells)

    times = {}
    for kind, name in (("F", "forward_flops"), ("B", "backward_flops"), ("SF", "side_forward_flops"), ("SB", "side_backward_flops")):
        if getattr(longest, name) > 0:
            times[kind] = table({at: overhead_s + getattr(costs[layer], name) / device.flops_per_s for at, costs in grid.items()})
    if longest.tap_bytes_per_token or longest.tap_bytes_per_sample:
        rate = device.storage_bytes_per_s
        sizes = {(b, n): b * (n * longest.tap_bytes_per_token + longest.tap_bytes_per_sample) for b, n in grid}
        times["LOAD"] = table({at: overhead_s + nbytes / rate for at, nbytes in sizes.items()})
    step = longest.trainable_params * ADAMW_FLOPS_PER_PARAM / device.flops_per_s
    times["STEP"] = table(dict.fromkeys(grid, step))
    return LayerProfile(
        name=f"{model.name} {'decoder' if model.is_decoder_layer(layer) else model.kind.split('-')[0]} layer {layer}",
        times=times,
        frozen_bytes=round(longest.frozen_params * backbone_bytes),
        trainable_bytes=longest.trainable_params * FP32_BYTES,
        **{name: getattr(longest, name) for name in LayerCost.__slots__ if "_bytes_per_" in name},
    )
