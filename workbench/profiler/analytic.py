"""Count a transformer's FLOPs and bytes for each fine-tuning technique (PAC+, section II, Fig. 3, Table I; section IV-A).

FLOPs: 2 for each weight and token, 4 x tokens x tokens x width for the attention's two products; norms and activations not counted.
Backward: a product costs its forward once for the gradient of its input and once for that of its weight, if that is trained.
Contexts: what PyTorch's autograd keeps in fp32 with dropout, counted as by Korthikanti et al., 'Reducing Activation
Recomputation in Large Transformer Models' (2022), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.profiler.descriptions import FP32_BYTES, MODELS, ModelDescription, describe

__all__ = ["MODELS", "LayerCost", "ModelDescription", "Technique", "analytic_profile", "describe", "layer_costs", "total_flops"]

Technique = Literal["full", "lora", "adapters", "parallel_adapters"]
ADAMW_FLOPS_PER_PARAM = 12
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer's FLOPs for a batch, and its bytes.  Bytes per token: of the input sequence."""

    forward_flops: float
    backward_flops: float
    side_forward_flops: float
    side_backward_flops: float
    frozen_params: int
    trainable_params: int
    output_bytes_per_token: int
    gradient_bytes_per_token: int
    context_bytes_per_token: int
    tap_bytes_per_token: int
    workspace_bytes_per_token: int


def layer_costs(
    model: ModelDescription,
    technique: Technique,
    *,
    batch: int,
    sequence_length: int,
    reduction: int = 8,
    lora_rank: int = 32,
    bottleneck: int = 64,
    head: Literal["classification", "language"] = "classification",
    num_labels: int = 2,
) -> tuple[LayerCost, ...]:
    """Return every layer of the stack; the first includes the embedding, the last the head.

    reduction: r of the Parallel Adapters (section IV-A).  lora_rank: on q and v of every attention; bottleneck: width of the two
    adapters of a layer; their defaults give PAC+ Table I's 9 and 12 million for T5-Large.
    """
    if technique not in get_args(Technique):
        raise ConfigError(f"The technique '{technique}' was asked for.", f"Known: {', '.join(get_args(Technique))}.", "Choose one of them.")
    tokens = batch * sequence_length
    costs = []
    for layer in range(model.stack_layers):
        shape = _Shape(model, layer, batch, sequence_length)
        frozen, trained = model.layer_params(layer), 0
        forward, backward = shape.products + shape.attention, 0.0
        side_forward = side_backward = 0.0
        output, gradient, tap = shape.output_bytes, shape.output_bytes, 0
        context = float(shape.kept_bytes)
        if technique == "full":
            frozen, trained = 0, frozen
            backward = 2 * forward
            context += shape.weight_inputs_bytes
        elif technique == "lora":
            trained = shape.attentions * lora_rank * (2 * model.hidden + model.query_width + model.kv_width)
            extra = 2 * shape.own_tokens * trained
            forward, backward = forward + extra, shape.products + 2 * shape.attention + 2 * extra
            # The inputs of q and v are A's inputs too, and B's input is kept.
            context += shape.per_token(shape.attentions * FP32_BYTES * (model.hidden + 2 * lora_rank))
        elif technique == "adapters":
            trained = 2 * (2 * model.hidden * bottleneck + model.hidden + bottleneck)
            extra = 2 * shape.own_tokens * trained
            forward, backward = forward + extra, shape.products + 2 * shape.attention + 2 * extra
            context += shape.per_token(2 * FP32_BYTES * (model.hidden + 2 * bottleneck))
        else:
            narrow = _narrow(model, reduction)
            side = _Shape(narrow, layer, batch, sequence_length)
            down = model.hidden * narrow.hidden
            trained = narrow.layer_params(layer) + down + 1  # 1: lambda
            side_forward = side.products + side.attention + 2 * shape.own_tokens * down
            side_backward = 2 * (side.products + side.attention) + 2 * shape.own_tokens * down  # no gradient into the backbone
            context = side.kept_bytes + side.weight_inputs_bytes + side.per_token(2 * FP32_BYTES * narrow.hidden)
            # b_1, b_2, ...; the first layer of a side keeps b_0, its embedding, as well.
            firsts = (0, model.num_layers) if model.kind == "encoder-decoder" else (0,)
            tap = shape.per_token(FP32_BYTES * model.hidden * (2 if layer in firsts else 1))
            output, gradient = shape.output_bytes + side.output_bytes, side.output_bytes
        if layer == 0:
            trained += model.embedding_params if technique == "full" else 0
            frozen += 0 if technique == "full" else model.embedding_params
        if layer == model.stack_layers - 1:
            new, flops, kept = _head(model, technique, reduction, head, num_labels, shape)
            trained += new + (model.head_params if technique == "full" else 0)
            frozen += 0 if technique == "full" else model.head_params
            if technique == "parallel_adapters":
                side_forward, side_backward = side_forward + flops, side_backward + 2 * flops
            else:
                forward, backward = forward + flops, backward + 2 * flops
            context += kept
        costs.append(
            LayerCost(
                forward_flops=forward,
                backward_flops=backward,
                side_forward_flops=side_forward,
                side_backward_flops=side_backward,
                frozen_params=frozen,
                trainable_params=trained,
                output_bytes_per_token=round(output * batch / tokens),
                gradient_bytes_per_token=round(gradient * batch / tokens),
                context_bytes_per_token=round(context * batch / tokens),
                tap_bytes_per_token=round(tap * batch / tokens),
                workspace_bytes_per_token=round(shape.workspace_bytes * batch / tokens),
            )
        )
    return tuple(costs)


def total_flops(costs: tuple[LayerCost, ...]) -> float:
    """Return the FLOPs of one training step, the optimizer left out (PAC+ Fig. 3)."""
    return sum(cost.forward_flops + cost.backward_flops + cost.side_forward_flops + cost.side_backward_flops for cost in costs)


class _Shape:
    """The FLOPs of a batch and the bytes of one sample in one layer of the stack."""

    def __init__(self, model: ModelDescription, layer: int, batch: int, sequence_length: int) -> None:
        decoder = model.is_decoder_layer(layer)
        own = model.target_tokens if decoder else sequence_length
        self.model, self.own = model, own
        self.own_tokens = batch * own
        self.attentions = 2 if decoder else 1
        weights = model.matrices_of_attention + model.matrices_of_feed_forward
        self.products = 2.0 * batch * own * weights
        self.attention = 4.0 * batch * own * own * model.query_width
        scores = own * own
        keys = 0
        if decoder:  # q and o see the decoder's tokens, k and v the encoder's
            self.products += 2.0 * batch * 2 * model.hidden * (own * model.query_width + sequence_length * model.kv_width)
            self.attention += 4.0 * batch * own * sequence_length * model.query_width
            scores += own * sequence_length
            keys = sequence_length
        # One sample's bytes.  Kept whatever is trained: inputs of two norms (an eager RMSNorm keeps its result too), q, k, v; of the
        # scores the softmax's result, its dropout's mask and result (4 + 1 + 4); the activation's input; the masks of three dropouts.
        norm = 2 if model.norm_vectors == 1 else 1
        up = 2 if model.gated else 1
        self.kept_bytes = (
            own * ((self.attentions + 1) * norm * FP32_BYTES * model.hidden + FP32_BYTES * (model.query_width + 2 * model.kv_width))
            + (own * FP32_BYTES * model.query_width + keys * FP32_BYTES * 2 * model.kv_width if decoder else 0)
            + model.heads * scores * (2 * FP32_BYTES + 1)
            + own * model.feed_forward * (FP32_BYTES * up + 1)
            + own * (self.attentions + 1) * model.hidden
        )
        # Kept for the gradients of the backbone's own weights: inputs of q, k, v, of o, and of the feed-forward's matrices.
        self.weight_inputs_bytes = (
            FP32_BYTES * own * (self.attentions * (model.hidden + model.query_width) + model.hidden + model.feed_forward)
        )
        self.output_bytes = FP32_BYTES * model.hidden * (own + keys)
        self.workspace_bytes = FP32_BYTES * (2 * own * up * model.feed_forward + 2 * model.heads * max(own * own, own * keys))

    def per_token(self, nbytes: int) -> int:
        """Return one sample's bytes of something that each of the layer's own tokens has."""
        return self.own * nbytes


def _narrow(model: ModelDescription, reduction: int) -> ModelDescription:
    """Return the side network: all widths 1/r of the backbone's (section IV-A), heads fewer where the width asks for it."""
    hidden = max(1, model.hidden // reduction)
    heads = max(1, min(model.heads, hidden // 4))
    while hidden % heads:
        heads -= 1
    return ModelDescription(
        name=f"{model.name}/{reduction}",
        kind=model.kind,
        num_layers=model.num_layers,
        hidden=hidden,
        heads=heads,
        feed_forward=max(1, model.feed_forward // reduction),
        vocab=model.vocab,
        gated=model.gated,
        biases=model.biases,
        norm_vectors=model.norm_vectors,
        target_tokens=model.target_tokens,
    )


def _head(
    model: ModelDescription, technique: Technique, reduction: int, head: str, num_labels: int, shape: _Shape
) -> tuple[int, float, float]:
    """Return the head's new trainable parameters, its forward FLOPs for the batch and one sample's context bytes."""
    batch = shape.own_tokens // shape.own
    up = model.hidden // reduction * model.hidden if technique == "parallel_adapters" else 0
    if head == "language":
        flops = 2.0 * shape.own_tokens * (up + model.hidden * model.vocab)
        return up, flops, float(FP32_BYTES * shape.own * (model.hidden + 2 * model.vocab))
    flops = 2.0 * (shape.own_tokens * up + batch * model.hidden * num_labels)
    kept = FP32_BYTES * (shape.own * model.hidden * bool(up) + model.hidden)
    return up + model.hidden * num_labels + num_labels, flops, float(kept)


def analytic_profile(
    model: ModelDescription | str,
    cluster: Cluster,
    *,
    technique: Technique = "parallel_adapters",
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES,
    sequence_lengths: tuple[int, ...] = (128,),
    reduction: int = 8,
    lora_rank: int = 32,
    bottleneck: int = 64,
    head: Literal["classification", "language"] = "classification",
    num_labels: int = 2,
    overhead_s: float = 0.0,
) -> Profile:
    """Return a profile computed from sizes and each device's flops_per_s.

    overhead_s: added to every operation of every layer.  Bytes per token are those at the longest sequence length.
    """
    described = describe(model) if isinstance(model, str) else model
    grid = {
        (batch, length): layer_costs(
            described,
            technique,
            batch=batch,
            sequence_length=length,
            reduction=reduction,
            lora_rank=lora_rank,
            bottleneck=bottleneck,
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
                _layer_profile(described, layer, grid, device, batch_sizes, sequence_lengths, overhead_s)
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
) -> LayerProfile:
    longest = grid[batch_sizes[-1], sequence_lengths[-1]][layer]

    def table(seconds: dict[tuple[int, int], float]) -> Grid:
        cells = tuple(tuple(seconds[batch, length] for length in sequence_lengths) for batch in batch_sizes)
        return Grid(batch_sizes=batch_sizes, sequence_lengths=sequence_lengths, seconds=cells)

    times = {}
    for kind, name in (("F", "forward_flops"), ("B", "backward_flops"), ("SF", "side_forward_flops"), ("SB", "side_backward_flops")):
        if getattr(longest, name) > 0:
            times[kind] = table({at: overhead_s + getattr(costs[layer], name) / device.flops_per_s for at, costs in grid.items()})
    if longest.tap_bytes_per_token:
        rate = device.storage_bytes_per_s
        times["LOAD"] = table({(b, n): overhead_s + b * n * longest.tap_bytes_per_token / rate for b, n in grid})
    step = longest.trainable_params * ADAMW_FLOPS_PER_PARAM / device.flops_per_s
    times["STEP"] = table(dict.fromkeys(grid, step))
    return LayerProfile(
        name=f"{model.name} {'decoder' if model.is_decoder_layer(layer) else model.kind.split('-')[0]} layer {layer}",
        times=times,
        frozen_bytes=longest.frozen_params * FP32_BYTES,
        trainable_bytes=longest.trainable_params * FP32_BYTES,
        output_bytes_per_token=longest.output_bytes_per_token,
        context_bytes_per_token=longest.context_bytes_per_token,
        gradient_bytes_per_token=longest.gradient_bytes_per_token,
        tap_bytes_per_token=longest.tap_bytes_per_token,
        workspace_bytes_per_token=longest.workspace_bytes_per_token,
    )
