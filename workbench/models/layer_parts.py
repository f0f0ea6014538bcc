"""Divide a layer into parts for several processors: heads, and feed-forward columns (Confidant, section 3.3; columns as Megatron-LM).

A part is a partial product (n, t, d) without the output's bias.  The join adds up the parts and computes everything undivided.
Parts read slices of the layer's own parameters, so their gradients accumulate in the parameters, also from several threads.
A part computes on the device of its input.  It copies the parameters that it reads to an accelerator, frozen ones once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from workbench.core.errors import ConfigError
from workbench.models.families import LayerContext, layer_paths
from workbench.models.sharding.building import attention_scale
from workbench.models.sharding.run import attend
from workbench.models.techniques import TechniqueStage

MOST_GROUPS = 48
"""Maximum number of equal groups of feed-forward columns that can move."""


def column_groups(columns: int) -> int:
    """Return the number of groups of feed-forward columns that can move."""
    return max(groups for groups in range(1, MOST_GROUPS + 1) if columns % groups == 0)


def require_divisible(name: str, *, is_single_stack: bool, storage: str, technique: str) -> None:
    """Raise ConfigError for a model whose layers cannot be divided."""
    if not is_single_stack or storage != "float32" or technique == "parallel":
        found = "It is an encoder-decoder." if not is_single_stack else f"Its frozen weights are kept as {storage}."
        if technique == "parallel":
            found = "Parallel Adapters compute next to the layers."
        raise ConfigError(
            f"The layers of '{name}' divided over a device's processors were asked for.",
            f"{found} Only layers of a single stack with weights in float32 can be divided.",
            "Choose --option split=none, or another model, technique or backbone_dtype.",
        )


class LayerParts:
    """Layer `index` of a stage with a single stack and unquantized weights.

    num_groups: heads that share keys and values form one group.  num_columns: number of groups of feed-forward columns.
    """

    def __init__(self, model: TechniqueStage, index: int) -> None:
        from transformers.activations import ACT2FN

        config, family, layer = model.backbone.config, model.backbone.family, model.backbone.layers[str(index)]
        self._roles = {role: layer.get_submodule(path) for role, path in layer_paths(family, layer).items()}
        self._norms = [layer.get_submodule(path) for path in family.norms]
        self._is_pre_norm = getattr(config, family.is_pre_norm) if isinstance(family.is_pre_norm, str) else family.is_pre_norm
        self._is_causal, self._act = family.is_causal, ACT2FN[getattr(config, family.activation)]
        self._heads = config.num_attention_heads
        self.num_groups: int = getattr(config, "num_key_value_heads", None) or self._heads
        width, columns = (_inputs(self._roles[role]) for role in ("output", "down"))
        self._head_size, self.num_columns = width // self._heads, column_groups(columns)
        self._column_width = columns // self.num_columns
        self._scale = attention_scale(config, family, self._head_size, index)
        self._adapters: Any = dict(model.adapters.items()).get(str(index))
        self._frozen: dict[Any, Tensor] = {}

    def heads(self, hidden: Tensor, context: LayerContext, start: int, stop: int) -> Tensor:
        """Return the attention's partial product (n, t, d) of groups [start, stop).  hidden: the layer's input (n, t, d)."""
        source, size, per_group = self._before(0, hidden), self._head_size, self._heads // self.num_groups

        def projected(role: str, place: int, heads: int) -> Tensor:
            at = place * self._heads * size if role not in self._roles else 0
            module = self._roles[role if role in self._roles else "query_key_value"]
            product = self._rows(module, source, at + start * heads * size, at + stop * heads * size)
            return product.unflatten(-1, (-1, size)).transpose(1, 2)

        queries, keys, values = projected("query", 0, per_group), projected("key", 1, 1), projected("value", 2, 1)
        if context.rotary is not None:
            cos, sin = (angles.to(hidden.device) for angles in context.rotary)
            queries, keys = (_turned(one, cos, sin) for one in (queries, keys))
        mask = None if context.mask is None else context.mask.to(hidden.device)
        attended = attend(queries, keys, values, mask, is_causal=self._is_causal and mask is None, scale=self._scale)
        return self._columns(self._roles["output"], attended, start * per_group * size, stop * per_group * size)

    def join_heads(self, hidden: Tensor, total: Tensor) -> Tensor:
        """Return the attention block's output (n, t, d).  hidden: the layer's input.  total: the sum of all partial products."""
        return self._join(0, "output", hidden, total)

    def columns(self, middle: Tensor, start: int, stop: int) -> Tensor:
        """Return the feed-forward's partial product (n, t, d) of column groups [start, stop).  middle: the result of join_heads."""
        source, first, end = self._before(1, middle), start * self._column_width, stop * self._column_width
        up = self._rows(self._roles["up"], source, first, end)
        active = self._act(self._rows(self._roles["gate"], source, first, end)) * up if "gate" in self._roles else self._act(up)
        return self._columns(self._roles["down"], active, first, end)

    def join_columns(self, middle: Tensor, total: Tensor) -> Tensor:
        """Return the layer's output (n, t, d).  total: the sum of all partial products."""
        output = self._join(1, "down", middle, total)
        return output if self._adapters is None or isinstance(self._adapters, nn.ModuleDict) else self._adapters(output)

    def _before(self, block: int, hidden: Tensor) -> Tensor:
        if not self._is_pre_norm:
            return hidden
        norm = self._norms[block]
        weights = {name: self._there(weight, hidden) for name, weight in norm.named_parameters() if weight.device != hidden.device}
        return functional_call(norm, weights, (hidden,)) if weights else norm(hidden)

    def _rows(self, module: Any, source: Tensor, start: int, stop: int) -> Tensor:
        """Return outputs [start, stop) of a projection, including LoRA if present."""
        base, own = getattr(module, "base_layer", module), slice(start, stop)
        weight = (
            self._there(base.weight, source, own) if isinstance(base, nn.Linear) else self._there(base.weight, source, (slice(None), own)).T
        )
        product = F.linear(source, weight, None if base.bias is None else self._there(base.bias, source, own))
        if base is module:
            return product
        low = F.linear(module.lora_dropout["default"](source), self._there(module.lora_A["default"].weight, source))
        return product + module.scaling["default"] * F.linear(low, self._there(module.lora_B["default"].weight, source, own))

    def _columns(self, module: Any, source: Tensor, start: int, stop: int) -> Tensor:
        """Return the product of inputs [start, stop) of a projection, without the bias."""
        own = slice(start, stop)
        if isinstance(module, nn.Linear):
            return F.linear(source, self._there(module.weight, source, (slice(None), own)))
        return F.linear(source, self._there(module.weight, source, own).T)

    def _there(self, weight: Tensor, source: Tensor, part: Any = slice(None)) -> Tensor:
        """Return a part of a parameter on the source's device.  Gradients come back; a frozen one's copy is kept."""
        if weight.device == source.device:
            return weight[part]
        if weight.requires_grad:
            return weight[part].to(source.device)
        key = weight, repr(part)
        if key not in self._frozen:
            self._frozen[key] = weight[part].to(source.device)
        return self._frozen[key]

    def _join(self, block: int, role: str, residual: Tensor, total: Tensor) -> Tensor:
        bias = self._roles[role].bias
        product = total if bias is None else total + bias
        if isinstance(self._adapters, nn.ModuleDict):
            product = self._adapters[role](product)
        return product + residual if self._is_pre_norm else self._norms[block](product + residual)


def _inputs(module: nn.Module) -> int:
    """Return the input width of a projection.  GPT-2's Conv1D stores its weight as (in, out)."""
    weight: Any = module.weight
    return weight.shape[1 if isinstance(module, nn.Linear) else 0]


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Llama) to heads (n, heads, t, head size).  cos, sin: (1, t, head size)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
