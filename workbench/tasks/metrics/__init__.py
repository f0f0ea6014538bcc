"""Metrics: formulas here, and each as a local module of the `evaluate` library in the folder of its name.

compute() uses the formulas themselves: importing `evaluate` takes 5 s and writes to the user's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, DivergedError
from workbench.tasks.metrics.formulas import FORMULAS


def compute(names: Iterable[str], predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return each metric of predictions against references.

    Raises ConfigError for an unknown name or unequal or empty inputs, DivergedError for predictions that are no numbers.
    """
    if not len(references) or len(predictions) != len(references):
        raise ConfigError(
            f"A metric of {len(predictions)} predictions was asked for.",
            f"There are {len(references)} references.",
            "Give as many, at least one.",
        )
    if not all(map(math.isfinite, predictions)):
        raise DivergedError("A metric was asked for.", "Some predictions are no numbers.", "Lower learning_rate.")
    return {name: _formula(name)(predictions, references) for name in names}


def metric_path(name: str) -> Path:
    """Return the folder to give to evaluate.load().  Raises ConfigError for an unknown name."""
    _formula(name)
    return Path(__file__).parent / name


def load_metric(name: str, cache: Path | str) -> Any:
    """Return the metric as an evaluate.EvaluationModule, without network and without writing anywhere but under `cache`."""
    _formula(name)
    module = import_module(f"workbench.tasks.metrics.{name}.{name}")
    return getattr(module, name.capitalize())(keep_in_memory=True, cache_dir=str(cache))


def _formula(name: str) -> Any:
    if name not in FORMULAS:
        raise ConfigError(f"The metric '{name}' was asked for.", f"Known are {', '.join(FORMULAS)}.", "Choose one of them.")
    return FORMULAS[name]
