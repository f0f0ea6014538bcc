"""Find the projections inside a stage's layers that LoRA and Adapters are put on, by the families' tables."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import ConfigError
from workbench.models.families import layer_paths
from workbench.models.stack import BackboneStage, part_of


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
