"""Metrics agree with scikit-learn and scipy, and load through `evaluate` without network."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from workbench.core.errors import WorkbenchError
from workbench.tasks.metrics import compute, load_metric, metric_path
from workbench.tasks.metrics.formulas import FORMULAS

REFERENCE = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda references, predictions: sklearn.metrics.f1_score(references, predictions, zero_division=0),
    "pearson": lambda references, predictions: scipy.stats.pearsonr(references, predictions).statistic,
    "spearman": lambda references, predictions: scipy.stats.spearmanr(references, predictions).statistic,
}


def data(name, seed):
    generator = np.random.default_rng(seed)
    if name in ("accuracy", "f1"):
        return generator.integers(0, 2, 50).tolist(), generator.integers(0, 2, 50).tolist()
    references = generator.normal(size=50).round(1)  # rounded: with ties
    return (references + generator.normal(size=50)).round(1).tolist(), references.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMULAS)
def test_equal_to_the_reference_libraries(name, seed):
    predictions, references = data(name, seed)
    assert compute([name], predictions, references)[name] == pytest.approx(REFERENCE[name](references, predictions), abs=1e-12)


def test_edge_cases():
    assert compute(["f1", "accuracy"], [0, 0], [0, 0]) == {"f1": 0.0, "accuracy": 1.0}
    assert compute(["f1"], [0, 0], [1, 1]) == {"f1": 0.0}
    assert compute(["pearson", "spearman"], [1.0, 1.0], [1.0, 2.0]) == {"pearson": 0.0, "spearman": 0.0}
    assert compute(["pearson"], [5.0], [2.0]) == {"pearson": 0.0}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_evaluate_module_gives_the_same(name, tmp_path):
    predictions, references = data(name, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own imports
        metric = load_metric(name, tmp_path)
    assert metric.compute(predictions=predictions, references=references) == pytest.approx(compute([name], predictions, references))


def test_evaluate_load_works_offline(tmp_path):
    """As a user of the library would: by the folder's path, in a fresh process, without network."""
    code = "import evaluate, sys\nfor p in sys.argv[1:]: print(evaluate.load(p).compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1]))"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(metric_path("f1").parents[3]), "HOME": str(tmp_path)}
    paths = [str(metric_path(name)) for name in FORMULAS]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: value for line in done.stdout.splitlines() for name, value in eval(line).items()}
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "pearson": 0.5773502691896258, "spearman": 0.5773502691896258})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute(["bleu"], [1], [1]), "accuracy, f1"),
        (lambda: compute(["f1"], [1], [1, 0]), "1 predictions"),
        (lambda: compute(["f1"], [], []), "0 references"),
        (lambda: compute(["pearson"], [1.0, math.nan], [1, 0]), "Some predictions are no numbers"),
        (lambda: compute(["f1"], [1, -math.inf], [1, 0]), "Some predictions are no numbers"),
        (lambda: metric_path("bleu"), "accuracy, f1"),
    ],
)
def test_what_cannot_be_computed(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call()
