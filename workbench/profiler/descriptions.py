"""Describe transformer models by their sizes and count their parameters (PAC+ Table III, Galaxy+ Table V, Confidant Table 3, P-RGE)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from workbench.core.errors import ConfigError

FP32_BYTES = 4
Kind = Literal["encoder", "decoder", "encoder-decoder"]


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


def _described(
    name: str, kind: Kind, num_layers: int, hidden: int, heads: int, feed_forward: int, vocab: int, **more: Any
) -> ModelDescription:
    return ModelDescription(
        name=name, kind=kind, num_layers=num_layers, hidden=hidden, heads=heads, feed_forward=feed_forward, vocab=vocab, **more
    )


_T5 = {"biases": False, "norm_vectors": 1, "final_norm": True, "relative_buckets": 32}
_BERT = {"positions": 512, "segments": 2, "pooler": True, "embedding_norm": True}
_DISTILLED = _BERT | {"segments": 0, "pooler": False}
_GPT = {"positions": 1024, "final_norm": True}
_OPT = _GPT | {"positions": 2050}
_LLAMA = {"gated": True, "biases": False, "norm_vectors": 1, "final_norm": True, "tied_head": False}

MODELS: dict[str, ModelDescription] = {
    model.name: model
    for model in (
        _described("T5-Base", "encoder-decoder", 12, 768, 12, 3072, 32128, **_T5),
        _described("T5-Large", "encoder-decoder", 24, 1024, 16, 4096, 32128, **_T5),
        _described("BART-Large", "encoder-decoder", 12, 1024, 16, 4096, 50265, positions=1026, embedding_norm=True),
        _described("BERT-Base", "encoder", 12, 768, 12, 3072, 30522, **_BERT),
        _described("BERT-Large", "encoder", 24, 1024, 16, 4096, 30522, **_BERT),
        _described("DistilBERT", "encoder", 6, 768, 12, 3072, 30522, **_DISTILLED),
        # ViT-H/14 at 224 x 224.  In front of its layers no vocabulary, but as many rows: 14 x 14 x 3 of the patches, a bias, the class
        # token.
        _described("ViT-Huge", "encoder", 32, 1280, 16, 5120, 14 * 14 * 3 + 2, positions=257, pooler=True, final_norm=True),
        _described("all-MiniLM-L6-v2", "encoder", 6, 384, 12, 1536, 30522, **_BERT),
        _described("GPT2", "decoder", 12, 768, 12, 3072, 50257, **_GPT),
        _described("GPT2-Large", "decoder", 36, 1280, 20, 5120, 50257, **_GPT),
        _described("OPT-1.3B", "decoder", 24, 2048, 32, 8192, 50272, **_OPT),
        _described("OPT-2.7B", "decoder", 32, 2560, 32, 10240, 50272, **_OPT),
        _described("SmolLM2-135M", "decoder", 30, 576, 9, 1536, 49152, kv_heads=3, **(_LLAMA | {"tied_head": True})),
        _described("TinyLlama-1.1B", "decoder", 22, 2048, 32, 5632, 32000, kv_heads=4, **_LLAMA),
        _described("Llama2-7B", "decoder", 32, 4096, 32, 11008, 32000, kv_heads=32, **_LLAMA),
    )
}


def describe(name: str) -> ModelDescription:
    """Return a model's description by name.  Raises ConfigError naming the known ones."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"The sizes of model '{name}' were asked for.", f"Known: {', '.join(MODELS)}.{hint}", "Write a ModelDescription.")
    return MODELS[name]
