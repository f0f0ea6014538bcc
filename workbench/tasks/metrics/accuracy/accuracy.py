"""The metric 'accuracy' as a module of the evaluate library: evaluate.load(this folder) works without network."""

import datasets
import evaluate

from workbench.tasks.metrics import formulas


class Accuracy(evaluate.Metric):
    """Accuracy of predictions against references."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=formulas.accuracy.__doc__ or "",
            citation="",
            inputs_description="predictions, references: numbers, as many of each.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"accuracy": formulas.accuracy(predictions, references)}
