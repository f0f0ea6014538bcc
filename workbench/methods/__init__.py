"""The published methods, one folder each.  A folder's options.py declares the method without torch (see
core.methods.Declaration).
"""

from __future__ import annotations

from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.methods import attribute, declaration_of
from workbench.methods.base import Method


def load_method(name: str) -> Method:
    """Return a method by name.  Raises ConfigError that lists the known names, or for a broken package."""
    named = declaration_of(name).implementation
    try:
        implementation = attribute(named)
    except WorkbenchError:
        raise
    except Exception as error:  # whatever the package's own code raises
        raise ConfigError(
            f"The method '{name}' was asked for.",
            f"{named} cannot be imported: {type(error).__name__}: {error}.",
            "Fix that package, or uninstall it.",
        ) from error
    return implementation()
