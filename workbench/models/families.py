"""The model families that can be seen as a layer stack: one table entry each, nothing else to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What every layer of a batch needs beside its input.

    mask: (n, 1, t, t) bool, True where a query may look; None if it may look everywhere its family allows.
    rotary: cosines and sines, (1, t, head size) each; None for families without them.
    """

    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one Hugging Face architecture is taken apart.

    layers, final, rotary: where they are in the base model ('' if there is none).
    embed: (base model's embedding modules, ids (n, t), token types (n, t) or None) -> b_0 (n, t, d).
    call: (layer, hidden, context) -> hidden.
    weights: pieces of a layer by role (query, key, value, output, up, down), as paths; for pruning.
    """

    layers: str
    embedding: tuple[str, ...]
    embed: Callable[[Mapping[str, nn.Module], Tensor, Tensor | None], Tensor]
    call: Callable[[nn.Module, Tensor, LayerContext], Tensor]
    final: str = ""
    rotary: str = ""
    is_causal: bool = False
    has_token_types: bool = False
    weights: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)


def _embed_bert(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    return modules["embeddings"](input_ids=ids, token_type_ids=token_types)


def _embed_distilbert(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    return modules["embeddings"](ids)


def _embed_gpt2(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    positions: Any = modules["wpe"].weight
    return modules["wte"](ids) + positions[: ids.shape[1]]


def _embed_llama(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    return modules["embed_tokens"](ids)


def _call_masked(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    return layer(hidden, attention_mask=context.mask)


def _call_llama(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    return layer(hidden, attention_mask=context.mask, position_embeddings=context.rotary)


FAMILIES: dict[str, Family] = {
    "bert": Family(
        layers="encoder.layer",
        embedding=("embeddings",),
        embed=_embed_bert,
        call=_call_masked,
        has_token_types=True,
        weights={
            "query": "attention.self.query",
            "key": "attention.self.key",
            "value": "attention.self.value",
            "output": "attention.output.dense",
            "up": "intermediate.dense",
            "down": "output.dense",
        },
        tiny={"num_attention_heads": 4, "intermediate_size": 64},
    ),
    "distilbert": Family(
        layers="transformer.layer",
        embedding=("embeddings",),
        embed=_embed_distilbert,
        call=_call_masked,
        weights={
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "output": "attention.out_lin",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
        },
        tiny={"num_attention_heads": 4, "hidden_dim": 64},
    ),
    "gpt2": Family(
        layers="h",
        embedding=("wte", "wpe"),
        embed=_embed_gpt2,
        call=_call_masked,
        final="ln_f",
        is_causal=True,
        weights={"query_key_value": "attn.c_attn", "output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        tiny={"num_attention_heads": 4, "n_inner": 64},
    ),
    "llama": Family(
        layers="layers",
        embedding=("embed_tokens",),
        embed=_embed_llama,
        call=_call_llama,
        final="norm",
        rotary="rotary_emb",
        is_causal=True,
        weights={
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "output": "self_attn.o_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
        tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
    ),
}
