"""Layouts and weights of models by name: embedded, tiny and random, from a folder, or from the hub."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.inference import StackShape
from workbench.models import loading
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.sharding.building import layout_of, require_support
from workbench.models.sharding.layout import ModelLayout, norm_names, shapes_of
from workbench.models.sharding.weights import FileWeights, WeightSource, weights_of


def model_layout(model: Any) -> ModelLayout:
    """Return what is known of a model without its weights.

    model: a name as of `load_stack`, or a Hugging Face model in memory.  Raises as `load_stack`, and ConfigError for a family that
    cannot be cut.
    """
    name = model if isinstance(model, str) else ""
    config = loading.model_config(model) if isinstance(model, str) else model.config
    require_support(config)
    with parameters_on_meta():
        base = loading.model_from_config(config)
    return layout_of(base, name)


def stack_shapes(model: Any, dtype: torch.dtype = torch.float32) -> tuple[StackShape, ...]:
    """Return a model's stacks as planners see them, with the bytes of weights in `dtype`.  model: as of `model_layout`, or a layout."""
    return shapes_of(model if isinstance(model, ModelLayout) else model_layout(model), dtype)


def open_weights(name: str, dtype: torch.dtype = torch.float32, *, layout: ModelLayout | None = None) -> WeightSource:
    """Return the source of a model's weights.

    Of a folder with safetensors only what is asked for is read.  Of anything else (tiny models, checkpoints in other formats or under
    other names) the whole is loaded; close the source to release it.  Raises as `load_stack` does.
    """
    layout = layout or model_layout(name)
    tensors = loading.stored_weights(name)
    if tensors is not None:
        source = FileWeights(tensors, layout.stored_names, dtype)
        if all(source.shape(one) == layout.sizes[one] for one in layout.names):
            return source
        source.close()
    return weights_of(loading.load_model(name, dtype), dtype)


def end_bytes(model: Any, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Return the bytes of a model's front and back, which the first device of a plan holds.

    In front: the embeddings of all stacks and T5's tables of relative positions.  Behind: the norms behind the stacks and the language
    model head, where the configuration does not tie it to the word embedding.
    """
    layout = model if isinstance(model, ModelLayout) else model_layout(model)
    tables = {part.position_bias for part in layout.parts if part.position_bias}
    norms = {name for part in layout.parts for name in norm_names(part.final)}
    first, last = layout.count(layout.embedding_names | tables), layout.count(norms) + layout.head_count
    return first * dtype.itemsize, last * dtype.itemsize
