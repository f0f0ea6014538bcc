"""Weights in their storage dtype, layers that dequantize them, and quantized backbones (PAC+, section IV-D, Fig. 8)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.names import FLOAT_TYPES
from workbench.models.matmul import LanguageModelHead, linear
from workbench.models.partial_loading import cast_buffers
from workbench.models.quantization.config import (
    QuantizationConfig,
    dequantize_blocks,
    dequantize_constants,
    quantize_blocks,
    quantize_constants,
)


class StoredWeight(nn.Module):
    """A frozen matrix (rows, columns) in its storage dtype, which the subclass defines.

    shape, dtype (the compute dtype), device and numel() are as a tensor's.  It is not a tensor; `dequantize` returns
    one.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.buffers()).device

    def numel(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    def dequantize(self) -> Tensor:
        """Return the whole matrix in the compute dtype, (rows, columns)."""
        raise NotImplementedError

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows in the compute dtype.  rows: a slice or a tensor of indices of any shape."""
        raise NotImplementedError


class CastWeight(StoredWeight):
    """A matrix in a float dtype, cast to the compute dtype for each matmul."""

    values: Tensor

    def __init__(self, weight: Tensor, storage: str, dtype: torch.dtype) -> None:
        super().__init__(weight.shape, dtype)
        values = weight.detach().to(getattr(torch, storage)).contiguous()
        if not bool(values.isfinite().all()):
            raise ConfigError(
                f"Weights were to be stored as {storage}.",
                "Some are infinite or not a number in it.",
                "Check the model, or take bfloat16, which has float32's range.",
            )
        self.register_buffer("values", values)

    def dequantize(self) -> Tensor:
        """Return the whole matrix in the compute dtype, (rows, columns)."""
        return self.values.to(self.dtype)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows in the compute dtype."""
        return self.values[rows].to(self.dtype)


class BlockWeight(StoredWeight):
    """A matrix as codes, with one constant for each block of contiguous values (Eq. 1-2).

    codes, absmax: as from quantize_blocks.  With double quantization absmax is stored as codes too.
    """

    codes: Tensor

    def __init__(
        self, weight: Tensor, storage: str, config: QuantizationConfig, *, block_size: int | None = None
    ) -> None:
        super().__init__(weight.shape, config.compute_dtype)
        self.storage, self.block_size = storage, block_size or config.block_size
        codes, absmax = quantize_blocks(weight, storage, self.block_size)
        self.register_buffer("codes", codes)
        constants = quantize_constants(absmax) if config.double_quantization else (absmax,)
        names = ("absmax_codes", "absmax_absmax", "absmax_mean") if config.double_quantization else ("absmax",)
        for name, tensor in zip(names, constants, strict=True):
            self.register_buffer(name, tensor)
        self.constants = names

    def dequantize(self) -> Tensor:
        """Return the whole matrix in the compute dtype, (rows, columns)."""
        weights = dequantize_blocks(self.codes, self.block_constants(), self.storage).to(self.dtype)
        return weights.view(-1)[: self.numel()].view(self.shape)

    def block_constants(self) -> Tensor:
        """Return the blocks' absmax, (num_blocks,) float32."""
        if len(self.constants) == 1:
            return self.get_buffer("absmax")
        codes, second, mean = (self.get_buffer(name) for name in self.constants)
        return dequantize_constants(codes, second, mean, len(self.codes))

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows in the compute dtype.  A row must consist of whole blocks (see `embedding_block_size`)."""
        count, columns = self.shape
        blocks = columns // self.block_size
        assert blocks * self.block_size == columns, f"rows of {columns} are not whole blocks of {self.block_size}"
        codes = self.codes.view(count, blocks, -1)[rows]
        absmax = self.block_constants().view(count, blocks)[rows]
        weights = dequantize_blocks(codes.flatten(end_dim=-2), absmax.flatten(), self.storage).to(self.dtype)
        return weights.view(*codes.shape[:-2], columns)


class _FrozenProduct(torch.autograd.Function):
    """x W^T + b whose autograd graph keeps only codes: the backward pass dequantizes again."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
        context.weight = weight
        return F.linear(inputs, weight.dequantize(), bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ context.weight.dequantize().to(gradient.dtype), None, None


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a stored weight.  Gradients flow to its input.

    bias: bias in the compute dtype.  scale: factor of the input, for language model heads.  held: the dequantized
    weight while several passes share it.
    """

    def __init__(self, weight: StoredWeight, bias: Tensor | None, scale: float = 1.0) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.scale = weight, scale
        self.held: Tensor | None = None
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output, (..., out), in the compute dtype for inputs (..., in)."""
        inputs = inputs.to(self.weight.dtype) if self.scale == 1.0 else (inputs * self.scale).to(self.weight.dtype)
        if inputs.requires_grad and torch.is_grad_enabled():
            return _FrozenProduct.apply(inputs, self.weight, self.bias)
        return linear(inputs, self.dense, self.bias)

    @property
    def dense(self) -> Tensor:
        """Return the weight, (out, in), in the compute dtype."""
        return self.weight.dequantize() if self.held is None else self.held


class QuantizedEmbedding(nn.Module):
    """A frozen embedding with stored rows.  scale: some BART checkpoints multiply by the root of d."""

    def __init__(self, weight: StoredWeight, scale: float = 1.0) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight, self.scale = weight, scale

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings, (..., d), in the compute dtype for ids (...)."""
        rows = self.weight[ids]
        return rows if self.scale == 1.0 else rows * self.scale


def store(weight: Tensor, storage: str, config: QuantizationConfig, *, block_size: int | None = None) -> StoredWeight:
    """Return a matrix (rows, columns) in a storage dtype.  block_size: None uses the configuration's."""
    if storage in FLOAT_TYPES:
        return CastWeight(weight, storage, config.compute_dtype)
    return BlockWeight(weight, storage, config, block_size=block_size)


def embedding_block_size(columns: int, block_size: int) -> int:
    """Return the largest block size, at most the given one, that divides a row, so that each row can be read
    separately.
    """
    return next(size for size in range(min(block_size, columns), 0, -1) if columns % size == 0)


ModuleType = TypeVar("ModuleType", bound=nn.Module)

_SMALLEST_TABLE = 64
"""Tables with fewer rows (token types, T5's relative positions) are not worth quantizing."""


def quantize(module: ModuleType, config: QuantizationConfig) -> ModuleType:
    """Store a frozen module's matrices as configured, in place, and return the module.

    Linear layers (including GPT-2's Conv1D), word embeddings and language model heads are stored.  The rest (norms,
    biases, small tables, convolutions) is converted to the compute dtype, the dtype of the activations.  One matrix is
    converted at a time: called on each layer as it is read, this needs little more than the codes and one layer's
    float32 weights.  Shared matrices stay shared.
    Raises ConfigError if the storage dtype cannot represent the weights.
    """
    if config.storage == config.compute == config.embedding_storage == "float32":
        return module
    if isinstance(module, nn.Linear):
        raise ConfigError(
            "A linear layer was to be quantized.",
            "It cannot be replaced in place.",
            "Quantize the module that holds it.",
        )
    groups = _groups(module)
    while groups:
        _store_group(groups.pop(), config)
    _cast_rest(module, config.compute_dtype)
    return module


def dense_weight(module: nn.Module) -> Tensor:
    """Return a linear layer's dense weights (outputs, inputs), from nn.Linear, Conv1D or QuantizedLinear."""
    if isinstance(module, QuantizedLinear):
        return module.dense
    weight: Any = module.weight
    return weight if isinstance(module, nn.Linear) else weight.T


def held_bytes(module: nn.Module, *, without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of a module's parameters and buffers of any dtype.  Shared memory counts once.  without: those
    that do not count, such as trained ones.
    """
    left_out = set(map(id, without))
    storages: dict[int, int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in left_out:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


_Places = list[tuple[nn.Module, str, nn.Module]]


def _groups(module: nn.Module) -> list[_Places]:
    """Return (parent, name, child) for every module that can be stored, grouped by weight, in reverse order."""
    groups: dict[tuple[int, bool], _Places] = {}
    for parent in module.modules():
        for name, child in parent.named_children():
            if is_linear(child) or _is_table(child):
                weight: Any = child.weight
                groups.setdefault((id(weight), is_linear(child)), []).append((parent, name, child))
    return list(groups.values())[::-1]


def _store_group(places: _Places, config: QuantizationConfig) -> None:
    first: Any = places[0][2]
    if is_linear(first):
        stored = store(dense_weight(first), config.storage, config)
    else:
        storage = config.embedding_storage
        size = None if storage in FLOAT_TYPES else embedding_block_size(first.weight.shape[1], config.block_size)
        stored = store(first.weight, storage, config, block_size=size)
    wrappers: dict[int, nn.Module] = {}
    for parent, name, child in places:
        if id(child) not in wrappers:
            wrappers[id(child)] = _wrap(child, stored)
        parent.add_module(name, wrappers[id(child)].train(child.training))


def _wrap(module: Any, stored: StoredWeight) -> nn.Module:
    if is_linear(module):
        return QuantizedLinear(stored, module.bias)
    if isinstance(module, LanguageModelHead):
        return QuantizedLinear(stored, module.bias, module.scale)
    return QuantizedEmbedding(stored, float(getattr(module, "embed_scale", 1.0)))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear or GPT-2's Conv1D."""
    from transformers.pytorch_utils import Conv1D

    # Subclasses may use their weight differently.
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _is_table(module: nn.Module) -> bool:
    if isinstance(module, LanguageModelHead):  # usually the rows of the word embedding
        return True
    # Of the subclasses, only BART's scaled word embedding is indexed directly by ids; position tables have offsets.
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
