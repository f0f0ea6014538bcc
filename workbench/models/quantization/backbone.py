"""Quantize a backbone in place, one matrix after another, and count the bytes that it really holds (PAC+, section IV-D)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.language_model_head import LanguageModelHead
from workbench.models.partial_loading import cast_buffers
from workbench.models.quantization.config import FLOAT_TYPES, QuantizationConfig
from workbench.models.quantization.engines import resolve_engine
from workbench.models.quantization.stored import QuantizedEmbedding, QuantizedLinear, StoredWeight, embedding_block_size, store

ModuleType = TypeVar("ModuleType", bound=nn.Module)

_SMALLEST_TABLE = 64
"""Tables of fewer rows (token types, T5's relative positions) are not worth quantizing."""


def quantize(module: ModuleType, config: QuantizationConfig) -> ModuleType:
    """Store a frozen module's matrices as the configuration says, in place, and return the module.

    Linear layers (GPT-2's Conv1D too), word embeddings and language model heads are stored; all the rest (norms, biases, small tables,
    convolutions) goes to the compute type, in which activations are.  One matrix is converted at a time: called on each layer as it
    is read, it needs little more than the codes and one layer's float32 weights.  A matrix that two modules share stays shared.
    Raises ConfigError for an engine that is missing and for weights that the storage type cannot hold.
    """
    if config.storage == config.compute == config.embedding_storage == "float32":
        return module
    resolve_engine(config.storage, config.engine, config.block_size)
    if isinstance(module, nn.Linear):
        raise ConfigError("A linear layer was to be quantized.", "It cannot be replaced in place.", "Quantize the module that holds it.")
    groups = _groups(module)
    while groups:
        _store_group(groups.pop(), config)
    _cast_rest(module, config.compute_dtype)
    return module


def dense_weight(module: nn.Module) -> Tensor:
    """Return a linear layer's weights (outputs, inputs), whatever they are stored as: of nn.Linear, Conv1D or QuantizedLinear."""
    weight: Any = module.weight
    if isinstance(weight, StoredWeight):
        return weight.dequantize()
    return weight if isinstance(module, nn.Linear) else weight.T


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of memory that a module's parameters and buffers hold, whatever their types; shared memory counts once."""
    storages: dict[int, int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


_Places = list[tuple[nn.Module, str, nn.Module]]


def _groups(module: nn.Module) -> list[_Places]:
    """Return (parent, name, child) of all that can be stored, those of one weight together, first in the module last in the list."""
    groups: dict[tuple[int, bool], _Places] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if _is_linear(child) or _is_table(child):
                weight: Any = child.weight
                groups.setdefault((id(weight), _is_linear(child)), []).append((parent, name, child))
    return list(groups.values())[::-1]


def _store_group(places: _Places, config: QuantizationConfig) -> None:
    first: Any = places[0][2]
    if _is_linear(first):
        stored = store(dense_weight(first), config.storage, config)
    else:
        storage = config.embedding_storage
        size = None if storage in FLOAT_TYPES else embedding_block_size(first.weight.shape[1], config.block_size)
        stored = store(first.weight, storage, config, block_size=size)
    made: dict[int, nn.Module] = {}
    for parent, name, child in places:
        if id(child) not in made:
            made[id(child)] = _wrap(child, stored)
        parent.add_module(name, made[id(child)].train(child.training))


def _wrap(module: Any, stored: StoredWeight) -> nn.Module:
    if _is_linear(module):
        return QuantizedLinear(stored, module.bias)
    if isinstance(module, LanguageModelHead):
        return QuantizedLinear(stored, module.bias, module.scale)
    return QuantizedEmbedding(stored, float(getattr(module, "embed_scale", 1.0)))


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    # Subclasses may use their weight in ways of their own.
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _is_table(module: nn.Module) -> bool:
    if isinstance(module, LanguageModelHead):  # as a rule the word embedding's own rows
        return True
    # Of the subclasses only BART's scaled words are looked up by their ids as they are; position tables have offsets.
    is_known = type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"))
    return is_known and isinstance(module.num_embeddings, int) and module.num_embeddings >= _SMALLEST_TABLE


def _cast_rest(module: nn.Module, dtype: torch.dtype) -> None:
    for part in module.modules():
        if isinstance(part, StoredWeight):
            continue
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        cast_buffers(part, dtype)
