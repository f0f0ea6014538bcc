"""Checks for the notebooks' exercises: each examines an answer and says whether it is right, or what to check again.

They are functions of this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from workbench_labs.exercises.training import Verdict
from workbench_labs.progress import recorded

MODULES = ("training", "dividing")


@cache
def checks() -> dict[str, Callable[..., Verdict]]:
    """Return all checks by name."""
    modules = (import_module(f"{__name__}.{module}") for module in MODULES)
    return {name: check for module in modules for name, check in vars(module).items() if name.startswith("check_")}


def __getattr__(name: str) -> Callable[..., Verdict]:
    """Return a check by its name; it notes when an answer is right."""
    if name.startswith("check_") and name in checks():
        return recorded(name, checks()[name])
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *checks()]
