"""The metric 'pearson' as a module of the evaluate library: evaluate.load(this folder) works without network."""

import datasets
import evaluate

from workbench.tasks.metrics import formulas


class Pearson(evaluate.Metric):
    """Pearson of predictions against references."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=formulas.pearson.__doc__ or "",
            citation="",
            inputs_description="predictions, references: numbers, as many of each.",
            features=datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"pearson": formulas.pearson(predictions, references)}
