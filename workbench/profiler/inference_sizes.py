"""Sizes of a transformer's stacks as single-shot inference cuts them: heads or their groups, columns, tokens (Galaxy+, Table V, Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.profiler.descriptions import FP32_BYTES, ModelDescription, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSizes:
    """One stack: its shape, and what the FLOPs of its operations follow from.

    query_width: numbers of one token's queries in one unit (a head, or the heads of a group that share keys and values).
    kv_width: numbers of its keys, and as many of its values.  heads_per_unit: 1, or those of a group.
    matrices: of the feed-forward network, 2, or 3 with a gate.
    """

    shape: StackShape
    query_width: int
    kv_width: int
    heads_per_unit: int = 1
    matrices: int = 2

    def __post_init__(self) -> None:
        if min(self.query_width, self.kv_width, self.heads_per_unit) < 1 or self.matrices not in (2, 3):
            raise ConfigError(
                f"A stack of {self.shape.num_layers} layers was described.",
                f"Widths {self.query_width} and {self.kv_width}, {self.heads_per_unit} heads, {self.matrices} matrices.",
                "Widths and heads must be at least 1, the matrices 2 or 3.",
            )

    @property
    def head_width(self) -> int:
        """Return the numbers of one head's query."""
        return self.query_width // self.heads_per_unit

    def unit_width(self, kind: str) -> int:
        """Return the width of one unit's or column's part of a product's weights, whose other side is the hidden size."""
        query, both = self.query_width, 2 * self.kv_width
        return {"QKV": query + both, "OUT": query, "CQ": query, "CKV": both, "COUT": query, "UP": self.matrices - 1, "DOWN": 1}[kind]

    def unit_flops(self, kind: str) -> float:
        """Return the FLOPs of one unit for one token, of ATT and CATT for one query-key pair.  The kinds are core.inference's."""
        if kind in ("ATT", "CATT"):
            return 4.0 * self.query_width
        return 2.0 * self.shape.hidden_size * self.unit_width(kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of a layer's operations that are cut by units or columns."""
        crossed = ("CQ", "CKV", "CATT", "COUT") if self.shape.has_cross_attention else ()
        return ("QKV", "ATT", "OUT", *crossed, "UP", "DOWN")

    def layer_flops(self, tokens: int, memory_tokens: int = 0) -> float:
        """Return the FLOPs of one layer.  memory_tokens: of the encoder's output, which a cross-attention reads."""
        flops = 0.0
        for kind in self.kinds:
            units = self.shape.columns if kind in ("UP", "DOWN") else self.shape.num_units
            count = {"ATT": tokens * tokens, "CATT": tokens * memory_tokens, "CKV": memory_tokens}.get(kind, tokens)
            flops += self.unit_flops(kind) * units * count
        return flops


def stack_sizes(model: ModelDescription | str) -> tuple[StackSizes, ...]:
    """Return the sizes of a described model's stacks in fp32: one, or encoder and decoder."""
    described = describe(model) if isinstance(model, str) else model
    first = _sizes(described, decoder=False)
    return (first, _sizes(described, decoder=True)) if described.kind == "encoder-decoder" else (first,)


def sizes_of_shape(shape: StackShape, *, query_width: int, kv_width: int, heads_per_unit: int = 1, is_gated: bool = False) -> StackSizes:
    """Return the sizes of a stack whose shape is known, and of one unit of it: the widths of its queries and of its keys."""
    return StackSizes(shape=shape, query_width=query_width, kv_width=kv_width, heads_per_unit=heads_per_unit, matrices=2 + is_gated)


def end_bytes(model: ModelDescription | str) -> tuple[int, int]:
    """Return the bytes of embedding and head in fp32; an output matrix that is the embedding counts once, with it."""
    described = describe(model) if isinstance(model, str) else model
    return FP32_BYTES * described.embedding_params, FP32_BYTES * described.head_params


def _sizes(model: ModelDescription, *, decoder: bool) -> StackSizes:
    groups = model.kv_heads or model.heads
    if model.heads % groups:
        raise ConfigError(
            f"Cutting '{model.name}' by heads was asked for.", f"{model.heads} heads share {groups} keys and values.", "Choose a multiple."
        )
    query, kv = model.query_width // groups, model.kv_width // groups
    matrices = 3 if model.gated else 2
    biased = int(model.biases)
    attentions = 2 if decoder else 1
    unit_bytes = FP32_BYTES * (model.hidden * (2 * query + 2 * kv) + biased * (query + 2 * kv))
    shape = StackShape(
        num_layers=model.num_layers,
        num_units=groups,
        hidden_size=model.hidden,
        columns=model.feed_forward,
        unit_bytes=unit_bytes,
        column_bytes=FP32_BYTES * (matrices * model.hidden + biased * (matrices - 1)),
        layer_bytes=FP32_BYTES * ((attentions + 1) * (model.norm_vectors + biased) * model.hidden),
        cross_unit_bytes=unit_bytes if decoder else 0,
        hidden_bytes=FP32_BYTES * model.hidden,
        kv_unit_bytes=FP32_BYTES * 2 * kv,
        has_cross_attention=decoder,
        is_causal=decoder or model.kind == "decoder",
    )
    return StackSizes(shape=shape, query_width=query, kv_width=kv, heads_per_unit=model.heads // groups, matrices=matrices)
