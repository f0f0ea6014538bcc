"""Describe transformer models by their sizes and count their parameters (PAC+ Table III, Galaxy+ Table V, Confidant
Table 3, P-RGE).

The module also counts one layer's FLOPs, and the bytes that PyTorch's autograd keeps for it (PAC+, Table I, Fig. 3).
FLOPs: 2 for each weight and token, 4 x tokens x tokens x width for the attention's two products; norms and activations
not counted.
Bytes: fp32, eager attention, with dropout, as torch.autograd.graph.saved_tensors_hooks counts them (a test compares the
two for T5 and BART); Korthikanti et al., 'Reducing Activation Recomputation in Large Transformer Models' (2022),
section 4, count in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.names import FP32_BYTES
from workbench.core.profile import Bytes
from workbench.core.serial import from_builtins, read_toml

Kind = Literal["encoder", "decoder", "encoder-decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The sizes of a transformer.  num_layers: as the papers count them, on each side of an encoder-decoder.

    kv_heads, head_dim: heads and hidden / heads if not given.  gated: three feed-forward matrices (SwiGLU) instead of
    two.
    positions: rows of learned position embeddings.  segments: rows of segment embeddings.  pooler: a dense layer on the
    first token.
    norm_vectors: vectors of hidden numbers in a norm (2: LayerNorm, 1: RMSNorm).  final_norm: a norm after the last
    layer.
    relative_buckets: relative position biases per head, once for each side (T5).
    target_tokens: tokens on the decoder side of an encoder-decoder; classification needs few.
    """

    name: str
    kind: Kind
    num_layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    biases: bool = True
    positions: int = 0
    segments: int = 0
    pooler: bool = False
    norm_vectors: int = 2
    embedding_norm: bool = False
    final_norm: bool = False
    tied_head: bool = True
    relative_buckets: int = 0
    target_tokens: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "heads", "feed_forward", "vocab", "target_tokens"):
            if getattr(self, name) < 1:
                request = f"Model '{self.name}' was described with {name} = {getattr(self, name)}."
                raise ConfigError(request, "It must be at least 1.", "Raise it.")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(
                f"Model '{self.name}' was described with {self.heads} heads.",
                f"{self.hidden} is not a multiple of {self.heads}.",
                "Give head_dim.",
            )

    @property
    def query_width(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Return the width of all key (or value) heads together."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @property
    def stack_layers(self) -> int:
        """Return L of PAC+ Table II: the number of encoder and decoder layers together."""
        return self.num_layers * (2 if self.kind == "encoder-decoder" else 1)

    @property
    def matrices_of_attention(self) -> int:
        """Return the weights of q, k, v and o, without biases."""
        return 2 * self.hidden * (self.query_width + self.kv_width)

    @property
    def matrices_of_feed_forward(self) -> int:
        """Return the feed-forward weights, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    def layer_matrices(self, layer: int) -> int:
        """Return the weights in the matrices of a layer of the stack, without biases."""
        return (2 if self.is_decoder_layer(layer) else 1) * self.matrices_of_attention + self.matrices_of_feed_forward

    def is_decoder_layer(self, layer: int) -> bool:
        """Return whether the stack's layer has cross-attention."""
        return self.kind == "encoder-decoder" and layer >= self.num_layers

    def layer_params(self, layer: int) -> int:
        """Return the parameters of a layer of the stack."""
        attentions = 2 if self.is_decoder_layer(layer) else 1
        bias = (2 * self.kv_width + self.query_width + self.hidden) * attentions + self.feed_forward + self.hidden
        return (
            self.layer_matrices(layer)
            + (bias if self.biases else 0)
            + (attentions + 1) * self.norm_vectors * self.hidden
        )

    @property
    def embedding_tables(self) -> int:
        """Return the values of the tables of words and positions."""
        return (self.vocab + (2 if self.kind == "encoder-decoder" else 1) * self.positions) * self.hidden

    @property
    def embedding_params(self) -> int:
        """Return the parameters before the first layer."""
        sides = 2 if self.kind == "encoder-decoder" else 1
        norms = sides * self.norm_vectors * self.hidden if self.embedding_norm else 0
        return self.embedding_tables + self.segments * self.hidden + norms + sides * self.relative_buckets * self.heads

    @property
    def head_params(self) -> int:
        """Return the pretrained parameters after the last layer: final norms, pooler, and an untied output matrix."""
        sides = 2 if self.kind == "encoder-decoder" else 1
        params = sides * self.norm_vectors * self.hidden if self.final_norm else 0
        params += self.hidden * (self.hidden + 1) if self.pooler else 0
        return params + (0 if self.tied_head else self.vocab * self.hidden)

    @property
    def params(self) -> int:
        """Return the total number of parameters."""
        return self.embedding_params + sum(map(self.layer_params, range(self.stack_layers))) + self.head_params


MODELS: dict[str, ModelDescription] = {
    entry["name"]: from_builtins(family | entry, ModelDescription, source=f"'{entry['name']}' of 'models.toml'")
    for family in read_toml(data_folder() / "models.toml").values()
    for entry in family.pop("models")
}


def describe(model: ModelDescription | str) -> ModelDescription:
    """Return a model's description, also by name.  Raises ConfigError naming the known models."""
    if isinstance(model, ModelDescription):
        return model
    if model not in MODELS:
        request, problem = f"The sizes of model '{model}' were asked for.", f"Known: {', '.join(MODELS)}."
        raise ConfigError(request, problem, did_you_mean(model, MODELS, "Write a ModelDescription."))
    return MODELS[model]


MASK_BYTES = 1
"""Per element of a dropout mask (native_dropout keeps bool)."""


class LayerShape:
    """One layer of the stack at one sequence length."""

    def __init__(self, model: ModelDescription, layer: int, sequence_length: int) -> None:
        self.model, self.sequence_length = model, sequence_length
        self.decoder = model.is_decoder_layer(layer)
        self.own_tokens = model.target_tokens if self.decoder else sequence_length
        self.key_tokens = sequence_length if self.decoder else 0
        """Encoder tokens that the decoder's cross-attention attends to."""
        self.attentions = 2 if self.decoder else 1

    def own(self, nbytes: float) -> Bytes:
        """Return the total of `nbytes` for each of the layer's own tokens."""
        return Bytes(per_sample=self.own_tokens * nbytes) if self.decoder else Bytes(per_token=nbytes)

    def keys(self, nbytes: float) -> Bytes:
        """Return the total of `nbytes` for each encoder token in the cross-attention; 0 without cross-attention."""
        return Bytes(per_token=nbytes) if self.decoder else Bytes()

    @property
    def product_flops(self) -> float:
        """Return the forward FLOPs of the products with weights, for one sample."""
        model = self.model
        flops = 2.0 * self.own_tokens * (model.matrices_of_attention + model.matrices_of_feed_forward)
        if self.decoder:  # q and o process the decoder's tokens, k and v the encoder's
            flops += 4.0 * model.hidden * (self.own_tokens * model.query_width + self.key_tokens * model.kv_width)
        return flops

    @property
    def attention_flops(self) -> float:
        """Return the forward FLOPs of the products of activations with activations, for one sample."""
        return 4.0 * self.own_tokens * (self.own_tokens + self.key_tokens) * self.model.query_width

    @property
    def attention_share(self) -> float:
        """Return the share of a layer's forward FLOPs that is divided by heads: q, k, v, o, and the attention's two
        products.
        """
        attention = 2.0 * self.own_tokens * self.model.matrices_of_attention + self.attention_flops
        return attention / (self.product_flops + self.attention_flops)

    def activation_bytes(self, *, trained_norms: bool) -> Bytes:
        """Return the bytes that the backward pass needs for any trained parameters: gradients flow through everything.

        These are the inputs of the norms (with a trained weight an eager RMSNorm also keeps its normalised input), and
        q, k, v.  Of the scores they are the softmax's result, its dropout's mask and result.  Then come the
        feed-forward's activation and the mask after it, and the masks of the other dropouts.
        """
        model = self.model
        norm = 2 if trained_norms and model.norm_vectors == 1 else 1
        scores = model.heads * (2 * FP32_BYTES + MASK_BYTES)
        per_own = (
            (self.attentions + 1) * (norm * FP32_BYTES + MASK_BYTES) * model.hidden
            + FP32_BYTES * (self.attentions * model.query_width + 2 * model.kv_width)
            + scores * self.own_tokens
            + model.feed_forward * (FP32_BYTES * (2 if model.gated else 1) + MASK_BYTES)
        )
        return self.own(per_own) + self.keys(FP32_BYTES * 2 * model.kv_width + scores * self.own_tokens)

    def weight_inputs(self) -> Bytes:
        """Return the bytes for the gradients of all the layer's matrices: inputs of q, k, v, of o, and of the
        feed-forward's matrices.

        The k and v of all cross-attentions share the encoder's output, which is counted in the encoder's last layer.
        """
        model = self.model
        return self.own(
            FP32_BYTES * (self.attentions * (model.hidden + model.query_width) + model.hidden + model.feed_forward)
        )

    def lora_params(self, rank: int) -> int:
        """Return the parameters of A and B on q and v of every attention."""
        return self.attentions * rank * (2 * self.model.hidden + self.model.query_width + self.model.kv_width)

    def lora_flops(self, rank: int) -> float:
        """Return the forward FLOPs of A and B, for one sample."""
        q = rank * (self.model.hidden + self.model.query_width)
        v = rank * (self.model.hidden + self.model.kv_width)
        return 2.0 * (self.own_tokens * (self.attentions * q + v) + self.key_tokens * v)

    def lora_inputs(self, rank: int, *, dropout: bool) -> Bytes:
        """Return the bytes for the gradients of A and B: their inputs; a dropout before A makes a new one for each."""
        hidden = self.model.hidden
        if dropout:
            token_bytes = (FP32_BYTES + MASK_BYTES) * hidden + FP32_BYTES * rank
            return self.own((self.attentions + 1) * token_bytes) + self.keys(token_bytes)
        return self.own(FP32_BYTES * (self.attentions * hidden + (self.attentions + 1) * rank)) + self.keys(
            FP32_BYTES * rank
        )

    def output(self, value_bytes: float = FP32_BYTES) -> Bytes:
        """Return the bytes sent to the next layer; a decoder layer also forwards the encoder's output."""
        return self.own(value_bytes * self.model.hidden) + self.keys(value_bytes * self.model.hidden)

    def workspace(self, value_bytes: float = FP32_BYTES) -> Bytes:
        """Return the peak temporary memory of the forward pass: residual, normalised input, feed-forward width twice,
        scores twice.
        """
        model = self.model
        per_own = 2 * (model.hidden + model.feed_forward * (2 if model.gated else 1) + model.heads * self.own_tokens)
        return self.own(value_bytes * per_own) + self.keys(value_bytes * 2 * model.heads * self.own_tokens)
