"""The published methods, one folder each.  A folder's options.py declares the method without torch (see
core.methods.Declaration).
"""

from __future__ import annotations

from workbench.core.methods import attribute, declaration_of
from workbench.methods.base import Method


def load_method(name: str) -> Method:
    """Return a method by name.  Raises ConfigError that lists the known names."""
    return attribute(declaration_of(name).implementation)()
