"""A layer that is trained, divided over several processors by heads and feed-forward columns (Confidant, section 3.3).

Slices are parts of the layer's own parameters, so gradients accumulate in the parameters, also from several threads.
A slice computes on the device of its input.  It copies the parameters that it reads to an accelerator, frozen ones
once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.layer_inputs import Contexts
from workbench.models.sharding.block import Block, Connection, Cut, Norm, NormLayout, rotary_of
from workbench.models.sharding.layer_blocks import layer_blocks, original
from workbench.models.techniques import TechniqueStage

MOST_GROUPS = 48
"""Maximum number of equal groups of feed-forward columns that can move."""


def column_groups(columns: int) -> int:
    """Return the number of groups of feed-forward columns that can move."""
    return max(groups for groups in range(1, MOST_GROUPS + 1) if columns % groups == 0)


def require_divisible(
    name: str, *, is_single_stack: bool, is_parallel: bool = False, storage: str, technique: str
) -> None:
    """Raise ConfigError for a model whose layers cannot be divided.

    is_parallel: whether both blocks of a layer read the same residual stream.
    """
    problems = {
        "Parallel Adapters compute next to the layers.": technique == "parallel",
        "It is an encoder-decoder.": not is_single_stack,
        "Its attention and feed-forward network read the same input.": is_parallel,
        f"Its frozen weights are stored as {storage}.": storage != "float32",
    }
    problem = next((problem for problem, is_there in problems.items() if is_there), None)
    if problem is not None:
        raise ConfigError(
            f"The layers of '{name}' divided over a device's processors were asked for.",
            f"{problem} Only layers of a single stack can be divided, whose blocks follow each other and whose weights "
            "are in float32.",
            "Choose --option split=none, or another model, technique or backbone_dtype.",
        )


class TrainedLayer:
    """Layer `index` of a stage with a single stack and unquantized weights.

    num_groups: the attention's units.  num_columns: number of groups of feed-forward columns.
    """

    def __init__(self, model: TechniqueStage, index: int) -> None:
        backbone, self._layer = model.backbone, model.backbone.layers[str(index)]
        self._attention, self._feed_forward = layer_blocks(
            backbone.config, backbone.family, backbone.family, self._layer, index=index
        )
        self._connections = {block.kind: self._connection(block) for block in (self._attention, self._feed_forward)}
        self.num_groups = self._attention.facts.num_units
        self._num_columns = (
            original(self._layer.get_submodule(self._feed_forward.output.module)).weight.numel() // backbone.hidden_size
        )
        self.num_columns = column_groups(self._num_columns)
        self._adapters: Any = dict(model.adapters.items()).get(str(index))
        self._frozen: dict[Any, Tensor] = {}

    def heads(self, hidden: Tensor, contexts: Contexts, start: int, stop: int) -> Tensor:
        """Return the attention's partial product (n, t, d) of units [start, stop).  hidden: the layer's input (n, t,
        d).
        """
        block, context = self._attention, contexts[self._attention.pattern]
        connection = self._there_all(self._connections["attention"], hidden)
        source = connection.normalize(hidden) if block.facts.is_pre_norm else hidden
        queries, keys, values = (self._project(cut, source, start, stop) for cut in block.cuts)
        rotary = None
        if context.rotary is not None and block.has_rotary:
            rotary = rotary_of(*(angles.to(hidden.device) for angles in context.rotary))
        mask = None if context.mask is None else context.mask.to(hidden.device)
        queries, keys = connection.turned(block.heads(queries), block.heads(keys), rotary, rotary)
        attended = block.attend(
            queries, keys, block.heads(values), mask, is_causal=block.facts.is_causal and mask is None
        )
        return self._out(block.output, attended, start, stop)

    def join_heads(self, hidden: Tensor, total: Tensor) -> Tensor:
        """Return the attention block's output (n, t, d).  hidden: the layer's input.  total: the sum of all partial
        products.
        """
        return self._connect(self._attention, hidden, total)

    def columns(self, middle: Tensor, start: int, stop: int) -> Tensor:
        """Return the feed-forward's partial product (n, t, d) of column groups [start, stop).  middle: the result of
        join_heads.
        """
        block, source, width = (
            self._feed_forward,
            self._enter(middle),
            self._num_columns // self.num_columns,
        )
        products = [self._project(cut, source, start * width, stop * width) for cut in block.cuts]
        return self._out(block.output, block.activate(products), start * width, stop * width)

    def join_columns(self, middle: Tensor, total: Tensor) -> Tensor:
        """Return the layer's output (n, t, d).  total: the sum of all partial products."""
        output = self._connect(self._feed_forward, middle, total)
        return output if self._adapters is None or isinstance(self._adapters, nn.ModuleDict) else self._adapters(output)

    def _connection(self, block: Block) -> Connection:
        """Return a block's undivided parameters, which are parameters of the layer."""
        norms = (None if layout is None else self._norm(layout) for layout in (block.norm, block.output_norm))
        norm, output_norm = norms
        return Connection(
            bias=original(self._layer.get_submodule(block.output.module)).bias,
            norm=norm,
            output_norm=output_norm,
            head_norms=tuple(self._norm(layout) for layout in block.head_norms),
            scale=block.facts.residual_scale,
        )

    def _norm(self, layout: NormLayout) -> Norm:
        weight, shift = (self._layer.get_parameter(name) if name else None for name in (layout.weight, layout.bias))
        return Norm(layout=layout, weight=weight, shift=shift)

    def _enter(self, middle: Tensor) -> Tensor:
        """Return the feed-forward network's input."""
        if not self._feed_forward.facts.is_pre_norm:
            return middle
        return self._there_all(self._connections["feed_forward"], middle).normalize(middle)

    def _there_all(self, connection: Connection, source: Tensor) -> Connection:
        """Return a connection whose norms are on the source's device."""

        def on_device(norm: Norm | None) -> Norm | None:
            if norm is None:
                return None
            weight, shift = (
                None if tensor is None else self._on_device(tensor, source) for tensor in (norm.weight, norm.shift)
            )
            return replace(norm, weight=weight, shift=shift)

        head_norms = tuple(norm for norm in map(on_device, connection.head_norms) if norm is not None)
        return replace(connection, norm=on_device(connection.norm), head_norms=head_norms)

    def _project(self, cut: Cut, source: Tensor, start: int, stop: int) -> Tensor:
        """Return the product of a projection's units (or columns) [start, stop), including LoRA if present."""
        module: Any = self._layer.get_submodule(cut.module)
        base, rows = original(module), cut.rows(start, stop)
        part: Any = (slice(None), rows) if cut.is_transposed else rows
        weight = self._on_device(base.weight, source, part)
        bias = self._on_device(base.bias, source, rows) if cut.has_bias else None
        product = F.linear(source, weight.T if cut.is_transposed else weight, bias)
        if base is module:
            return product
        low = F.linear(module.lora_dropout["default"](source), self._on_device(module.lora_A["default"].weight, source))
        return product + module.scaling["default"] * F.linear(
            low, self._on_device(module.lora_B["default"].weight, source, rows)
        )

    def _out(self, cut: Cut, source: Tensor, start: int, stop: int) -> Tensor:
        """Return the partial product of an output matrix with its inputs [start, stop)."""
        weight, columns = original(self._layer.get_submodule(cut.module)).weight, cut.rows(start, stop)
        if cut.is_transposed:
            return F.linear(source, self._on_device(weight, source, columns).T)
        return F.linear(source, self._on_device(weight, source, (slice(None), columns)))

    def _connect(self, block: Block, residual: Tensor, total: Tensor) -> Tensor:
        connection = self._connections[block.kind]
        if isinstance(self._adapters, nn.ModuleDict):
            product = self._adapters["output" if block.kind == "attention" else "down"](
                total if connection.bias is None else total + connection.bias
            )
            added = replace(connection, bias=None).add(product, residual)
        else:
            added = connection.add(total, residual)
        return added if block.facts.is_pre_norm else connection.normalize(added)

    def _on_device(self, weight: Tensor, source: Tensor, part: Any = slice(None)) -> Tensor:
        """Return a part of a parameter on the source's device.  Gradients flow back to it; the copy of a frozen
        parameter is cached.
        """
        if weight.device == source.device:
            return weight[part]
        if weight.requires_grad:
            return weight[part].to(source.device)
        key = weight, repr(part)
        if key not in self._frozen:
            self._frozen[key] = weight[part].to(source.device)
        return self._frozen[key]
