"""Accuracy, F1, Pearson and Spearman, in numpy; equal to scikit-learn's and scipy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def accuracy(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the share of equal values."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the harmonic mean of precision and recall of class 1; 0 if class 1 neither occurs nor is predicted."""
    predicted, real = np.asarray(predictions) == 1, np.asarray(references) == 1
    claimed = int(predicted.sum() + real.sum())
    return 2 * int((predicted & real).sum()) / claimed if claimed else 0.0


def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the linear correlation; 0 if either side is constant, where it is not defined and a report still needs a number."""
    one, other = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size > 0 else 0.0


def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the correlation of ranks, ties sharing their mean rank; 0 if either side is constant."""
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: Sequence[float]) -> Sequence[float]:
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - (counts - 1) / 2)[inverse]).tolist()


FORMULAS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "pearson": pearson,
    "spearman": spearman,
}
