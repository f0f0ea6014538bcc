"""What is settled of a fine-tuning job before it runs."""

from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from tests.methods.builders import write_sentences
from workbench.core import Job
from workbench.core.errors import ConfigError
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.prepare import prepare
from workbench.methods.training.handlers import Targets
from workbench.models.loading import load_stack
from workbench.models.saving import TrainedDescription, load_trained, save_trained
from workbench.models.techniques import TechniqueConfig, TechniqueStage, predict
from workbench.tasks.tokenize import evaluation_batches

SHAPE = {
    "technique": "adapters",
    "hidden_size": 32,
    "num_layers": 6,
    "bottleneck": 8,
    "kind": "regression",
    "num_outputs": 1,
    "dropout": 0.0,
}


def stage_of(**changes: object) -> TechniqueStage:
    stack = load_stack("tiny-bert")
    return TechniqueStage(stack.stage(0, stack.num_layers), TechniqueConfig(**SHAPE | changes))


def test_ratings_are_standardised_by_the_training_samples_alone(tmp_path: Path) -> None:
    """What is saved knows how: loaded again it answers in the labels' own units."""
    sizes = {"train_samples": 40, "validation_samples": 8, "test_samples": 8, "max_length": 16}
    job = Job(
        method="fine_tuning",
        model="tiny-bert",
        task="sentiment-rating",
        data=str(write_sentences(tmp_path / "data")),
        **sizes,
    )
    prepared = prepare(job)
    mean, deviation = fmean(prepared.train.labels), pstdev(prepared.train.labels)
    assert (prepared.config.label_mean, prepared.config.label_std) == pytest.approx((mean, deviation))
    assert deviation > 0.5 and mean != pytest.approx(fmean(prepared.test.labels), abs=1e-6)
    model = stage_of(label_mean=prepared.config.label_mean, label_std=prepared.config.label_std)
    model.head.output.weight.data.zero_()
    model.head.output.bias.data.fill_(2.0)
    description = TrainedDescription(config=model.config, model=job.model)
    loaded, _ = load_trained(save_trained(tmp_path / "trained", model, description))
    predicted = predict(loaded, evaluation_batches(prepared.test))
    assert [float(row) for part in predicted.logits for row in part] == pytest.approx([mean + 2 * deviation] * 8)
    assert prepare(Job(method="fine_tuning", model="tiny-bert", data=job.data, **sizes)).config.label_std == 1.0


def test_the_loss_is_that_of_standardised_labels() -> None:
    labels, ids, mask = torch.tensor([3.5, 2.0, 3.1]), torch.randint(5, 60, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    losses, gradients = [], []
    for model, targets in ((stage_of(label_mean=3.0, label_std=0.5), labels), (stage_of(), (labels - 3.0) / 0.5)):
        context = StageCompute(model).forward(
            ids, mask, Targets(labels=targets, sample_ids=torch.arange(3), epoch=0, total=3)
        )
        context.output.backward()
        losses.append(context.output)
        gradients.append({name: parameter.grad for name, parameter in model.trained().items()})
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("changes", "message"), [({"label_std": 0.0}, "above 0"), ({"kind": "classification", "label_mean": 1.0}, "only a")]
)
def test_labels_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TechniqueConfig(**SHAPE | changes)
