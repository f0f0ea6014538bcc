"""Results of every kind of task, saved without a training: they answer, and are scored, as their task asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_report import report

from tests.tasks.prompts.official_files import write_official
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.common.result import LoadedResult, load_result, write_result
from workbench.methods.fine_tuning import prepare as fine_tuning_prepare
from workbench.methods.p_rge import prepare as p_rge_prepare
from workbench.methods.p_rge import worker as p_rge_worker
from workbench.methods.pac_plus import prepare as pac_plus_prepare
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.saving import TrainedDescription, save_adapter, save_trained
from workbench.models.techniques import TechniqueStage
from workbench.models.zeroth_order.loading import save_trained as save_prompted

METRICS = {"classification": "accuracy", "regression": "pearson", "sequence_to_sequence": "accuracy"}


def saved(folder: Path, job: Job) -> LoadedResult:
    """Return the result of a job whose training changed nothing."""
    prepared: Any
    if job.method == "pac_plus":
        prepared = pac_plus_prepare.prepare(job)
        save_adapter(folder, ParallelAdapter(prepared.adapter).state_dict(), TrainedDescription(config=prepared.adapter, model=job.model))
    elif job.method == "fine_tuning":
        prepared = fine_tuning_prepare.prepare(job)
        stack = load_stack(job.model)
        model = TechniqueStage(stack.stage(0, stack.num_layers), prepared.config)
        quantization = prepared.options.quantization
        save_trained(folder, model, TrainedDescription(config=prepared.config, model=job.model, quantization=quantization))
    else:
        prepared = p_rge_prepare.prepare(job)
        values = p_rge_worker.load_model(prepared).trainables.state()
        save_prompted(folder / "trained.safetensors", values, TrainedDescription(config=prepared.trainable, model=job.model))
    metrics = {METRICS.get(prepared.task.kind, "accuracy"): 0.5}
    made = replace(report(), job=job, artifacts={"adapter": str(folder)}, metrics=metrics, chosen_epoch=2)
    write_result(made, prepared, "lora")
    assert "after epoch 2, the best on" in (folder / "README.md").read_text()
    return load_result(folder)


def test_numbers_for_pairs_over_a_backbone_in_few_bits(tmp_path: Path) -> None:
    data = tmp_path / "pairs.csv"
    rows = [f"a film,{'the film ' * (row % 7 + 1)},{row % 7 / 2}" for row in range(60)]
    data.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
    options = {"technique": "lora", "backbone_dtype": "int8"}
    model = saved(tmp_path / "result", Job(method="fine_tuning", model="tiny-bert-2", task="regression", data=str(data), options=options))
    whole = saved(tmp_path / "float32", replace(model.about.job, options={"technique": "lora"}))
    [answer] = model.predict([("a film", "the film")])
    assert isinstance(answer.answer, float) and answer.probabilities == {}
    assert 0 < abs(answer.answer - float(whole.predict([("a film", "the film")])[0].answer)) < 0.1
    other = tmp_path / "other.csv"
    other.write_text("one,two,stars\na film,the film,1\nnews,people,2.5\ntown,a town,3\n")
    found = model.evaluate(str(other), "text=one,pair=two,label=stars")
    assert (set(found.metrics), found.samples, found.source) == ({"pearson"}, 3, "other.csv")
    assert model.read(str(other), "text=one,pair=two")[1] == ("news", "people")
    assert model.evaluate(samples=4).samples == 4
    with pytest.raises(ConfigError, match=r"is text and pair. Give 2 for each sample"):
        model.predict(["a film"])
    card = (tmp_path / "result" / "README.md").read_text()
    assert "`tiny-bert-2` is a random model" in card and "By the workbench alone" in card


def test_words_that_a_decoder_writes(tmp_path: Path) -> None:
    write_official(tmp_path / "data", "sst2")
    job = Job(model="tiny-t5-2", task="sst2", data=str(tmp_path / "data"), options={"target": "text"})
    model = saved(tmp_path / "result", job)
    [answer] = model.predict(["a film"])
    assert answer.answer in ("negative", "positive") and sum(answer.probabilities.values()) == pytest.approx(1)
    assert model.evaluate().samples == 10


@pytest.mark.parametrize("task", ["copa", "squad", "boolq"])
def test_prompts_of_every_kind(task: str, tmp_path: Path) -> None:
    write_official(tmp_path / "data", task)
    job = Job(method="p_rge", model="tiny-llama-2", task=task, data=str(tmp_path / "data"), max_length=128, options={"rank": 2})
    model = saved(tmp_path / "result", job)
    names = {"copa": ("premise", "conjunction", "candidate1", "candidate2"), "squad": ("title", "context", "question")}
    assert model.about.texts == names.get(task, ("passage", "question"))
    texts = ["a film", "because", "it was good", "it was bad"][: len(model.about.texts)]
    (tmp_path / "some.csv").write_text("\n".join([",".join(model.about.texts), ",".join(texts)]) + "\n")
    assert model.read(str(tmp_path / "some.csv")) == [tuple(texts)]
    [answer] = model.predict([texts])
    assert isinstance(answer.answer, str)
    if task == "copa":
        assert answer.answer in texts[2:]
    if task == "boolq":
        assert tuple(answer.probabilities) == ("No", "Yes")
    else:
        with pytest.raises(ConfigError, match="Its answers are texts, not classes"):
            model.evaluate(str(tmp_path / "some.csv"))
    assert model.evaluate(samples=2).samples == 2


def test_pictures_are_scored_and_not_read_from_sentences(tmp_path: Path) -> None:
    job = Job(model="tiny-vit-2", task="digits", test_samples=20)
    model = saved(tmp_path / "result", job)
    assert model.evaluate().samples == 20
    with pytest.raises(ConfigError, match="A sample of 'digits' is a picture"):
        model.predict(["a seven"])
