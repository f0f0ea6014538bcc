"""The blocks of a layer of a transformers model: which weights each has, and where they are."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.models.family import Family, Part, epsilon_of, layer_paths, module_at, patterns_of, window_of
from workbench.models.sharding.block import Block, Cut, Kind, LayerFacts, NormLayout

_ROLES: dict[Kind, tuple[tuple[tuple[str, ...], ...], str]] = {
    "attention": ((("query", "key", "value"),), "output"),
    "cross_attention": ((("cross_query",), ("cross_key", "cross_value")), "cross_output"),
    "feed_forward": ((("gate", "up"),), "down"),
}
"""The projections of a block by role: groups of inputs, each computed as one matmul, and the output."""
_FUSED = {
    "query": "query_key_value",
    "key": "query_key_value",
    "value": "query_key_value",
    "gate": "gate_up",
    "up": "gate_up",
}
"""The stored tensor that contains a role, for roles without a separate tensor."""


def layer_blocks(
    config: Any,
    family: Family,
    part: Part,
    layer: nn.Module,
    *,
    path: str = "",
    index: int = 0,
    layer_number: int = 0,
    block_number: int = 0,
    is_decoder: bool = False,
    is_last: bool = False,
) -> list[Block]:
    """Return the blocks of layer `index` of a stack.

    part: the stack's description.  layer: its module, also with LoRA inside.  path: the layer's path in the model,
    ending with a dot.
    layer_number, block_number: numbers of the layer and of its first block, counted through all stacks.
    is_last: whether the layer is the last of its stack.
    """
    paths = layer_paths(part, layer)
    modules = {role: original(layer.get_submodule(module_path)) for role, module_path in paths.items()}
    heads = (getattr(config, "decoder_attention_heads", None) if is_decoder else None) or config.num_attention_heads
    key_heads = (None if is_decoder else getattr(config, "num_key_value_heads", None)) or heads
    head_size = modules["output"].weight.numel() // config.hidden_size // heads
    columns = modules["down"].weight.numel() // config.hidden_size

    def norm_at(norm_path: str) -> NormLayout | None:
        module = module_at(layer, norm_path)
        if module is None or isinstance(module, nn.Identity):
            return None
        return norm_layout(module, f"{path}{norm_path}", adds_one=family.norm_adds_one)

    head_norms = tuple(norm for norm in map(norm_at, part.head_norms) if norm is not None)
    # A norm over all heads of a token needs all of them on one device.
    num_units = 1 if any(norm.width != head_size for norm in head_norms) else key_heads
    facts = LayerFacts(
        num_units=num_units,
        heads_per_unit=heads // num_units,
        keys_per_unit=key_heads // num_units,
        head_size=head_size,
        is_causal=is_decoder or family.is_causal,
        is_pre_norm=family.norms_before(config),
        is_parallel=family.is_parallel(config),
        residual_scale=family.residual_scale(config),
        activation=getattr(config, family.activation),
    )
    widths = {"query": heads // num_units, "key": facts.keys_per_unit, "value": facts.keys_per_unit}
    starts = {"key": heads, "value": heads + key_heads, "up": columns}

    def cut(role: str) -> Cut | None:
        stored = role if role in paths else _FUSED.get(role, "")
        if stored not in paths:
            return None
        kind = role.removeprefix("cross_")
        width = 1 if role in ("gate", "up", "down") else head_size * widths.get(kind, heads // num_units)
        offset = stride = 0
        if stored != role:
            offset = starts.get(role, 0) * (1 if stored == "gate_up" else head_size)
        if stored == "query_key_value" and family.interleaves_heads:
            offset, stride = list(widths).index(role) * head_size, 3 * head_size
        return Cut(
            module=f"{path}{paths[stored]}",
            has_bias=modules[stored].bias is not None,
            width=width,
            offset=offset,
            stride=stride,
            is_transposed=not isinstance(modules[stored], nn.Linear),
        )

    kinds: tuple[Kind, ...] = ("attention", "cross_attention", "feed_forward")
    if "cross_query" not in paths:
        kinds = ("attention", "feed_forward")
    pattern = patterns_of(config, index + 1)[index]
    blocks: list[Block] = []
    for place, kind in enumerate(kinds):
        groups, role = _ROLES[kind]
        output = cut(role)
        assert output is not None
        norm_path, output_norm_path = (names[place] if names else "" for names in (part.norms, part.output_norms))
        blocks.append(
            Block(
                number=block_number + len(blocks),
                kind=kind,
                layer=layer_number,
                stack=int(is_decoder),
                is_last=is_last and kind == "feed_forward",
                inputs=tuple(tuple(piece for entry in group if (piece := cut(entry)) is not None) for group in groups),
                output=output,
                norm=norm_at(norm_path),
                output_norm=norm_at(output_norm_path),
                head_norms=head_norms if kind == "attention" else (),
                facts=facts,
                pattern=pattern,
                window=window_of(config, pattern),
                has_rotary=family.uses_rotary(config, index),
                scale=family.score_scale(config, head_size, index),
            )
        )
    return blocks


def norm_layout(module: Any, path: str, *, adds_one: bool) -> NormLayout:
    """Return the layout of a norm at a path."""
    weight = module.weight
    return NormLayout(
        weight=f"{path}.weight" if weight is not None else "",
        bias=f"{path}.bias" if getattr(module, "bias", None) is not None else "",
        width=module.normalized_shape[0] if weight is None else len(weight),
        eps=epsilon_of(module),
        is_rms=not isinstance(module, nn.LayerNorm),
        adds_one=adds_one,
    )


def original(module: Any) -> Any:
    """Return the projection inside a module of LoRA, or the module itself."""
    return getattr(module, "base_layer", module)
