"""Parallel Adapters: a narrow trainable network beside a frozen backbone, fed by its activations (PAC+, section IV-A, Fig. 6).

Adapter i reads lambda_i W_down b_{i+1} + (1 - lambda_i) a_i and gives a_{i+1}; a_0 = W_down b_0.  The head reads W_up a_L + b_L.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.dropout import stateless_dropout
from workbench.models.initialization import initialize


class TapProjection(nn.Module):
    """W_down of one tap: standardise each channel of a backbone activation, then project it from d to d / r.

    mean, inverse_std: (d,) constants from calibration (`set_statistics`).  They are folded into weight and bias, which costs a
    product of the weight's size and not of the activation's.
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))
        self.bias = nn.Parameter(torch.empty(width))
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("inverse_std", torch.ones(hidden_size))

    def forward(self, tap: Tensor) -> Tensor:
        """Return (n, t, d / r) of (n, t, d)."""
        weight = self.weight * self.inverse_std
        return F.linear(tap.to(weight.dtype), weight, self.bias - weight @ self.mean)


class SideLayer(nn.Module):
    """One adapter: the mix of Fig. 6 and a pre-norm transformer layer d / r wide."""

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.is_causal = config.heads, config.is_causal
        self.down = TapProjection(config.hidden_size, width)
        self.mix = nn.Parameter(torch.empty(()))  # lambda_i
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, config.feed_forward_factor * width)
        self.contract = nn.Linear(config.feed_forward_factor * width, width)

    def forward(self, side: Tensor, tap: Tensor, mask: Tensor | None) -> Tensor:
        """Return a_{i+1} (n, t, d / r) of a_i and b_{i+1} (n, t, d); mask: as from side_mask."""
        hidden = torch.lerp(side, self.down(tap), self.mix)
        count, length, width = hidden.shape
        fused = self.query_key_value(self.attention_norm(hidden))
        query, key, value = fused.view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.is_causal and mask is None)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).reshape(count, length, width))
        return hidden + self.contract(F.gelu(self.expand(self.feed_forward_norm(hidden))))


class SideHead(nn.Module):
    """W_up, the sum with the backbone's last activation, mean pooling and the task's head.

    Pooling is a mean, so it changes places with W_up: pooling first makes the up-projection t times cheaper.
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__()
        self.rate, self.seed = config.dropout, config.seed
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_outputs)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("inverse_std", torch.ones(config.hidden_size))

    def forward(self, side: Tensor, last_hidden: Tensor, attention_mask: Tensor, sample_ids: Tensor, epoch: int) -> Tensor:
        """Return (n, num_outputs): a_L (n, t, d / r), b_L (n, t, d), mask (n, t), sample ids (n,) int64 for the dropout."""
        share = attention_mask.to(side.dtype)
        share = (share / share.sum(dim=1, keepdim=True))[:, None]  # (n, 1, t): a pooling matrix
        last = (torch.bmm(share, last_hidden.to(side.dtype)).squeeze(1) - self.mean) * self.inverse_std
        pooled = self.up(torch.bmm(share, self.norm(side)).squeeze(1)) + last
        if self.training:
            pooled = stateless_dropout(pooled, sample_ids, rate=self.rate, seed=self.seed, epoch=epoch)
        return self.output(pooled)


class ParallelAdapterStage(nn.Module):
    """Adapters [start, stop): what a pipeline stage trains beside its backbone layers.

    Parameters carry the global layer index in their names: the union of all stages' state_dicts is the whole adapter's.
    Initial weights depend on config.seed and the parameter's name, not on how the adapter is cut.
    """

    def __init__(self, config: ParallelAdapterConfig, start: int, stop: int) -> None:
        super().__init__()
        if not 0 <= start < stop <= config.num_layers:
            raise ConfigError(f"Adapters [{start}, {stop}) were asked for.", f"There are {config.num_layers}.", "Change the stage.")
        self.config, self.start, self.stop = config, start, stop
        self.first = TapProjection(config.hidden_size, config.width) if start == 0 else None
        self.layers = nn.ModuleDict({str(index): SideLayer(config) for index in range(start, stop)})
        self.last = SideHead(config) if stop == config.num_layers else None
        initialize(self, "fan_in")

    def forward(self, side: Tensor | None, taps: Sequence[Tensor] | Tensor, attention_mask: Tensor) -> Tensor:
        """Return the side output (n, t, d / r).

        side: the stage before's side output, None in the first stage.  attention_mask: (n, t), 1 for real tokens.
        taps: as BackboneStage gives them, (n, t, d) each (or stacked): b_0 first in the first stage, then one for each layer.
        """
        if (side is None) != (self.first is not None) or len(taps) != len(self.layers) + (self.first is not None):
            raise ValueError(f"stage [{self.start}, {self.stop}) got {len(taps)} taps and {'no' if side is None else 'a'} side input")
        at = 0
        if self.first is not None:
            side, at = self.first(taps[0]), 1
        mask = side_mask(attention_mask, is_causal=self.config.is_causal)
        for offset, layer in enumerate(self.layers.values()):
            side = layer(side, taps[at + offset], mask)
        assert side is not None
        return side

    def head(self, side: Tensor, last_hidden: Tensor, attention_mask: Tensor, sample_ids: Tensor, epoch: int) -> Tensor:
        """Return the logits (n, num_outputs); only the last stage has a head.  last_hidden: b_L, the last tap."""
        assert self.last is not None, f"stage [{self.start}, {self.stop}) has no head"
        return self.last(side, last_hidden, attention_mask, sample_ids, epoch)


class ParallelAdapter(ParallelAdapterStage):
    """The whole adapter on one device."""

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__(config, 0, config.num_layers)

    def predict(self, taps: Sequence[Tensor] | Tensor, attention_mask: Tensor, sample_ids: Tensor, epoch: int = 0) -> Tensor:
        """Return the logits (n, num_outputs) of all taps b_0 ... b_L; sample ids and epoch matter in training mode only."""
        return self.head(self(None, taps, attention_mask), taps[-1], attention_mask, sample_ids, epoch)


def side_mask(attention_mask: Tensor, *, is_causal: bool) -> Tensor | None:
    """Return (n, 1, 1 or t, t) bool, True where a query may look; None without padding."""
    if bool(attention_mask.all()):
        return None
    mask = attention_mask.bool()[:, None, None, :]
    if is_causal:
        length = attention_mask.shape[1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask


def task_loss(logits: Tensor, labels: Tensor, kind: str, *, reduction: str = "mean") -> Tensor:
    """Return cross entropy (classification, labels (n,) int64) or squared error (regression, labels (n,) float).

    reduction: 'mean', or 'sum' when a mini-batch is divided among devices and each divides by the whole's size.
    """
    if kind == "regression":
        return F.mse_loss(logits.squeeze(1), labels.to(logits.dtype), reduction=reduction)
    return F.cross_entropy(logits, labels, reduction=reduction)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW's parameter groups: weight decay on matrices only, not on biases, norms and lambdas."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
