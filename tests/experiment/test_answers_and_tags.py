"""Tasks whose head reads every token, from a file to scores and a result, on two emulated devices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.experiment.running import run
from tests.tasks.test_question_answering import squad
from workbench.core import Job
from workbench.methods.fine_tuning import method as fine_tuning
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.models.technique_saving import load_trained

SETTINGS = {"model": "tiny-bert", "epochs": 2, "batch_size": 8, "micro_batches": 2}


def test_pac_plus_answers_questions_from_the_cache_too(tmp_path: Path) -> None:
    job = Job(task="question_answering", data=str(squad(tmp_path, contexts=12)), train_samples=6, **SETTINGS)
    report = run(job, tmp_path / "run")
    assert [epoch.cached for epoch in report.epochs] == [False, True]
    assert {"answer_f1", "exact_match"} <= set(report.metrics) and 0 <= report.metrics["answer_f1"] <= 1
    assert report.steps[-1].loss is not None and 0 < report.steps[-1].loss < 6


@pytest.mark.filterwarnings("ignore")
def test_fine_tuning_learns_tags_and_says_which_words_were_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief = partial(measure_layers, batch_sizes=(1, 4), lengths=(), budget_s=0.1)
    monkeypatch.setattr(fine_tuning, "measure_layers", brief)
    words, tags = ["Emma", "left", "Rouen", "by", "ship"], ["B-PER", "O", "B-LOC", "O", "O"]
    rows = [{"tokens": words[:count], "tags": tags[:count]} for count in (3, 4, 5) * 8]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"technique": "full", "paradigm": "pipeline_parallel"}
    job = Job(
        method="fine_tuning", task="token_classification", data=str(tmp_path / "train.jsonl"), max_length=10, options=options, **SETTINGS
    )
    report = run(job, tmp_path / "run")
    assert {"entity_f1", "accuracy"} <= set(report.metrics)
    assert any("of 17 training samples have words beyond max_length tokens" in note for note in report.notes)
    model, about = load_trained(report.artifacts["adapter"])
    assert about.class_names == ("O", "B-LOC", "B-PER") and model.config.kind == "token_classification"
