"""Describe transformer models by their sizes and count their parameters (PAC+ Table III, Galaxy+ Table V, Confidant Table 3, P-RGE)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from workbench.core.errors import ConfigError

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The sizes of a transformer.  num_layers: of each side of an encoder-decoder, as the papers count them.

    kv_heads, head_dim: heads and hidden / heads if not given.  gated: three feed-forward matrices (SwiGLU) instead of two.
    positions: rows of learned position embeddings.  segments: rows of segment embeddings.  pooler: a dense layer on the first token.
    norm_vectors: vectors of hidden numbers in a norm (2: LayerNorm, 1: RMSNorm).  final_norm: a norm after the last layer.
    relative_buckets: relative position biases per head, once for each side (T5).
    target_tokens: tokens on the decoder side of an encoder-decoder; classification needs few.
    """

    name: str
    kind: Literal["encoder", "decoder", "encoder-decoder"]
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
                asked = f"Model '{self.name}' was described with {name} = {getattr(self, name)}."
                raise ConfigError(asked, "It must be at least 1.", "Raise it.")
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
        """Return L of PAC+ Table II: the encoder's and the decoder's layers in a row."""
        return self.num_layers * (2 if self.kind == "encoder-decoder" else 1)

    @property
    def matrices_of_attention(self) -> int:
        """Return the weights of q, k, v and o, without biases."""
        return 2 * self.hidden * (self.query_width + self.kv_width)

    @property
    def matrices_of_feed_forward(self) -> int:
        """Return the feed-forward weights, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    def is_decoder_layer(self, layer: int) -> bool:
        """Return whether the stack's layer has cross-attention."""
        return self.kind == "encoder-decoder" and layer >= self.num_layers

    def layer_params(self, layer: int) -> int:
        """Return the parameters of a layer of the stack."""
        attentions = 2 if self.is_decoder_layer(layer) else 1
        bias = (2 * self.kv_width + self.query_width + self.hidden) * attentions + self.feed_forward + self.hidden
        return (
            attentions * self.matrices_of_attention
            + self.matrices_of_feed_forward
            + (bias if self.biases else 0)
            + (attentions + 1) * self.norm_vectors * self.hidden
        )

    @property
    def embedding_params(self) -> int:
        """Return the parameters in front of the first layer."""
        sides = 2 if self.kind == "encoder-decoder" else 1
        rows = self.vocab + sides * self.positions + self.segments
        norms = sides * self.norm_vectors * self.hidden if self.embedding_norm else 0
        return rows * self.hidden + norms + sides * self.relative_buckets * self.heads

    @property
    def head_params(self) -> int:
        """Return the pretrained parameters behind the last layer: final norms, pooler, an output matrix of its own."""
        sides = 2 if self.kind == "encoder-decoder" else 1
        params = sides * self.norm_vectors * self.hidden if self.final_norm else 0
        params += self.hidden * (self.hidden + 1) if self.pooler else 0
        return params + (0 if self.tied_head else self.vocab * self.hidden)

    @property
    def params(self) -> int:
        """Return all parameters."""
        return self.embedding_params + sum(map(self.layer_params, range(self.stack_layers))) + self.head_params


def _t5(name: str, num_layers: int, hidden: int, heads: int, feed_forward: int) -> ModelDescription:
    return ModelDescription(
        name=name,
        kind="encoder-decoder",
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        feed_forward=feed_forward,
        vocab=32128,
        biases=False,
        norm_vectors=1,
        final_norm=True,
        relative_buckets=32,
    )


def _bert(name: str, num_layers: int, hidden: int, heads: int, *, distilled: bool = False) -> ModelDescription:
    return ModelDescription(
        name=name,
        kind="encoder",
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        feed_forward=4 * hidden,
        vocab=30522,
        positions=512,
        segments=0 if distilled else 2,
        pooler=not distilled,
        embedding_norm=True,
    )


def _gpt(name: str, num_layers: int, hidden: int, heads: int, *, vocab: int = 50257, positions: int = 1024) -> ModelDescription:
    return ModelDescription(
        name=name,
        kind="decoder",
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        feed_forward=4 * hidden,
        vocab=vocab,
        positions=positions,
        final_norm=True,
    )


# ViT-H/14 at 224 x 224.  In front of its layers no vocabulary, but as many rows: 14 x 14 x 3 of the patches, a bias, the class token.
_VIT_HUGE = ModelDescription(
    name="ViT-Huge",
    kind="encoder",
    num_layers=32,
    hidden=1280,
    heads=16,
    feed_forward=5120,
    vocab=14 * 14 * 3 + 2,
    positions=257,
    pooler=True,
    final_norm=True,
)


def _llama(
    name: str, num_layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int, vocab: int, *, tied_head: bool
) -> ModelDescription:
    return ModelDescription(
        name=name,
        kind="decoder",
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=feed_forward,
        vocab=vocab,
        gated=True,
        biases=False,
        norm_vectors=1,
        final_norm=True,
        tied_head=tied_head,
    )


_BART_LARGE = ModelDescription(
    name="BART-Large",
    kind="encoder-decoder",
    num_layers=12,
    hidden=1024,
    heads=16,
    feed_forward=4096,
    vocab=50265,
    positions=1026,
    embedding_norm=True,
)

MODELS: dict[str, ModelDescription] = {
    model.name: model
    for model in (
        _t5("T5-Base", 12, 768, 12, 3072),
        _t5("T5-Large", 24, 1024, 16, 4096),
        _BART_LARGE,
        _bert("BERT-Base", 12, 768, 12),
        _bert("BERT-Large", 24, 1024, 16),
        _bert("DistilBERT", 6, 768, 12, distilled=True),
        _VIT_HUGE,
        _bert("all-MiniLM-L6-v2", 6, 384, 12),
        _gpt("GPT2", 12, 768, 12),
        _gpt("GPT2-Large", 36, 1280, 20),
        _gpt("OPT-1.3B", 24, 2048, 32, vocab=50272, positions=2050),
        _gpt("OPT-2.7B", 32, 2560, 32, vocab=50272, positions=2050),
        _llama("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, tied_head=True),
        _llama("TinyLlama-1.1B", 22, 2048, 32, 4, 5632, 32000, tied_head=False),
        _llama("Llama2-7B", 32, 4096, 32, 32, 11008, 32000, tied_head=False),
    )
}


def describe(name: str) -> ModelDescription:
    """Return a model's description by name.  Raises ConfigError naming the known ones."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"The sizes of model '{name}' were asked for.", f"Known: {', '.join(MODELS)}.{hint}", "Write a ModelDescription.")
    return MODELS[name]
