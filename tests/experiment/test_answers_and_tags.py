"""Tasks whose head reads every token, from a file to scores and a result, on two emulated devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiment.running import run
from tests.tasks.test_question_answering import squad
from workbench.core import Job
from workbench.core.errors import ConfigError
from workbench.methods.common.result import load_result
from workbench.models.saving import load_trained

SETTINGS = {"model": "tiny-bert", "epochs": 2, "batch_size": 8, "micro_batches": 2}


def test_pac_plus_answers_questions_from_the_cache_too(tmp_path: Path) -> None:
    job = Job(task="question_answering", data=str(squad(tmp_path, contexts=12)), train_samples=6, **SETTINGS)
    report = run(job, tmp_path / "run")
    assert [epoch.cached for epoch in report.epochs] == [False, True]
    assert {"answer_f1", "exact_match"} <= set(report.metrics) and 0 <= report.metrics["answer_f1"] <= 1
    assert report.steps[-1].loss is not None and 0 < report.steps[-1].loss < 6
    model = load_result(tmp_path / "run")
    assert model.about.texts == ("question", "context") and model.evaluate().metrics == pytest.approx(
        model.about.metrics
    )
    [answer] = model.predict([("Who left Rouen?", "Emma left Rouen by ship. " * 40)])
    assert answer.answer in "Emma left Rouen by ship. " * 40
    rows = model.read(str(job.data))
    assert [one.answer in context for one, (_, context) in zip(model.predict(rows[:2]), rows[:2], strict=True)] == [
        True,
        True,
    ]
    assert len(rows) == model.evaluate(str(job.data)).samples > report.job.train_samples


@pytest.mark.filterwarnings("ignore")
def test_fine_tuning_learns_tags_and_says_which_words_were_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, tags = ["Emma", "left", "Rouen", "by", "ship"], ["B-PER", "O", "B-LOC", "O", "O"]
    rows = [{"tokens": words[:count], "tags": tags[:count]} for count in (3, 4, 5) * 8]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"technique": "full", "paradigm": "pipeline_parallel"}
    job = Job(
        method="fine_tuning",
        task="token_classification",
        data=str(tmp_path / "train.jsonl"),
        max_length=10,
        options=options,
        **SETTINGS,
    )
    report = run(job, tmp_path / "run")
    assert {"entity_f1", "accuracy"} <= set(report.metrics)
    assert any("of 17 training samples have words beyond max_length tokens" in note for note in report.notes)
    model, _ = load_trained(report.artifacts["adapter"])
    result = load_result(tmp_path / "run")
    assert result.about.class_names == ("O", "B-LOC", "B-PER") and model.config.kind == "token_classification"
    assert result.evaluate().metrics == pytest.approx(report.metrics)
    tagged = result.predict(["Emma left Rouen", "Emma"])
    assert [[pair.split("/")[0] for pair in str(one.answer).split()] for one in tagged] == [
        ["Emma", "left", "Rouen"],
        ["Emma"],
    ]
    assert {pair.split("/")[1] for one in tagged for pair in str(one.answer).split()} <= set(result.about.class_names)
    assert result.predict([row[0] for row in result.read(str(job.data))]) and result.evaluate(
        str(job.data)
    ).samples == len(rows)
    assert "pipeline_tag: token-classification" in (tmp_path / "run" / "adapter" / "README.md").read_text()


@pytest.mark.filterwarnings("ignore")
def test_confidant_learns_instructions_and_predicts_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"instruction": f"Say {n}.", "input": "", "output": "yes"} for n in range(24)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    settings = SETTINGS | {"model": "tiny-llama", "micro_batches": 1, "learning_rate": 2e-2}
    own = {
        "task": "instruction_tuning",
        "data": str(tmp_path / "train.json"),
        "max_length": 200,
        "options": {"technique": "lora"},
    }
    report = run(Job(method="confidant", **own, **settings), tmp_path / "run")
    assert report.epochs[report.chosen_epoch - 1].metrics["loss"] == min(
        epoch.metrics["loss"] for epoch in report.epochs
    )
    assert (
        report.steps[-1].loss is not None
        and report.steps[0].loss is not None
        and report.steps[-1].loss < report.steps[0].loss
    )
    result = load_result(tmp_path / "run")
    assert result.about.texts == ("instruction", "input") and result.evaluate().metrics == pytest.approx(report.metrics)
    assert result.predict(["Say 1."]) == result.predict([("Say 1.", "")]) and len(
        str(result.predict(["Say 1."])[0].answer)
    )
    assert result.evaluate(str(own["data"])).samples == len(rows)
    with pytest.raises(ConfigError, match="The model reads 512 tokens in all"):
        result.predict(["Say it. " * 200])
    assert "pipeline_tag: text-generation" in (tmp_path / "run" / "adapter" / "README.md").read_text()
