"""A narrow copy of a backbone by Torch-Pruning, the toolkit used in the paper (PAC+, section IV-C; Fang et al., CVPR 2023).

The toolkit traces the model, finds the channels that depend on each other and removes those with the smallest norm.  The remaining
weights initialize the side network.  `workbench.models.initialization` does the same for every family with one rule of our own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.initialization import copy_kept, scale
from workbench.models.stack import LayerStack

SUPPORTED = ("bert", "llama")
_TRACE_TOKENS = 4


def require_torch_pruning(family: str) -> None:
    """Raise ConfigError if the package is missing, or cannot prune this family."""
    asked = "An initialization by Torch-Pruning was asked for"
    if family not in SUPPORTED:
        found = f"Its trace does not take '{family}' apart; it does {' and '.join(SUPPORTED)}."
        raise ConfigError(f"{asked} for a backbone of the family '{family}'.", found, "Choose the initialization 'pruned'.")
    if find_spec("torch_pruning") is None:
        todo = "Install the extra 'pruning' (pip install 'edge-llm-workbench[pruning]'), or choose the initialization 'pruned'."
        raise ConfigError(f"{asked}.", "The package torch-pruning is not installed.", todo)


def copy_torch_pruned(adapter: Any, stack: LayerStack) -> None:
    """Overwrite an adapter's (or a stage's) projections with the backbone pruned by Torch-Pruning.  The backbone does not change.

    Attention keeps the best channels of the best heads, one head for each side head.  As in `copy_pruned`, W_down selects the kept hidden
    channels, W_up puts them back, weights are scaled by sqrt(d / kept), and norms, biases and lambdas keep their initial values.
    Raises ConfigError as `require_torch_pruning` does, or if the shapes are impossible.
    """
    config = adapter.config
    require_torch_pruning(stack.family_name)
    if (config.num_layers, config.hidden_size) != (stack.num_layers, stack.hidden_size):
        found = f"The backbone has {stack.num_layers} layers of {stack.hidden_size}."
        raise ConfigError(f"An adapter for {config.num_layers} layers of {config.hidden_size} was to be pruned.", found, "Use its own.")
    neurons = next(iter(adapter.layers.values())).expand.out_features
    narrow, hidden = _prune(stack, config.width, config.heads, neurons)
    copy_kept(adapter, hidden, lambda side, index: _copy_layer(side, narrow.layers[index], stack, index))


def _prune(stack: LayerStack, width: int, heads: int, neurons: int) -> tuple[LayerStack, Tensor]:
    """Return a narrow copy of the stack and its kept hidden channels, ascending."""
    import torch_pruning

    narrow = copy.deepcopy(stack).requires_grad_(True)  # the trace follows the autograd graph
    backbone_heads = stack.config.num_attention_heads
    attention = [narrow_weight(narrow, layer, role) for layer in range(narrow.num_layers) for role in ("query", "key", "value")]
    if stack.family_name == "llama":
        _ungroup(narrow)
        attention = [narrow_weight(narrow, layer, role) for layer in range(narrow.num_layers) for role in ("query", "key", "value")]
    ups = [narrow_weight(narrow, layer, "up") for layer in range(narrow.num_layers)]
    # First remove whole heads until one is left per side head; then each keeps its best channels.
    by_heads = heads <= backbone_heads and width // heads <= len(attention[0].weight) // backbone_heads
    kept_heads = heads if by_heads else backbone_heads
    if width % kept_heads:
        found = f"Its {backbone_heads} heads do not share {width} channels evenly."
        raise ConfigError("An initialization by Torch-Pruning was asked for.", found, "Choose the initialization 'pruned'.")
    channels = len(attention[0].weight) * kept_heads // backbone_heads
    ratios: dict[Any, float] = dict.fromkeys(attention, 1 - width / channels)
    ratios |= dict.fromkeys(ups, max(0.0, 1 - neurons / len(ups[0].weight)))
    customized = {type(one): _rms_norm_pruner(torch_pruning) for one in narrow.modules() if type(one).__name__.endswith("RMSNorm")}
    hidden = torch.arange(stack.hidden_size)
    with _without_rotation(stack.family_name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about parameters that it does not prune
        pruner = torch_pruning.pruner.BasePruner(
            _Trace(narrow), torch.zeros(1, _TRACE_TOKENS, dtype=torch.int64), importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=1 - width / stack.hidden_size, pruning_ratio_dict=ratios, customized_pruners=customized,
            num_heads=dict.fromkeys(attention, backbone_heads), prune_num_heads=by_heads, prune_head_dims=True,
            head_pruning_ratio=1 - kept_heads / backbone_heads,
        )  # fmt: skip
        writers = {narrow_weight(narrow, layer, role) for layer in range(narrow.num_layers) for role in ("output", "down")}
        for group in pruner.step(interactive=True):
            for dependency, removed in group:
                is_output = dependency.handler.__name__ == "prune_out_channels"
                if dependency.target.module in writers and is_output and len(hidden) == stack.hidden_size:
                    hidden = torch.tensor(sorted(set(range(stack.hidden_size)) - {int(one) for one in removed}))
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


def _ungroup(stack: LayerStack) -> None:
    """Give every query head a separate key and value head, because the trace does not detect that one serves several."""
    for layer in stack.layers:
        attention: Any = layer.self_attn
        groups, size = attention.num_key_value_groups, attention.head_dim
        for name in ("k_proj", "v_proj"):
            old = getattr(attention, name)
            weight = old.weight.detach().view(-1, size, old.in_features).repeat_interleave(groups, dim=0).flatten(0, 1)
            new = nn.Linear(old.in_features, len(weight), bias=False)
            new.weight = nn.Parameter(weight)
            setattr(attention, name, new)
        attention.num_key_value_groups = 1


@contextmanager
def _without_rotation(family: str) -> Iterator[None]:
    """Omit rotary positions from the trace: their slices couple channels in pairs, and the graph becomes too large to finish."""
    if family != "llama":
        yield
        return
    from transformers.models.llama import modeling_llama

    rotation = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda query, key, *tables, **options: (query, key)
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = rotation


def _rms_norm_pruner(torch_pruning: Any) -> Any:
    """Return a pruner for RMSNorm, which the toolkit does not support.  RMSNorm has only one weight per channel."""

    class RMSNormPruner(torch_pruning.BasePruningFunc):
        """Prunes the channels of an RMSNorm."""

        def prune_out_channels(self, layer: Any, idxs: list[int]) -> Any:
            """Remove the channels `idxs`."""
            removed = set(idxs)
            layer.weight = nn.Parameter(layer.weight.detach()[[at for at in range(len(layer.weight)) if at not in removed]])
            return layer

        prune_in_channels = prune_out_channels

        def get_out_channels(self, layer: Any) -> int:
            """Return the number of channels."""
            return len(layer.weight)

        get_in_channels = get_out_channels

    return RMSNormPruner()


def _copy_layer(side: Any, layer: nn.Module, stack: LayerStack, index: int) -> None:
    weights = {role: layer.get_submodule(path).weight.detach().float() for role, path in stack.family.weights.items()}
    width = side.query_key_value.in_features
    if weights["query"].shape != (width, width):
        found = f"Of layer {index} it left {list(weights['query'].shape)} query weights, not {[width, width]}."
        raise ConfigError("An initialization by Torch-Pruning was asked for.", found, "Choose the initialization 'pruned'.")
    size = scale(stack.hidden_size, width)
    side.query_key_value.weight.copy_(torch.cat([weights[role] for role in ("query", "key", "value")]) * size)
    side.attention_output.weight.copy_(weights["output"] * size)
    kept = len(weights["up"])
    full = len(narrow_weight(stack, index, "up").weight)
    side.expand.weight[:kept] = weights["up"] * size
    side.contract.weight[:, :kept] = weights["down"] * scale(full, kept)
