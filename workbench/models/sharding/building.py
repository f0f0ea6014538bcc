"""Find the blocks of a Hugging Face model with the families' tables, and read the slices of its weights (Galaxy+,
section III-B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.core.names import FP32_BYTES
from workbench.core.once import once
from workbench.models.configuration import is_tiny, model_config, model_from_config, stored_weights
from workbench.models.facts_cache import cached_facts
from workbench.models.families import family_of
from workbench.models.family import POSITION_OFFSET, Family, Part, module_at
from workbench.models.loading import load_model
from workbench.models.matmul import head_bias_of
from workbench.models.partial_loading import HEAD, head_names, parameters_on_meta, stored_under
from workbench.models.sharding.block import Block
from workbench.models.sharding.layer_blocks import layer_blocks, norm_layout
from workbench.models.sharding.layout import LayoutFacts, ModelLayout, StackLayout
from workbench.models.stack import LayerStack
from workbench.models.stored_tensors import Span, StoredTensor, require_finite, stored_as


def model_layout(model: Any) -> ModelLayout:
    """Return a model's layout without its weights.

    model: a name as in `load_stack`, or a Hugging Face model in memory.  Raises as `load_stack` does.
    """
    config = model_config(model) if isinstance(model, str) else model.config
    family = family_of(config.model_type)
    with parameters_on_meta():
        base = model_from_config(config)
    stack = LayerStack(base)
    named = list(base.named_parameters(remove_duplicate=False))
    sizes = {name: tuple(parameter.shape) for name, parameter in named}
    firsts: dict[int, str] = {}
    tied = {name: firsts.setdefault(id(parameter), name) for name, parameter in named}
    blocks: list[Block] = []
    parts = [_add_stack(base, stack, part, blocks, sizes) for part in (family, family.decoder) if part is not None]
    return ModelLayout(
        name=(model if isinstance(model, str) else "") or getattr(config, "_name_or_path", "") or config.model_type,
        config=config,
        family=family,
        blocks=tuple(blocks),
        parts=tuple(parts),
        sizes=sizes,
        stored_names=stored_under(base, family),
        tied={name: first for name, first in tied.items() if name != first},
        embeddings=tuple(modules for modules in (stack.embedding, stack.decoder_embedding) if modules is not None),
        rotary=stack.rotary,
        max_length=_max_length(config, dict(stack.embedding.items()).get("positions"), family),
    )


@once
def layout_facts(name: str) -> LayoutFacts:
    """Return the facts of a model's layout that planners need.  They are cached like ModelFacts, because computing the
    layout imports transformers.
    """
    return _tiny_facts(name) if is_tiny(name) else cached_facts(name, LayoutFacts, lambda: _find_facts(name))


def _find_facts(name: str) -> LayoutFacts:
    layout = model_layout(name)
    return LayoutFacts(stacks=layout.stacks, end_bytes=layout.end_bytes, max_length=layout.max_length)


_tiny_facts = cache(_find_facts)
"""A tiny model's facts depend on its name alone."""


def _add_stack(
    base: Any, stack: LayerStack, part: Part, blocks: list[Block], sizes: dict[str, tuple[int, ...]]
) -> StackLayout:
    """Append the blocks of the next stack to `blocks`, and return the stack's layout."""
    hidden_size, first_block = base.config.hidden_size, len(blocks)
    layers, before, is_decoder = base.get_submodule(part.layers), blocks[-1].layer + 1 if blocks else 0, bool(blocks)
    for index, layer in enumerate(layers):
        blocks += layer_blocks(
            base.config,
            stack.family,
            part,
            layer,
            path=f"{part.layers}.{index}.",
            index=index,
            layer_number=before + index,
            block_number=len(blocks),
            is_decoder=is_decoder,
            is_last=index == len(layers) - 1,
        )
    one_layer = {block.kind: block for block in blocks if block.layer == blocks[-1].layer}
    facts, feed_forward = one_layer["attention"].facts, one_layer["feed_forward"]
    unit_bytes = {kind: FP32_BYTES * block.unit_size(hidden_size) for kind, block in one_layer.items()}
    undivided = set().union(*(block.undivided for block in one_layer.values()))
    shape = StackShape(
        num_layers=len(layers),
        num_units=facts.num_units,
        hidden_size=hidden_size,
        columns=math.prod(sizes[feed_forward.output.weight]) // hidden_size,
        unit_bytes=unit_bytes["attention"],
        cross_unit_bytes=unit_bytes.get("cross_attention", 0),
        column_bytes=unit_bytes["feed_forward"],
        layer_bytes=FP32_BYTES * sum(math.prod(sizes[name]) for name in undivided),
        hidden_bytes=FP32_BYTES * hidden_size,
        kv_unit_bytes=2 * FP32_BYTES * facts.keys_per_unit * facts.head_size,
        head_size=facts.head_size,
        heads_per_unit=facts.heads_per_unit,
        keys_per_unit=facts.keys_per_unit,
        is_gated=len(feed_forward.cuts) == 2,
        has_cross_attention="cross_attention" in one_layer,
        is_causal=facts.is_causal,
    )
    final = module_at(base, part.final)
    return StackLayout(
        shape=shape,
        position_bias=f"{part.position_bias}.weight" if part.position_bias else "",
        final=None if final is None else norm_layout(final, part.final, adds_one=stack.family.norm_adds_one),
        first_block=first_block,
    )


def _max_length(config: Any, positions: Any, family: Family) -> int:
    if positions is not None:
        return positions.weight.shape[0] - POSITION_OFFSET
    return 0 if family.rotary or family.position_bias else family.max_positions(config) or 0


class WeightSource:
    """Reads rectangles of a model's matrices, by the parameter's name in the base model, or 'lm_head.weight',
    and its bias.

    tensors: in memory or in files.  From memory they are copied, so that the model can be released.  From files only
    the requested rectangles are read, and nothing is mapped.  bytes_read: bytes of weights read (or copied) so far.
    """

    def __init__(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        self._tensors, self.bytes_read = dict(tensors), 0
        self.is_on_disk = all(isinstance(tensor, StoredTensor) for tensor in tensors.values())

    @property
    def words_stand_in(self) -> bool:
        """Return whether the word embedding serves as the head of a model without one (a base model in memory)."""
        return not self.is_on_disk and HEAD not in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a stored tensor's shape.  None if no tensor has that name."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(tensor.shape)

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two names refer to one stored tensor.  Files may store tied weights separately."""
        place, same = (self._place(key) for key in (name, other))
        return place is not None and place == same

    def fill(self, out: Tensor, name: str, rows: Span, columns: Span | None = None) -> None:
        """Read rows [start, stop) and columns [start, stop) of a stored tensor into `out`, which has exactly that
        shape.

        columns: None reads all.  The entries of a vector count as rows.
        """
        tensor = self._tensors[name]
        if isinstance(tensor, StoredTensor):
            self.bytes_read += tensor.fill(out, rows, columns)
            require_finite(out, f"The weights '{tensor.path.name}'")
            return
        piece = tensor[slice(*rows)] if columns is None else tensor[slice(*rows), slice(*columns)]
        out.copy_(piece)
        self.bytes_read += piece.nbytes

    def close(self) -> None:
        """Release the weights.  The source cannot be used afterwards."""
        self._tensors.clear()

    def _place(self, name: str) -> object:
        tensor = self._tensors.get(name)
        return tensor.data_ptr() if isinstance(tensor, Tensor) else tensor


def open_weights(name: str, *, layout: ModelLayout | None = None) -> WeightSource:
    """Return the source of a model's weights.

    From a folder with safetensors only the requested parts are read.  Otherwise (tiny models, other formats or names)
    the whole model is loaded; close the source to release it.  Raises as `load_stack` does.
    """
    layout = layout or model_layout(name)
    tensors = stored_weights(name)
    if tensors is not None:
        bias = layout.family.head_bias
        names = {**layout.stored_names, HEAD: head_names(layout.family), bias: (bias,)}
        weights = {
            parameter_name: stored
            for parameter_name, others in names.items()
            if (stored := stored_as(others, tensors)) is not None
        }
        if all(
            parameter_name in weights and weights[parameter_name].shape == layout.sizes[parameter_name]
            for parameter_name in layout.names
        ):
            return WeightSource(weights)
    return weights_of(load_model(name))


def weights_of(model: Any) -> WeightSource:
    """Return the weights of a Hugging Face model in memory, including its language model head if it has one."""
    base: Any = getattr(model, "base_model", model)
    tensors = {name: parameter.detach() for name, parameter in base.named_parameters(remove_duplicate=False)}
    tensors.pop("lm_head.weight", None)  # T5 with a head is also its own base model
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        tensors["lm_head.weight"] = head.weight.detach()
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ConfigError("The weights of a model were asked for.", "It is on the meta device.", "Load it first.")
    bias = head_bias_of(model)
    if bias is not None:
        tensors[family_of(model.config.model_type).head_bias] = bias
    return WeightSource(tensors)
