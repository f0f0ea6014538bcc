"""What is settled of a job before it runs."""

from pathlib import Path
from statistics import fmean, pstdev

import pytest

from tests.methods.builders import write_sentences
from workbench.core import Job
from workbench.methods.pac_plus.prepare import prepare
from workbench.models.evaluation import predict
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.saving import TrainedDescription, load_adapter, save_adapter
from workbench.tasks.tokenize import evaluation_batches


def test_ratings_are_standardised_by_the_training_samples_alone(tmp_path: Path) -> None:
    """The saved adapter knows how: it answers in the labels' own units."""
    sizes = {"train_samples": 40, "validation_samples": 8, "test_samples": 8, "max_length": 16}
    job = Job(model="tiny-bert", task="sentiment-rating", data=str(write_sentences(tmp_path / "data")), **sizes)
    prepared = prepare(job)
    mean, deviation = fmean(prepared.train.labels), pstdev(prepared.train.labels)
    assert (prepared.adapter.label_mean, prepared.adapter.label_std) == pytest.approx((mean, deviation))
    assert deviation > 0.5 and mean != pytest.approx(fmean(prepared.test.labels), abs=1e-6)
    description = TrainedDescription(config=prepared.adapter, model=job.model)
    save_adapter(tmp_path / "adapter", ParallelAdapter(prepared.adapter).state_dict(), description)
    adapter, _ = load_adapter(tmp_path / "adapter")
    adapter.last.output.weight.data.zero_()
    adapter.last.output.bias.data.fill_(2.0)
    [predicted] = predict(load_stack(job.model), [adapter], evaluation_batches(prepared.test))
    assert predicted.answers("regression") == pytest.approx([mean + 2 * deviation] * 8)
    assert (prepare(Job(model="tiny-bert", data=job.data, **sizes)).adapter.label_std) == 1.0
