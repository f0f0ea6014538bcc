"""A narrow copy of a backbone by magnitude: which channels, heads and neurons are kept (PAC+, section IV-C).

Uniform slicing: one set of hidden channels for the whole model (the residual stream ties the layers together), and for each layer
its own set of feed-forward neurons and attention channels.  Importance is the L2 norm of all weights that touch a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.stack import LayerStack


def copy_pruned(adapter: Any, stack: LayerStack) -> None:
    """Overwrite an adapter's projections with slices of the backbone's; both must have the same L and d.

    W_down of b_i picks the kept channels, W_up puts them back, attention and feed-forward weights are the kept rows and columns.
    Slices are scaled by sqrt(d / kept), so that sums over fewer inputs keep their size.  Norms, biases and lambdas stay initial:
    the side network normalises its own activations, whose scale is not the backbone's.
    """
    config = adapter.config
    if (config.num_layers, config.hidden_size) != (stack.num_layers, stack.hidden_size):
        raise ConfigError(
            f"An adapter for {config.num_layers} layers of {config.hidden_size} was to be cut from a backbone.",
            f"The backbone has {stack.num_layers} of {stack.hidden_size}.",
            "Use its own backbone.",
        )
    parts = [layer_weights(stack, index) for index in range(stack.num_layers)]
    hidden = top(sum(hidden_importance(part) for part in parts), config.width)
    with torch.no_grad():
        for index, side in adapter.layers.items():
            _copy_layer(side, parts[int(index)], hidden, stack.config.num_attention_heads)
            _select(side.down.weight, hidden)
        if adapter.first is not None:
            _select(adapter.first.weight, hidden)
        if adapter.last is not None:
            adapter.last.up.weight.zero_()
            adapter.last.up.weight[hidden, torch.arange(len(hidden))] = 1.0


def layer_weights(stack: LayerStack, index: int) -> dict[str, Tensor]:
    """Return one layer's matrices by role, (outputs, inputs) each: query, key, value, output, up, down.

    Grouped key and value heads are repeated, so that all have as many rows as the queries.
    """
    layer = stack.layers[index]
    weights: dict[str, Tensor] = {}
    for role, path in stack.family.weights.items():
        module: Any = layer.get_submodule(path)
        weight = module.weight.detach().float()
        # GPT-2's Conv1D keeps (inputs, outputs).
        weights[role] = weight if isinstance(module, nn.Linear) else weight.T
    if "query_key_value" in weights:
        weights |= dict(zip(("query", "key", "value"), weights.pop("query_key_value").chunk(3), strict=True))
    rows, head_size = len(weights["query"]), len(weights["query"]) // stack.config.num_attention_heads
    for role in ("key", "value"):
        weight = weights[role]
        if len(weight) < rows:
            grouped = weight.view(-1, head_size, weight.shape[1])
            weights[role] = grouped.repeat_interleave(rows // len(weight), dim=0).reshape(rows, -1)
    return weights


def hidden_importance(weights: dict[str, Tensor]) -> Tensor:
    """Return the summed squares of all weights of a layer that touch each hidden channel, (d,)."""
    reads = sum(weights[role].square().sum(dim=0) for role in ("query", "key", "value", "up"))
    writes = sum(weights[role].square().sum(dim=1) for role in ("output", "down"))
    return reads + writes


def top(importance: Any, count: int) -> Tensor:
    """Return the indices of the `count` largest, ascending."""
    return torch.topk(importance, count).indices.sort().values


def _copy_layer(side: Any, weights: dict[str, Tensor], hidden: Tensor, backbone_heads: int) -> None:
    size = scale(weights["query"].shape[1], len(hidden))
    kept = attention_channels(weights, backbone_heads, side.heads, len(hidden))
    fused = torch.cat([weights[role][kept][:, hidden] for role in ("query", "key", "value")])
    side.query_key_value.weight.copy_(fused * size)
    side.attention_output.weight.copy_(weights["output"][hidden][:, kept] * scale(weights["output"].shape[1], len(kept)))
    importance = weights["up"].square().sum(dim=1) + weights["down"].square().sum(dim=0)
    neurons = top(importance, min(len(side.expand.weight), len(importance)))
    side.expand.weight[: len(neurons)] = weights["up"][neurons][:, hidden] * size
    side.contract.weight[:, : len(neurons)] = weights["down"][hidden][:, neurons] * scale(len(importance), len(neurons))


def attention_channels(weights: dict[str, Tensor], backbone_heads: int, heads: int, width: int) -> Tensor:
    """Return the kept attention channels, (width,): the best channels of the best heads, a side head from each.

    A backbone whose heads are too few or too narrow for that gives its best channels wherever they are.
    """
    importance = sum(weights[role].square().sum(dim=1) for role in ("query", "key", "value")) + weights["output"].square().sum(dim=0)
    by_head = importance.view(backbone_heads, -1)
    if heads > backbone_heads or width // heads > by_head.shape[1]:
        return top(importance, width)
    best = top(by_head.sum(dim=1), heads).tolist()
    return torch.cat([head * by_head.shape[1] + top(by_head[head], width // heads) for head in best])


def scale(full: int, kept: int) -> float:
    """Return sqrt(full / kept)."""
    return (full / kept) ** 0.5


def _select(weight: Tensor, hidden: Tensor) -> None:
    weight.zero_()
    weight[torch.arange(len(hidden)), hidden] = 1.0
