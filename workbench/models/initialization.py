"""Initial weights of Parallel Adapters: the backbone pruned by magnitude, Gaussian, fan-in or zero (PAC+, section
IV-C).

Uniform slicing: one set of hidden channels for the whole model (because the residual stream ties the layers together),
and a separate set of feed-forward neurons and attention channels for each layer.  A channel's importance is the L2 norm
of all its weights.

Torch-Pruning, the toolkit used in the paper (Fang et al., CVPR 2023), is an alternative for BERT.  It traces the model,
finds the channels that depend on each other and removes those with the smallest norm.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError, check_choice, installation
from workbench.models.families import FAMILIES, family_of
from workbench.models.quantization import dense_weight
from workbench.models.side_layers import LAMBDA, WORD_KINDS
from workbench.models.stack import LayerStack, part_of


def copy_pruned(adapter: Any, stack: LayerStack) -> None:
    """Overwrite an adapter's projections with slices of the backbone's.  Both must have the same L and d.

    W_down of b_i selects the kept channels, W_up puts them back, attention and feed-forward weights are the kept rows
    and columns.
    Slices are scaled by sqrt(d / kept), so that sums over fewer inputs keep their magnitude.  Norms, biases and lambdas
    keep their initial values: the side network normalises its own activations, whose scale differs from the backbone's.
    """
    config = adapter.config
    require_own_backbone(config, stack)
    parts = [layer_weights(stack, index) for index in range(stack.num_layers)]
    hidden = top(sum(hidden_importance(part) for part in parts), config.width)

    def copy_layer(side: Any, index: int) -> None:
        heads = num_heads(stack, index)
        head_size = len(parts[index]["query"]) // heads
        score_scale = stack.family.score_scale(stack.config, head_size, index)
        _copy_layer(side, parts[index], hidden, heads, score_scale=score_scale)

    select_channels(adapter, hidden, copy_layer)


SHAPE = ("hidden_size", "num_layers", "num_encoder_layers", "is_causal")
"""The fields of an adapter's configuration that must equal its backbone's."""


def require_own_backbone(config: Any, stack: LayerStack, purpose: str = "An adapter's initialization") -> None:
    """Raise ConfigError unless an adapter's configuration has its backbone's shape."""
    for name in SHAPE:
        if (value := getattr(config, name)) != (other := getattr(stack, name)):
            raise ConfigError(
                f"{purpose} was asked for.",
                f"Its {name} is {value}, the backbone's is {other}.",
                "Use its own backbone, or make the configuration by adapter_config(model).",
            )


@torch.no_grad()
def select_channels(adapter: Any, hidden: Tensor, copy_layer: Callable[[Any, int], None]) -> None:
    """Make every W_down select the kept hidden channels and W_up put them back.  copy_layer: writes a side layer's own
    projections.
    """
    rows = torch.arange(len(hidden))
    for index, side in adapter.layers.items():
        copy_layer(side, int(index))
    first = [] if adapter.first is None else [adapter.first]
    for projection in (*first, *adapter.decoder_first.values(), *(side.down for side in adapter.layers.values())):
        projection.weight.zero_()
        projection.weight[rows, hidden] = 1.0
    if adapter.last is not None:
        adapter.last.up.weight.zero_()
        adapter.last.up.weight[hidden, rows] = 1.0


def num_heads(stack: LayerStack, index: int) -> int:
    """Return the number of attention heads in a layer."""
    heads = stack.config.num_attention_heads
    return heads if part_of(stack, index) is stack.family else getattr(stack.config, "decoder_attention_heads", heads)


def layer_weights(stack: LayerStack, index: int) -> dict[str, Tensor]:
    """Return one layer's matrices by role, (outputs, inputs) each: query, key, value, output, up, down, and a decoder's
    cross_query ...

    Grouped key and value heads are repeated, so that all have as many rows as the queries.
    """
    layer = stack.layers[index]
    paths = stack.layer_paths(index)
    weights = {role: dense_weight(layer.get_submodule(path)).detach().float() for role, path in paths.items()}
    heads = num_heads(stack, index)
    if "query_key_value" in weights:
        weights |= _split(weights.pop("query_key_value"), heads, stack)
    if "gate_up" in weights:
        weights |= dict(zip(("gate", "up"), weights.pop("gate_up").chunk(2), strict=True))
    rows, head_size = len(weights["query"]), len(weights["query"]) // heads
    for role in ("key", "value"):
        weight = weights[role]
        if len(weight) < rows:
            grouped = weight.view(-1, head_size, weight.shape[1])
            weights[role] = grouped.repeat_interleave(rows // len(weight), dim=0).reshape(rows, -1)
    return weights


def _split(fused: Tensor, heads: int, stack: LayerStack) -> dict[str, Tensor]:
    """Return the queries, keys and values of one matrix."""
    roles = ("query", "key", "value")
    key_heads = getattr(stack.config, "num_key_value_heads", None) or heads
    size = len(fused) // (heads + 2 * key_heads)
    if stack.family.interleaves_heads:
        by_head = fused.view(heads, 3, size, -1).transpose(0, 1).reshape(3, heads * size, -1)
        return dict(zip(roles, by_head, strict=True))
    return dict(zip(roles, fused.split([size * heads, size * key_heads, size * key_heads]), strict=True))


def hidden_importance(weights: dict[str, Tensor]) -> Tensor:
    """Return the summed squares of a layer's weights for each hidden channel, (d,)."""
    reading = ("query", "key", "value", "up", "cross_query", "cross_key", "cross_value")
    reads = sum(weights[role].square().sum(dim=0) for role in reading if role in weights)
    writes = sum(weights[role].square().sum(dim=1) for role in ("output", "down", "cross_output") if role in weights)
    return reads + writes


def top(importance: Any, count: int) -> Tensor:
    """Return the indices of the `count` largest values, ascending."""
    return torch.topk(importance, count).indices.sort().values


def _copy_layer(
    side: Any, weights: dict[str, Tensor], hidden: Tensor, backbone_heads: int, *, score_scale: float
) -> None:
    query, key, value, output = _attention(weights, hidden, backbone_heads, side.heads, score_scale=score_scale)
    side.query_key_value.weight.copy_(torch.cat([query, key, value]))
    side.attention_output.weight.copy_(output)
    if side.cross is not None:
        cross = {role.removeprefix("cross_"): weight for role, weight in weights.items() if role.startswith("cross_")}
        query, key, value, output = _attention(cross, hidden, backbone_heads, side.heads, score_scale=score_scale)
        side.cross.query.weight.copy_(query)
        side.cross.key_value.weight.copy_(torch.cat([key, value]))
        side.cross.output.weight.copy_(output)
    size = scale(weights["up"].shape[1], len(hidden))
    importance = weights["up"].square().sum(dim=1) + weights["down"].square().sum(dim=0)
    neurons = top(importance, min(len(side.expand.weight), len(importance)))
    side.expand.weight[: len(neurons)] = weights["up"][neurons][:, hidden] * size
    side.contract.weight[:, : len(neurons)] = weights["down"][hidden][:, neurons] * scale(len(importance), len(neurons))


def _attention(
    weights: dict[str, Tensor], hidden: Tensor, backbone_heads: int, heads: int, *, score_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the slices of query, key, value and output.

    score_scale: the backbone's factor of the scores.  The side network's is 1 / sqrt(head size): scores without a
    factor stay so, others are as much larger or smaller than usual as the backbone's.
    """
    width = len(hidden)
    size = scale(weights["query"].shape[1], width)
    channels = attention_channels(weights, backbone_heads, heads, width)
    query, key, value = (weights[role][channels][:, hidden] * size for role in ("query", "key", "value"))
    usual = width // heads if score_scale == 1.0 else len(weights["query"]) // backbone_heads
    query = query * (score_scale * usual**0.5)
    return query, key, value, weights["output"][hidden][:, channels] * scale(weights["output"].shape[1], width)


def attention_channels(weights: dict[str, Tensor], backbone_heads: int, heads: int, width: int) -> Tensor:
    """Return the kept attention channels, (width,): the best channels of the best heads, one head for each side head.

    If the backbone has too few or too narrow heads, the best channels of all heads are kept.
    """
    importance = sum(weights[role].square().sum(dim=1) for role in ("query", "key", "value")) + weights[
        "output"
    ].square().sum(dim=0)
    by_head = importance.view(backbone_heads, -1)
    if heads > backbone_heads or width // heads > by_head.shape[1]:
        return top(importance, width)
    best = top(by_head.sum(dim=1), heads).tolist()
    return torch.cat([head * by_head.shape[1] + top(by_head[head], width // heads) for head in best])


def scale(full: int, part: int) -> float:
    """Return sqrt(full / kept)."""
    return (full / part) ** 0.5


HEAD_DEVIATION = 0.02
"""Standard deviation of a head's initial weights, small so that the first loss is near ln(classes)."""

How = Literal["fan_in", "gaussian", "zero", "all_zero", "pruned"]

BRANCH_ENDS = (".attention_output.", ".cross.output.", ".contract.")
"""The last projection of each residual branch of a side layer."""


def initialize(adapter: nn.Module, how: How, *, stack: LayerStack | None = None) -> None:
    """Initialize an adapter (or a stage of one).  Each parameter depends on its config's seed and its name.

    how: 'fan_in' draws from N(0, 1 / inputs), 'gaussian' from N(0, 0.02^2), 'pruned' slices the backbone `stack` by
    magnitude.
    'zero' sets the last projection of each residual branch to zero, as LoRA does with B: each branch starts with output
    0 and then learns.
    'all_zero' sets all projections inside the side layers to zero, as the paper literally says.  No gradient then
    reaches either end of a branch, so its projections never change.
    """
    check_choice("initialization", how, get_args(How))
    config: Any = adapter.config
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            role, in_layer = name.rpartition(".")[2], name.startswith("layers.")
            if role == "mix":
                parameter.fill_(LAMBDA)
            elif "norm" in name:
                parameter.fill_(1.0 if role == "weight" else 0.0)
            elif (
                role == "bias"
                or (how == "zero" and in_layer and any(end in name for end in BRANCH_ENDS))
                or (how == "all_zero" and in_layer and ".down." not in name)
            ):
                parameter.zero_()
            else:
                deviation = 0.02 if how == "gaussian" else parameter.shape[1] ** -0.5
                if name.startswith("last.output") or (config.kind in WORD_KINDS and name.startswith("last.up")):
                    deviation = HEAD_DEVIATION  # with words: predictions near the backbone's own
                parameter.copy_(torch.randn(parameter.shape, generator=seeded_generator(config.seed, name)) * deviation)
    if how == "pruned":
        if stack is None:
            raise ConfigError("A pruned initialization was asked for.", "No backbone was given.", "Pass stack=.")
        copy_pruned(adapter, stack)


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a random generator that depends only on a seed and a parameter's name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


_TRACE_TOKENS = 4


def require_torch_pruning(family: str, *, config: Any, num_heads: int) -> None:
    """Raise ConfigError if the package is missing, or cannot prune this family to an adapter's configuration.

    num_heads: the backbone's number of attention heads.
    """
    purpose = "An initialization by Torch-Pruning"
    if not family_of(family).prunes_by_trace:
        pruned = " and ".join(name for name, entry in FAMILIES.items() if entry.prunes_by_trace)
        # It finds no dependencies through rotary positions, RMSNorm, or heads that share keys and values.
        raise ConfigError(
            f"{purpose} for a backbone of the family '{family}' was asked for.",
            f"Its trace does not take '{family}' apart; it does {pruned}.",
            "Choose the initialization 'pruned'.",
        )
    if find_spec("torch_pruning") is None:
        raise ConfigError(
            f"{purpose} was asked for.",
            "The package torch-pruning is not installed.",
            f"Install the extra 'pruning' ({installation('pruning')}), or choose the initialization 'pruned'.",
        )
    _kept_heads(config.width, config.heads, config.hidden_size, num_heads)


def _kept_heads(width: int, heads: int, hidden_size: int, num_heads: int) -> int:
    """Return how many of the backbone's heads remain.  Raises ConfigError if they cannot share the width.

    Heads are removed until one remains for each side head, and each of these then keeps its best channels.  If the
    heads are too few or too narrow, all remain.
    """
    kept_heads = heads if heads <= num_heads and width // heads <= hidden_size // num_heads else num_heads
    if width % kept_heads:
        raise ConfigError(
            "An initialization by Torch-Pruning was asked for.",
            f"Its {num_heads} heads do not share {width} channels evenly.",
            "Choose the initialization 'pruned'.",
        )
    return kept_heads


def copy_torch_pruned(adapter: Any, stack: LayerStack) -> None:
    """Overwrite an adapter's (or a stage's) projections with the backbone pruned by Torch-Pruning.  The backbone does
    not change.

    Attention keeps the best channels of the best heads, one head for each side head.  As in `copy_pruned`, W_down
    selects the kept hidden channels, W_up puts them back, weights are scaled by sqrt(d / kept), and norms, biases and
    lambdas keep their initial values.
    Raises ConfigError as `require_torch_pruning` does, or if the shapes are impossible.
    """
    config = adapter.config
    require_torch_pruning(stack.family_name, config=config, num_heads=stack.config.num_attention_heads)
    require_own_backbone(config, stack)
    neurons = next(iter(adapter.layers.values())).expand.out_features
    narrow, hidden = _prune(stack, config.width, config.heads, neurons)
    select_channels(adapter, hidden, lambda side, index: _copy_narrow(side, narrow.layers[index], stack, index))


def _prune(stack: LayerStack, width: int, heads: int, neurons: int) -> tuple[LayerStack, Tensor]:
    """Return a narrow copy of the stack and its kept hidden channels, ascending."""
    import torch_pruning

    narrow = copy.deepcopy(stack).requires_grad_(True)  # the trace follows the autograd graph
    backbone_heads = stack.config.num_attention_heads
    kept_heads = _kept_heads(width, heads, stack.hidden_size, backbone_heads)
    by_heads = kept_heads == heads
    attention = [
        narrow_weight(narrow, layer, role) for layer in range(narrow.num_layers) for role in ("query", "key", "value")
    ]
    ups = [narrow_weight(narrow, layer, "up") for layer in range(narrow.num_layers)]
    channels = len(attention[0].weight) * kept_heads // backbone_heads
    ratios: dict[Any, float] = dict.fromkeys(attention, 1 - width / channels)
    ratios |= dict.fromkeys(ups, max(0.0, 1 - neurons / len(ups[0].weight)))
    hidden = torch.arange(stack.hidden_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about parameters that it does not prune
        pruner = torch_pruning.pruner.BasePruner(
            _Trace(narrow),
            torch.zeros(1, _TRACE_TOKENS, dtype=torch.int64),
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=1 - width / stack.hidden_size,
            pruning_ratio_dict=ratios,
            num_heads=dict.fromkeys(attention, backbone_heads),
            prune_num_heads=by_heads,
            prune_head_dims=True,
            head_pruning_ratio=1 - kept_heads / backbone_heads,
        )
        writers = {
            narrow_weight(narrow, layer, role) for layer in range(narrow.num_layers) for role in ("output", "down")
        }
        for group in pruner.step(interactive=True):
            for dependency, removed in group:
                is_output = dependency.handler.__name__ == "prune_out_channels"
                if dependency.target.module in writers and is_output and len(hidden) == stack.hidden_size:
                    hidden = torch.tensor(sorted(set(range(stack.hidden_size)) - {int(channel) for channel in removed}))
            group.prune()
    return narrow, hidden


class _Trace(nn.Module):
    """A stack whose only input is token ids."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.stack(input_ids, torch.ones_like(input_ids))[0]


def narrow_weight(stack: LayerStack, layer: int, role: str) -> Any:
    """Return the linear map of a role in a layer."""
    return stack.layers[layer].get_submodule(stack.family.weights[role])


def _copy_narrow(side: Any, layer: nn.Module, stack: LayerStack, index: int) -> None:
    weights = {role: layer.get_submodule(path).weight.detach().float() for role, path in stack.family.weights.items()}
    width = side.query_key_value.in_features
    if weights["query"].shape != (width, width):
        raise ConfigError(
            "An initialization by Torch-Pruning was asked for.",
            f"Of layer {index} it left {list(weights['query'].shape)} query weights, not {[width, width]}.",
            "Choose the initialization 'pruned'.",
        )
    size = scale(stack.hidden_size, width)
    side.query_key_value.weight.copy_(torch.cat([weights[role] for role in ("query", "key", "value")]) * size)
    side.attention_output.weight.copy_(weights["output"] * size)
    num_neurons = len(weights["up"])
    full = len(narrow_weight(stack, index, "up").weight)
    side.expand.weight[:num_neurons] = weights["up"] * size
    side.contract.weight[:, :num_neurons] = weights["down"] * scale(full, num_neurons)
