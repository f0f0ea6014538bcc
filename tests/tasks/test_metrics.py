"""Metrics agree with scikit-learn and scipy; others are loaded through `evaluate`."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from workbench.core.errors import WorkbenchError
from workbench.tasks.metrics import FORMULAS, compute

REFERENCE = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda references, predictions: sklearn.metrics.f1_score(references, predictions, zero_division=0),
    "macro_f1": lambda references, predictions: sklearn.metrics.f1_score(
        references, predictions, average="macro", zero_division=0
    ),
    "pearson": lambda references, predictions: scipy.stats.pearsonr(references, predictions).statistic,
    "spearman": lambda references, predictions: scipy.stats.spearmanr(references, predictions).statistic,
}


def data(name, seed):
    generator = np.random.default_rng(seed)
    if name == "macro_f1":
        return generator.integers(0, 5, 20).tolist(), generator.integers(0, 4, 20).tolist()
    if name in ("accuracy", "f1"):
        return generator.integers(0, 2, 50).tolist(), generator.integers(0, 2, 50).tolist()
    references = generator.normal(size=50).round(1)  # rounded: with ties
    return (references + generator.normal(size=50)).round(1).tolist(), references.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMULAS)
def test_equal_to_the_reference_libraries(name, seed):
    predictions, references = data(name, seed)
    assert compute([name], predictions, references)[name] == pytest.approx(
        REFERENCE[name](references, predictions), abs=1e-12
    )


def test_edge_cases():
    assert compute(["f1", "accuracy"], [0, 0], [0, 0]) == {"f1": 0.0, "accuracy": 1.0}
    assert compute(["f1"], [0, 0], [1, 1]) == {"f1": 0.0}
    assert compute(["pearson", "spearman"], [1.0, 1.0], [1.0, 2.0]) == {"pearson": 0.0, "spearman": 0.0}
    assert compute(["pearson"], [5.0], [2.0]) == {"pearson": 0.0}


METRIC = """
import datasets
import evaluate
import sklearn.metrics

class Agreement(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"agreement": sklearn.metrics.accuracy_score(references, predictions)}
"""


def test_any_other_metric_is_loaded_by_evaluate(tmp_path):
    """In a fresh process without network, by a folder's path; a name of the hub works alike where it can be reached."""
    (tmp_path / "agreement").mkdir()
    (tmp_path / "agreement" / "agreement.py").write_text(METRIC)
    code = (
        "import sys; from workbench.tasks.metrics import compute; print(compute(['accuracy', sys.argv[1]], [1, 0, 1, "
        "1], [1, 0, 0, 1]))"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", code, str(tmp_path / "agreement")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == {"accuracy": 0.75, "agreement": 0.75}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute(["bleu"], [1], [1]), "accuracy, f1"),
        (lambda: compute(["f1"], [1], [1, 0]), "1 predictions"),
        (lambda: compute(["f1"], [], []), "0 references"),
        (lambda: compute(["pearson"], [1.0, math.nan], [1, 0]), "Some predictions are not numbers"),
        (lambda: compute(["f1"], [1, -math.inf], [1, 0]), "Some predictions are not numbers"),
        (lambda: compute([__file__], [1], [1]), "does not compute"),
    ],
)
def test_what_cannot_be_computed(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call()
