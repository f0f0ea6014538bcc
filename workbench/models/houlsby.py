"""Adapters inside a frozen backbone (Houlsby et al., ICML 2019, section 2.1; PAC+, section II, Fig. 2).

Two in each layer, behind the attention's and the feed-forward's last projection and before the residual connection.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.injection import projections
from workbench.models.stack import BackboneStage

ROLES = ("output", "down")
DEVIATION = 0.01
"""Of the initial weights, a normal distribution cut off at twice that: each adapter begins near the identity."""


class Bottleneck(nn.Module):
    """hidden + W_up gelu(W_down hidden)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (n, t, d) of (n, t, d)."""
        return hidden + self.up(F.gelu(self.down(hidden)))


def inject_adapters(stage: BackboneStage, width: int, *, train_norms: bool) -> nn.ModuleDict:
    """Put adapters behind each layer's projections and return them, by layer and role; the stage must not have any yet.

    train_norms: the layers' norms are trained too, as Houlsby et al. do.  Raises ConfigError for a family whose table names no projections.
    """
    found = nn.ModuleDict()
    for index, paths in projections(stage, ROLES, technique="Adapters", all_of_them=True).items():
        layer = stage.layers[index]
        found[index] = nn.ModuleDict({role: Bottleneck(stage.hidden_size, width) for role in ROLES})
        for role, adapter in found[index].items():
            layer.get_submodule(paths[role]).register_forward_hook(_behind(adapter))
        for module in layer.modules() if train_norms else ():
            if "Norm" in type(module).__name__:
                module.requires_grad_(True)
    return found


def _behind(adapter: nn.Module) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return adapter(output)

    return hook
