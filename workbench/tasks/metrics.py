"""Metrics: accuracy, F1, Pearson and Spearman in numpy, equal to scikit-learn's and scipy's; others from the `evaluate` library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from workbench.core.errors import ConfigError, DivergedError, MissingDataError
from workbench.core.serial import shown
from workbench.network import hub_endpoint, hub_is_reachable


def compute(names: Iterable[str], predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Compute each metric from predictions and references.

    names: of FORMULAS, or names for evaluate.load: a metric on the hub or in a local folder, whose own code is run.
    Raises ConfigError for an unknown name or for unequal or empty inputs, MissingDataError for a metric on the hub if the hub is
    unavailable, DivergedError if predictions are NaN or infinite.
    """
    if not len(references) or len(predictions) != len(references):
        raise ConfigError(
            f"A metric of {len(predictions)} predictions was asked for.",
            f"There are {len(references)} references.",
            "Give as many, at least one.",
        )
    if not all(map(math.isfinite, predictions)):
        raise DivergedError("A metric was asked for.", "Some predictions are no numbers.", "Lower learning_rate.")
    found: dict[str, float] = {}
    for name in names:
        found |= {name: FORMULAS[name](predictions, references)} if name in FORMULAS else _evaluated(name, predictions, references)
    return found


def _evaluated(name: str, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return the value of a metric from the `evaluate` library."""
    asked, own = f"The metric '{shown(name)}' was asked for.", f"{', '.join(FORMULAS)} need no hub."
    if not Path(name).exists() and not hub_is_reachable():
        raise MissingDataError(asked, f"{hub_endpoint()} cannot be reached; {own}", "Choose one of them, or connect to the network.")
    import evaluate  # takes seconds, and most runs do not need it

    try:
        made = evaluate.load(name).compute(predictions=list(predictions), references=list(references))
    except Exception as error:  # the library and the metric's own code may raise anything
        raise ConfigError(asked, f"It does not compute: {shown(str(error), 200)}. {own}", "Choose another.") from error
    return {key: float(value) for key, value in made.items() if isinstance(value, int | float | np.number)}


def accuracy(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the share of equal values."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the harmonic mean of precision and recall for class 1; 0 if class 1 neither occurs nor is predicted."""
    predicted, real = np.asarray(predictions) == 1, np.asarray(references) == 1
    claimed = int(predicted.sum() + real.sum())
    return 2 * int((predicted & real).sum()) / claimed if claimed else 0.0


def macro_f1(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the mean of every class's F1, over the classes that occur or are predicted."""
    predicted, real = np.asarray(predictions), np.asarray(references)
    return float(np.mean([f1(predicted == one, real == one) for one in np.union1d(predicted, real)]))


def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the linear correlation.  It is undefined if either side is constant; then 0 is returned, because reports need a number."""
    one, other = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size > 0 else 0.0


def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the rank correlation, with mean ranks for ties; 0 if either side is constant."""
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: Sequence[float]) -> Sequence[float]:
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - (counts - 1) / 2)[inverse]).tolist()


FORMULAS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "pearson": pearson,
    "spearman": spearman,
}
