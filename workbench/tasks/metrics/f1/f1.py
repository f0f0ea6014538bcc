"""The metric 'f1' as a module of the evaluate library: evaluate.load(this folder) works without network."""

import datasets
import evaluate

from workbench.tasks.metrics import formulas


class F1(evaluate.Metric):
    """F1 of predictions against references."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=formulas.f1.__doc__ or "",
            citation="",
            inputs_description="predictions, references: numbers, as many of each.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"f1": formulas.f1(predictions, references)}
