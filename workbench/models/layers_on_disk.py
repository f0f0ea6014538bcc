"""A frozen model of which this process holds some layers; it reads the others from the files each time they run.

Scoring a run, calibrating adapters and checking answers take a few passes through the whole model.  Its devices hold
it in parts; the laptop that commands them may have less memory than all of them together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.models.configuration import model_on_meta, stored_weights
from workbench.models.loading import load_stack
from workbench.models.partial_loading import read_head, read_stage, stored_under
from workbench.models.quantization import QuantizationConfig, held_bytes, quantize
from workbench.models.stack import LayerStack
from workbench.models.stored_tensors import StoredTensor, stored_as

KEPT_BYTES = 1 << 30
"""Layers stay in memory up to this many bytes, as they are stored there; the others are read with each batch."""


def load_frozen(name: str, quantization: QuantizationConfig, *, with_head: bool = False) -> LayerStack:
    """Return the frozen stack of a model for forward passes, stored as `quantization` says, read layer by layer.

    with_head: see load_stack.
    Its first layers stay in memory, up to KEPT_BYTES.  The matrices of the others are NaN except while the layer runs,
    so what reads weights outside of a pass, or trains them, needs load_stack.
    Models without safetensors files, and encoder-decoders, whose layers share tables, are loaded whole.
    Raises as load_stack does.
    """
    tensors = stored_weights(name)
    stack = None if tensors is None else _read_stack(name, tensors, quantization, with_head)
    return stack or quantize(load_stack(name, with_head=with_head), quantization)


def _read_stack(
    name: str,
    tensors: dict[str, StoredTensor],
    quantization: QuantizationConfig,
    with_head: bool,
) -> LayerStack | None:
    model = model_on_meta(name)
    stack = LayerStack(model)
    if stack.family.decoder is not None or stack.position_bias is not None:
        return None
    under = stored_under(model, stack.family)
    paths = {id(module): path for path, module in model.named_modules()}
    blanks = [_Blank(layer, under, paths, tensors) for layer in stack.layers]
    store = partial(quantize, config=quantization)
    nbytes, number = 0, 0

    def keep(layer: nn.Module) -> None:
        nonlocal nbytes, number
        nbytes += held_bytes(store(layer))
        if nbytes > KEPT_BYTES:
            _ReadOnUse(layer, blanks[number], store)
        number += 1

    needs_head = with_head and stack.family.is_causal
    head = read_head(model.config, tensors, torch.float32) if needs_head else None
    if needs_head and head is None:
        return None
    if read_stage(model, tensors, 0, len(blanks), dtype=torch.float32, after_layer=keep) is None:
        return None
    layer_stack = LayerStack(model, language_model_head=head)
    layers, layer_stack.layers = layer_stack.layers, nn.ModuleList()
    store(layer_stack)  # the parts outside of the layers
    layer_stack.layers = layers
    return layer_stack


class _Place(NamedTuple):
    """A weight of a layer.  path: its module's path in the layer."""

    path: str
    name: str
    stored: StoredTensor


class _Blank:
    """A layer without weights, and where they are stored."""

    def __init__(
        self,
        layer: nn.Module,
        under: dict[str, tuple[str, ...]],
        paths: dict[int, str],
        tensors: dict[str, StoredTensor],
    ) -> None:
        self._layer = copy.deepcopy(layer)
        self._places = [
            _Place(path, name, stored)
            for path, module in layer.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta and (stored := stored_as(under[f"{paths[id(module)]}.{name}"], tensors)) is not None
        ]

    def filled(self) -> nn.Module:
        """Return the layer with its weights, read from the files."""
        layer = copy.deepcopy(self._layer)
        for path, name, stored in self._places:
            weight = stored.read_into(torch.empty(stored.shape))
            layer.get_submodule(path).register_parameter(name, nn.Parameter(weight, requires_grad=False))
        return layer


class _ReadOnUse:
    """Gives a layer its matrices before each pass and takes them away after it.  Norms and biases stay: some techniques
    train them.

    blank: an equal layer.  store: converts the layer that was read to the form of the run.  Modules that wrap a part of
    the layer later on are not changed.
    """

    def __init__(self, layer: nn.Module, blank: _Blank, store: Callable[[nn.Module], nn.Module]) -> None:
        self._blank, self._store = blank, store
        self._modules = dict(layer.named_modules())
        layer.register_forward_pre_hook(self._fill)
        layer.register_forward_hook(self._free, always_call=True)
        self._free()

    def _fill(self, *call: Any) -> None:
        for path, module in self._store(self._blank.filled()).named_modules():
            mine = self._modules[path]
            mine._parameters.update(_large(module._parameters))
            mine._buffers.update(module._buffers)

    def _free(self, *call: Any) -> None:
        for module in self._modules.values():
            weights = {name: _placeholder(weight) for name, weight in _large(module._parameters).items()}
            module._parameters.update(
                {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
            )
            module._buffers.update(
                {name: buffer if buffer is None else _placeholder(buffer) for name, buffer in module._buffers.items()}
            )


def _large(parameters: Mapping[str, nn.Parameter | None]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter is not None and parameter.ndim > 1}


def _placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that takes no memory: NaN, so that no result can come from it unnoticed.

    It is not on the meta device: what techniques add is put on the device of the weights.
    """
    value = math.nan if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
