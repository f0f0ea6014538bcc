"""Count a transformer's FLOPs and bytes for each fine-tuning technique (PAC+, section II, Fig. 3, Table I; section
IV-A).

Backward: a matrix product costs its forward FLOPs once for the gradient of its input and, if its weight is trained,
once for the weight's.
descriptions.py has the counts of a single layer.  Each device's speed turns the counts into a profile (section V-A,
'Profiling').
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import check_choice
from workbench.core.names import FP32_BYTES
from workbench.core.once import once
from workbench.core.profile import Bytes, Grid, LayerBytes, LayerProfile, Profile
from workbench.profiler.descriptions import LayerShape, ModelDescription, describe

ADAMW_FLOPS_PER_PARAM = 12
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@once
def analytic_profile(
    model: ModelDescription | str,
    cluster: Cluster,
    *,
    technique: Technique = "parallel_adapters",
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES,
    sequence_lengths: tuple[int, ...] = (128,),
    sizes: TechniqueSizes | None = None,
    num_labels: int = 2,
    numbers: NumberFormat | None = None,
) -> Profile:
    """Return a profile computed from sizes and each device's flops_per_s.

    sizes: sizes of the technique's additions (default: TechniqueSizes').  numbers: number format of the frozen backbone
    (default: float32).
    Bytes per token are those at the longest sequence length.
    """
    described, form = describe(model), numbers or NumberFormat()
    settings: dict[str, Any] = {"sizes": sizes or TechniqueSizes(), "num_labels": num_labels, "numbers": form}
    grid = {
        (batch, length): layer_costs(described, technique, batch=batch, sequence_length=length, **settings)
        for batch in batch_sizes
        for length in sequence_lengths
    }

    def profile_of(layer: int, device: Device) -> LayerProfile:
        longest = grid[batch_sizes[-1], sequence_lengths[-1]][layer]
        table = partial(Grid.of, batch_sizes, sequence_lengths)

        def computed(flops: str) -> Grid:
            return table(lambda batch, length: getattr(grid[batch, length][layer], flops) / device.flops_per_s)

        kinds = {"F": "forward_flops", "B": "backward_flops", "SF": "side_forward_flops", "SB": "side_backward_flops"}
        times = {kind: computed(flops) for kind, flops in kinds.items() if getattr(longest, flops) > 0}
        if longest.tap_bytes(1, 1):
            stored = form.stored_tap_bytes / form.tap_bytes
            times["LOAD"] = table(lambda batch, length: device.loaded_s(stored * longest.tap_bytes(batch, length)))
            times["TAPE"] = table(lambda batch, length: device.stored_s(stored * longest.tap_bytes(batch, length)))
        times["STEP"] = table(lambda *_: longest.trainable_params * ADAMW_FLOPS_PER_PARAM / device.flops_per_s)
        return LayerProfile(
            name=f"{described.name} "
            f"{'decoder' if described.is_decoder_layer(layer) else described.kind.split('-')[0]} layer {layer}",
            times=times,
            frozen_bytes=longest.frozen_bytes,
            trainable_bytes=longest.trainable_params * FP32_BYTES,
            **{field.name: getattr(longest, field.name) for field in fields(LayerBytes)},
        )

    rows = tuple(
        tuple(profile_of(layer, device) for layer in range(described.stack_layers)) for device in cluster.devices
    )
    return Profile(model=described.name, method=technique, source="analytic", layers=rows, notes=form.notes)


Technique = Literal["full", "lora", "adapters", "parallel_adapters", "frozen"]
"""Which weights are trained; 'frozen': none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """The bytes of a frozen backbone's numbers, and the work of using them.

    matrix_bytes: bytes of a weight in a layer's matrices, with its share of the blocks' constants.  table_bytes: bytes
    of a weight in the tables of words and positions, which are also the matrix of predicted words.  value_bytes: bytes
    of a value in hidden states, norms and biases.
    unpack_flops: operations to turn a stored weight into one to compute with, each time that its matrix is used.
    tap_bytes, stored_tap_bytes: bytes of a cached value, in memory and on the disk.
    notes: sentences on what the times leave out.
    """

    matrix_bytes: float = FP32_BYTES
    table_bytes: float = FP32_BYTES
    value_bytes: float = FP32_BYTES
    unpack_flops: float = 0.0
    tap_bytes: float = FP32_BYTES
    stored_tap_bytes: float = FP32_BYTES
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(LayerBytes):
    """One layer's FLOPs for a batch, and its bytes.

    frozen_bytes: bytes of the frozen parameters in their number format.  copied_params: frozen parameters that are the
    word embedding's, too (a tied head), and a device without that layer holds again.
    """

    forward_flops: float
    backward_flops: float
    side_forward_flops: float
    side_backward_flops: float
    frozen_params: int
    frozen_bytes: int
    copied_params: int
    trainable_params: int

    @property
    def trainable_bytes(self) -> int:
        """Return the bytes of the trained parameters, in float32."""
        return FP32_BYTES * self.trainable_params


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueSizes:
    """The sizes of a technique's additions to a model.

    reduction: r of the Parallel Adapters (section IV-A); side_apart: whether they have separate operations and an
    activation cache.
    lora_rank: rank of LoRA on q and v of every attention.  lora_dropout: whether there is a dropout before A, as in
    peft.
    bottleneck: width of an adapter; adapters_per_layer: two (Houlsby et al.) or one at the layer's end (PAC+, section
    II); adapter_norms: whether the backbone's norms are trained together with the adapters (Houlsby et al., section
    2.1).
    predicts_words: whether the head is a frozen copy of the model's own, on the last quarter of the tokens.  The
    defaults give PAC+ Table I's 9 and 12 million parameters for T5-Large.
    """

    reduction: int = 8
    side_apart: bool = True
    lora_rank: int = 32
    lora_dropout: bool = False
    bottleneck: int = 64
    adapters_per_layer: int = 2
    adapter_norms: bool = False
    predicts_words: bool = False


@dataclass(slots=True)
class _Sum:
    """The sum of a layer's costs, for one sample.

    matrices, tables: numbers of frozen parameters in matrices and in tables.  copied: see LayerCost.
    """

    shape: LayerShape
    frozen: int
    matrices: int = 0
    tables: int = 0
    copied: int = 0
    trained: int = 0
    forward: float = 0.0
    backward: float = 0.0
    side_forward: float = 0.0
    side_backward: float = 0.0
    output: Bytes = field(default_factory=Bytes)
    gradient: Bytes = field(default_factory=Bytes)
    context: Bytes = field(default_factory=Bytes)
    tap: Bytes = field(default_factory=Bytes)


def layer_costs(
    model: ModelDescription,
    technique: Technique,
    *,
    batch: int,
    sequence_length: int,
    sizes: TechniqueSizes | None = None,
    num_labels: int = 2,
    numbers: NumberFormat | None = None,
) -> tuple[LayerCost, ...]:
    """Return every layer of the stack; the first includes the embedding, the last the head.  sizes, numbers: see
    analytic_profile.
    """
    check_choice("technique", technique, get_args(Technique))
    chosen, form = sizes or TechniqueSizes(), numbers or NumberFormat()
    costs = []
    for layer in range(model.stack_layers):
        layer_sum = _layer(model, layer, technique, sequence_length, chosen, form)
        if layer == 0:
            _add(layer_sum, technique, model.embedding_params, model.embedding_tables)
        if layer == model.stack_layers - 1:
            _add(layer_sum, technique, model.head_params, 0 if model.tied_head else model.vocab * model.hidden)
            if technique != "frozen":
                _add_head(layer_sum, model, technique, chosen, num_labels)
        if technique == "parallel_adapters" and not chosen.side_apart:
            layer_sum.forward += layer_sum.side_forward
            layer_sum.backward = layer_sum.side_backward
            layer_sum.context += layer_sum.tap
            layer_sum.side_forward, layer_sum.side_backward, layer_sum.tap = 0.0, 0.0, Bytes()
        costs.append(_cost(layer_sum, technique, batch, form))
    return tuple(costs)


def _layer(
    model: ModelDescription,
    layer: int,
    technique: Technique,
    sequence_length: int,
    sizes: TechniqueSizes,
    form: NumberFormat,
) -> _Sum:
    """Return a layer without embedding and head."""
    shape = LayerShape(model, layer, sequence_length)
    forward = shape.product_flops + shape.attention_flops
    layer_sum = _Sum(shape, model.layer_params(layer), matrices=model.layer_matrices(layer), forward=forward)
    layer_sum.output = layer_sum.gradient = shape.output(form.value_bytes)
    if technique == "frozen":
        layer_sum.gradient = Bytes()
    elif technique == "full":
        layer_sum.frozen, layer_sum.matrices, layer_sum.trained = 0, 0, layer_sum.frozen
        layer_sum.backward = 2 * layer_sum.forward
        layer_sum.context = shape.activation_bytes(trained_norms=True) + shape.weight_inputs()
    elif technique == "lora":
        layer_sum.trained = shape.lora_params(sizes.lora_rank)
        extra = shape.lora_flops(sizes.lora_rank)
        layer_sum.forward += extra
        layer_sum.backward = shape.product_flops + 2 * shape.attention_flops + 2 * extra
        layer_sum.context = shape.activation_bytes(trained_norms=False) + shape.lora_inputs(
            sizes.lora_rank, dropout=sizes.lora_dropout
        )
    elif technique == "adapters":
        number = sizes.adapters_per_layer
        layer_sum.trained = number * (2 * model.hidden * sizes.bottleneck + model.hidden + sizes.bottleneck)
        extra = 2.0 * shape.own_tokens * layer_sum.trained
        layer_sum.forward += extra
        layer_sum.backward = shape.product_flops + 2 * shape.attention_flops + 2 * extra
        if sizes.adapter_norms:
            norms = (shape.attentions + 1) * model.norm_vectors * model.hidden
            layer_sum.frozen -= norms
            layer_sum.trained += norms
        layer_sum.context = shape.activation_bytes(trained_norms=sizes.adapter_norms) + shape.own(
            number * FP32_BYTES * (model.hidden + sizes.bottleneck)
        )
    else:
        narrow = _narrow(model, sizes.reduction)
        side = LayerShape(narrow, layer, sequence_length)
        down = model.hidden * narrow.hidden
        side_flops = side.product_flops + side.attention_flops
        layer_sum.trained = narrow.layer_params(layer) + down + 1  # 1: lambda
        layer_sum.side_forward = side_flops + 2.0 * shape.own_tokens * down
        layer_sum.side_backward = 2 * side_flops + 2.0 * shape.own_tokens * down  # no gradient into the backbone
        layer_sum.context = (
            side.activation_bytes(trained_norms=True) + side.weight_inputs() + side.own(2 * FP32_BYTES * narrow.hidden)
        )
        # b_1, b_2, ...; the first layer of a side network keeps b_0, its embedding, as well.
        firsts = (0, model.num_layers) if model.kind == "encoder-decoder" else (0,)
        layer_sum.tap = shape.own(form.tap_bytes * model.hidden * (2 if layer in firsts else 1))
        layer_sum.gradient = side.output()
        layer_sum.output += layer_sum.gradient
    return layer_sum


def _add(layer_sum: _Sum, technique: Technique, params: int, tables: int) -> None:
    """Add pretrained parameters outside the layers, with those in tables; only full fine-tuning trains them."""
    if technique == "full":
        layer_sum.trained += params
    else:
        layer_sum.frozen += params
        layer_sum.tables += tables


def _add_head(
    layer_sum: _Sum, model: ModelDescription, technique: Technique, sizes: TechniqueSizes, num_labels: int
) -> None:
    """Add a classification head or a head that predicts words, and with Parallel Adapters the up-projection before it
    (section IV-A).
    """
    own_tokens = layer_sum.shape.own_tokens
    up = model.hidden // sizes.reduction * model.hidden if technique == "parallel_adapters" else 0
    flops = 2.0 * own_tokens * up
    back, words = 2 * flops, model.hidden * model.vocab
    layer_sum.trained += up
    layer_sum.context += layer_sum.shape.own(FP32_BYTES * model.hidden * bool(up))
    if sizes.predicts_words:
        flops += 0.5 * own_tokens * words
        back += 0.5 * own_tokens * words
        layer_sum.copied = words if model.tied_head else 0
        layer_sum.frozen += layer_sum.copied
        layer_sum.tables += layer_sum.copied
        layer_sum.context += layer_sum.shape.own(FP32_BYTES * model.vocab / 4)
    else:
        flops += 2.0 * model.hidden * num_labels
        back += 4.0 * model.hidden * num_labels
        layer_sum.trained += model.hidden * num_labels + num_labels
        layer_sum.context += Bytes(per_sample=FP32_BYTES * model.hidden)
    if technique == "parallel_adapters":
        layer_sum.side_forward += flops
        layer_sum.side_backward += back
    else:
        layer_sum.forward += flops
        layer_sum.backward += back


def _cost(layer_sum: _Sum, technique: Technique, batch: int, form: NumberFormat) -> LayerCost:
    stored = form.matrix_bytes * layer_sum.matrices + form.table_bytes * layer_sum.tables
    unpacked = form.unpack_flops * layer_sum.matrices  # once for the whole batch
    returns = (
        layer_sum.backward > 0 and technique != "parallel_adapters"
    )  # the pass back through the backbone unpacks again
    return LayerCost(
        forward_flops=batch * layer_sum.forward + unpacked,
        backward_flops=batch * layer_sum.backward + unpacked * returns,
        side_forward_flops=batch * layer_sum.side_forward,
        side_backward_flops=batch * layer_sum.side_backward,
        frozen_params=layer_sum.frozen,
        frozen_bytes=round(stored + form.value_bytes * (layer_sum.frozen - layer_sum.matrices - layer_sum.tables)),
        copied_params=layer_sum.copied,
        trainable_params=layer_sum.trained,
        output_bytes=layer_sum.output.rounded(),
        gradient_bytes=layer_sum.gradient.rounded(),
        context_bytes=layer_sum.context.rounded(),
        tap_bytes=layer_sum.tap.rounded(),
        workspace_bytes=layer_sum.shape.workspace(form.value_bytes).rounded(),
    )


def _narrow(model: ModelDescription, reduction: int) -> ModelDescription:
    """Return the side network: all widths 1/r of the backbone's (section IV-A), with fewer heads if the width requires
    it.
    """
    hidden = max(1, model.hidden // reduction)
    heads = max(1, min(model.heads, hidden // 4))
    while hidden % heads:
        heads -= 1
    return replace(
        model,
        name=f"{model.name}/{reduction}",
        hidden=hidden,
        heads=heads,
        kv_heads=0,
        head_dim=0,
        feed_forward=max(1, model.feed_forward // reduction),
    )
