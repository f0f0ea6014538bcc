"""Find the blocks of a Hugging Face model: one table entry for each family, beside that of `models/families.py` (Galaxy+, III-B)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.models.families import Decoder, Family, family_of
from workbench.models.family_parts import POSITION_OFFSET
from workbench.models.sharding.layout import Block, Cut, Kind, ModelLayout, NormLayout, StackLayout, shape_of
from workbench.models.sharding.weights import stored_under
from workbench.models.stack import LayerStack, module_at

_ROLES: dict[Kind, tuple[tuple[tuple[str, ...], ...], str]] = {
    "attention": ((("query", "key", "value"),), "output"),
    "cross_attention": ((("cross_query",), ("cross_key", "cross_value")), "cross_output"),
    "feed_forward": ((("gate", "up"),), "down"),
}
"""The projections of a block by role: groups of inputs, each computed as one product, and the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Where a family keeps its layers' norms, in the order of the blocks, and what its activation is called in the configuration.

    is_pre: whether a block's norm stands in front of it, or behind the residual addition; the name of a setting if that depends.
    has_head_bias: whether the language model head has one ('final_logits_bias').
    """

    encoder: tuple[str, ...]
    decoder: tuple[str, ...] = ()
    is_pre: bool | str
    activation: str
    has_head_bias: bool = False


NORMS: dict[str, Norms] = {
    "bert": Norms(encoder=("attention.output.LayerNorm", "output.LayerNorm"), is_pre=False, activation="hidden_act"),
    "distilbert": Norms(encoder=("sa_layer_norm", "output_layer_norm"), is_pre=False, activation="activation"),
    "vit": Norms(encoder=("layernorm_before", "layernorm_after"), is_pre=True, activation="hidden_act"),
    "gpt2": Norms(encoder=("ln_1", "ln_2"), is_pre=True, activation="activation_function"),
    "opt": Norms(encoder=("self_attn_layer_norm", "final_layer_norm"), is_pre="do_layer_norm_before", activation="activation_function"),
    "llama": Norms(encoder=("input_layernorm", "post_attention_layernorm"), is_pre=True, activation="hidden_act"),
    "t5": Norms(
        encoder=("layer.0.layer_norm", "layer.1.layer_norm"),
        decoder=("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
        is_pre=True,
        activation="dense_act_fn",
    ),
    "bart": Norms(
        encoder=("self_attn_layer_norm", "final_layer_norm"),
        decoder=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        is_pre=False,
        activation="activation_function",
        has_head_bias=True,
    ),
}


def layout_of(base: Any, name: str = "") -> ModelLayout:
    """Return the layout of a Hugging Face base model whose parameters are on the meta device (`parameters_on_meta`).

    Raises ConfigError for a family without support.
    """
    config = base.config
    family = family_of(config.model_type)
    norms = _norms(config.model_type)
    stack = LayerStack(base)
    sizes = {key: tuple(parameter.shape) for key, parameter in base.named_parameters(remove_duplicate=False)}
    is_pre = norms.is_pre if isinstance(norms.is_pre, bool) else bool(getattr(config, norms.is_pre))
    blocks: list[Block] = []
    parts: list[StackLayout] = []
    shapes: list[StackShape] = []
    for index, (part, places) in enumerate(((family, norms.encoder), (family.decoder, norms.decoder))):
        if part is None:
            continue
        first = blocks[-1].layer + 1 if blocks else 0
        builder = _StackBuilder(base, stack, part, places, index, first)
        parts.append(builder.layout(is_pre=is_pre, first_block=len(blocks)))
        blocks += builder.blocks(len(blocks))
        shapes.append(shape_of(parts[-1], [block for block in blocks if block.layer == first], sizes, config.hidden_size, torch.float32))
    positions = dict(stack.embedding.items()).get("positions")
    return ModelLayout(
        name=name or getattr(config, "_name_or_path", "") or config.model_type,
        config=config,
        family=family,
        blocks=tuple(blocks),
        parts=tuple(parts),
        stacks=tuple(shapes),
        activation=getattr(config, norms.activation),
        sizes=sizes,
        stored_names=stored_under(base, family),
        tied=_tied(base),
        embeddings=tuple(modules for modules in (stack.embedding, stack.decoder_embedding) if modules is not None),
        rotary=stack.rotary,
        has_head_bias=norms.has_head_bias,
        output_projection="decoder.project_out.weight" if "decoder.project_out.weight" in sizes else "",
        max_length=_max_length(config, positions, family),
    )


def _tied(base: Any) -> dict[str, str]:
    firsts: dict[int, str] = {}
    found = {name: firsts.setdefault(id(parameter), name) for name, parameter in base.named_parameters(remove_duplicate=False)}
    return {name: first for name, first in found.items() if name != first}


def require_support(config: Any) -> None:
    """Raise ConfigError for a family that cannot be cut."""
    family_of(config.model_type)
    _norms(config.model_type)


def _norms(model_type: str) -> Norms:
    if model_type not in NORMS:
        raise ConfigError(
            f"A model of the family '{model_type}' was to be cut into units and columns.",
            f"Families that can be cut are {', '.join(NORMS)}.",
            "Choose another model, or add the family's norms to NORMS in workbench/models/sharding/building.py.",
        )
    return NORMS[model_type]


class _StackBuilder:
    """Find the blocks of one stack."""

    def __init__(self, base: Any, stack: LayerStack, part: Family | Decoder, norms: tuple[str, ...], index: int, first: int) -> None:
        self.base, self.stack, self.part, self.norms, self.index, self.first = base, stack, part, norms, index, first
        self.config = base.config
        self.num_layers = len(base.get_submodule(part.layers))
        self.kinds: tuple[Kind, ...] = (
            ("attention", "feed_forward") if len(norms) == 2 else ("attention", "cross_attention", "feed_forward")
        )
        heads = self.config.num_attention_heads
        if index:
            heads = getattr(self.config, "decoder_attention_heads", None) or heads
        self.num_units = (getattr(self.config, "num_key_value_heads", None) or heads) if not index else heads
        self.group_size = heads // self.num_units
        self.paths = stack.layer_paths(first)
        output: Any = stack.layers[first].get_submodule(self.paths["output"])
        self.head_size = output.weight.numel() // self.config.hidden_size // heads

    def layout(self, *, is_pre: bool, first_block: int) -> StackLayout:
        up: Any = self.stack.layers[self.first].get_submodule(self.paths["up"])
        return StackLayout(
            num_layers=self.num_layers,
            num_units=self.num_units,
            group_size=self.group_size,
            head_size=self.head_size,
            columns=up.weight.numel() // self.config.hidden_size,
            is_gated="gate" in self.paths,
            is_causal=bool(self.index) or self.stack.is_causal,
            is_pre_norm=is_pre,
            position_bias=f"{self.part.position_bias}.weight" if self.part.position_bias else "",
            final=self._norm(self.part.final),
            first_block=first_block,
        )

    def blocks(self, number: int) -> Iterator[Block]:
        for layer in range(self.num_layers):
            for kind, norm in zip(self.kinds, self.norms, strict=True):
                groups, output = _ROLES[kind]
                path = f"{self.part.layers}.{layer}"
                found = self._norm(f"{path}.{norm}")
                assert found is not None
                yield Block(
                    number=number,
                    kind=kind,
                    layer=self.first + layer,
                    stack=self.index,
                    is_last=layer == self.num_layers - 1 and kind == "feed_forward",
                    inputs=tuple(tuple(cut for role in group for cut in self._cuts(path, kind, role)) for group in groups),
                    output=self._cut(path, self.paths[output], self._width(output)),
                    norm=found,
                    scale=self._scale(layer),
                )
                number += 1

    def _cuts(self, path: str, kind: Kind, role: str) -> Iterator[Cut]:
        if role in self.paths:
            yield self._cut(path, self.paths[role], self._width(role))
        elif kind == "attention" and "query_key_value" in self.paths:
            offset = ("query", "key", "value").index(role) * self.num_units * self.group_size * self.head_size
            yield self._cut(path, self.paths["query_key_value"], self._width(role), offset)

    def _cut(self, path: str, own: str, width: int, offset: int = 0) -> Cut:
        module: Any = self.base.get_submodule(f"{path}.{own}")
        bias = None if getattr(module, "bias", None) is None else f"{path}.{own}.bias"
        return Cut(weight=f"{path}.{own}.weight", bias=bias, width=width, offset=offset, is_transposed=not isinstance(module, nn.Linear))

    def _width(self, role: str) -> int:
        if role in ("gate", "up", "down"):
            return 1
        return self.head_size * (1 if role in ("key", "value", "cross_key", "cross_value") else self.group_size)

    def _scale(self, layer: int) -> float:
        """Return what the scores are multiplied by; GPT-2 can leave that out, or divide by the layer's number as well."""
        scale = self.head_size**-0.5 if self.stack.family.scales_attention and getattr(self.config, "scale_attn_weights", True) else 1.0
        return scale / (layer + 1) if getattr(self.config, "scale_attn_by_inverse_layer_idx", False) else scale

    def _norm(self, path: str) -> NormLayout | None:
        module: Any = module_at(self.base, path)
        if module is None:
            return None
        is_rms = not isinstance(module, nn.LayerNorm)
        has_weight, has_bias = module.weight is not None, getattr(module, "bias", None) is not None
        return NormLayout(
            weight=f"{path}.weight" if has_weight else "",
            bias=f"{path}.bias" if has_bias else "",
            eps=module.variance_epsilon if is_rms else module.eps,
            is_rms=is_rms,
        )


def _max_length(config: Any, positions: Any, family: Family) -> int:
    if positions is not None:
        return positions.weight.shape[0] - POSITION_OFFSET
    return 0 if family.rotary or family.position_bias else getattr(config, "max_position_embeddings", 0) or 0
