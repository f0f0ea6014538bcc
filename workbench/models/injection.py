"""Find the projections inside a stage's layers that techniques train beside, and put Adapters behind them.

Adapters: Houlsby et al., ICML 2019, section 2.1; PAC+, section II, Fig. 2.  Two in each layer, behind the attention's and the
feed-forward's last projection and before the residual connection.
Serial adapters: RingAda, section II-A, Eq. 1, Fig. 1.  One at each layer's end, behind the feed-forward's "add & layer norm".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.families import layer_paths
from workbench.models.stack import BackboneStage, part_of

ADAPTER_ROLES = ("output", "down")
DEVIATION = 0.01
"""Of the initial weights, a normal distribution cut off at twice that: each adapter begins near the identity."""


def projections(stage: BackboneStage, roles: Sequence[str], *, technique: str, all_of_them: bool) -> dict[str, dict[str, str]]:
    """Return each layer's projections in some roles: layer number -> role -> path in the layer.

    all_of_them: a layer needs every role, else one.  Raises ConfigError for a family whose table does not name them.
    """
    found = {}
    for index, layer in stage.layers.items():
        paths = layer_paths(part_of(stage, int(index)), layer)
        own = {role: paths[role] for role in roles if role in paths}
        missing = [role for role in roles if role not in own]
        if not own or (all_of_them and missing):
            raise ConfigError(
                f"{technique} on layers of type {type(layer).__name__} was asked for.",
                f"Their family names no projection in the role of {(' and ' if all_of_them else ' or ').join(missing)}.",
                "Add it to the family's `weights` in workbench/models/families.py, or choose another technique.",
            )
        found[index] = own
    return found


class Bottleneck(nn.Module):
    """hidden + W_up gelu(W_down hidden)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (n, t, d) of (n, t, d)."""
        return hidden + self.up(F.gelu(self.down(hidden)))


class SerialAdapter(nn.Module):
    """h + relu(h W_down) W_up (RingAda, Eq. 1; the non-linear function is MAD-X's, Pfeiffer et al., EMNLP 2020).  No biases."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, width, bias=False), nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (n, t, d) of (n, t, d)."""
        return hidden + self.up(F.relu(self.down(hidden)))


def inject_serial_adapters(stage: BackboneStage, width: int) -> nn.ModuleDict:
    """Put an adapter at the end of each layer and return them, by layer; the stage must not have any yet."""
    found = nn.ModuleDict({index: SerialAdapter(stage.hidden_size, width) for index in stage.layers})

    def adapted(adapter: nn.Module, output: Any) -> Any:
        return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)

    for index, adapter in found.items():
        stage.layers[index].register_forward_hook(lambda module, inputs, output, adapter=adapter: adapted(adapter, output))
    return found


def inject_adapters(stage: BackboneStage, width: int, *, train_norms: bool) -> nn.ModuleDict:
    """Put adapters behind each layer's projections and return them, by layer and role; the stage must not have any yet.

    train_norms: the layers' norms are trained too, as Houlsby et al. do.  Raises ConfigError for a family whose table names no projections.
    """
    found = nn.ModuleDict()
    for index, paths in projections(stage, ADAPTER_ROLES, technique="Adapters", all_of_them=True).items():
        layer = stage.layers[index]
        found[index] = nn.ModuleDict({role: Bottleneck(stage.hidden_size, width) for role in ADAPTER_ROLES})
        for role, adapter in found[index].items():
            layer.get_submodule(paths[role]).register_forward_hook(lambda module, inputs, output, adapter=adapter: adapter(output))
        for module in layer.modules() if train_norms else ():
            if "Norm" in type(module).__name__:
                module.requires_grad_(True)
    return found
