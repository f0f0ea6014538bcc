"""The published methods, one folder each. Every folder has the same files."""

from __future__ import annotations

import importlib

from workbench.core.errors import ConfigError, did_you_mean
from workbench.methods.base import Method

METHODS = {
    "pac_plus": "workbench.methods.pac_plus.method:PacPlus",
    "galaxy_plus": "workbench.methods.galaxy_plus.method:GalaxyPlus",
    "fine_tuning": "workbench.methods.fine_tuning.method:FineTuning",
    "p_rge": "workbench.methods.p_rge.method:PRGE",
    "ringada": "workbench.methods.ringada.method:RingAda",
    "confidant": "workbench.methods.confidant.method:Confidant",
}


INFERRING = ("galaxy_plus",)
"""Methods that answer requests, once through the test split, instead of training for epochs."""
NO_EPOCHS = (*INFERRING, "p_rge")
"""Methods without an end at convergence: P-RGE's losses estimate gradients, and vary too much."""
WITH_JAX = ("fine_tuning", "confidant")
"""Methods in which JAX may compute a device's layers."""


def load_method(name: str) -> Method:
    """Return a method by name.  Raises ConfigError that lists the known names."""
    if name not in METHODS:
        raise ConfigError(f"The method '{name}' was asked for.", f"Known methods: {', '.join(METHODS)}.", did_you_mean(name, METHODS))
    module, _, attribute = METHODS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
