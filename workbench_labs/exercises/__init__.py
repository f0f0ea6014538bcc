"""Checks for the notebooks' exercises: each examines an answer and says whether it is right, or what to check again.

data/exercises.toml describes those whose answer a formula gives; the others are functions of this package's modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from workbench.core.catalogue import data_folder
from workbench.core.serial import from_builtins, read_toml
from workbench_labs.exercises.training import Verdict, number_verdict
from workbench_labs.progress import recorded

MODULES = ("training", "dividing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An exercise of data/exercises.toml, which documents each field."""

    question: str
    given: tuple[str, ...]
    expected: str
    hint: str
    right: str
    tolerance: float

    def check(self, answer: float | None, *values: Any, **named: Any) -> Verdict:
        """Compare an answer with the formula's value for the given numbers.  Raises TypeError unless all of them are
        given, once.
        """
        names = dict(zip(self.given, values, strict=False)) | named
        if sorted(names) != sorted(self.given) or len(values) + len(named) != len(names):
            raise TypeError(f"The exercise takes {', '.join(self.given)}, not {', '.join(names)}: {self.question}")
        scope = {**vars(math), **names}
        scope["expected"] = eval(self.expected, scope)  # the package's own file
        hint, right = (eval(f"f{text!r}", scope) for text in (self.hint, self.right))
        return number_verdict(answer, scope["expected"], hint, right, self.tolerance)


@cache
def checks() -> dict[str, Callable[..., Verdict]]:
    """Return all checks by name."""
    path = data_folder() / "exercises.toml"
    found = {
        name: from_builtins(written, Formula, source=f"'{name}' of '{path}'").check
        for name, written in read_toml(path).items()
    }
    modules = (import_module(f"{__name__}.{module}") for module in MODULES)
    return found | {
        name: check for module in modules for name, check in vars(module).items() if name.startswith("check_")
    }


def __getattr__(name: str) -> Callable[..., Verdict]:
    """Return a check by its name; it notes when an answer is right."""
    if name.startswith("check_") and name in checks():
        return recorded(name, checks()[name])
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *checks()]
