"""The results that the study of P-RGE carries: trainings as seeds and scalars, and the tables that were made from
them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from workbench.core.sealed import read_lines
from workbench.core.serial import from_json
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.zeroth_order import CausalModel, LogFile, TrainableConfig, load_causal_model, replay
from workbench.tasks import load_task
from workbench.tasks.prompts import evaluate
from workbench.trainings.queries import Trial
from workbench_studies.papers.p_rge import executed
from workbench_studies.papers.result import Result, Settings, paper_folder

FOLDER = paper_folder("p_rge") / "results"
TABLE, LONG = (from_json((FOLDER / f"{name}.json").read_bytes(), Result) for name in ("table2", "table2-long"))
KEPT = FOLDER / "trials"


def trials(result: Result) -> list[Trial]:
    """Return what a table's rows trained: the rates that were compared with the first seed, and the chosen one with all
    seeds."""
    rates = {row[0]: row[4] for row in result.tables[0].rows}
    expected = executed.rows_of("table2" if result is TABLE else "table2-long", Settings())
    results = []
    for name, one in expected.items():
        if one.steps:
            tried = (
                executed.trials()["rates"][f"{one.method}, {one.technique}"] if result is TABLE else executed.LONG_RATES
            )
            assert rates[name] in tried
            short = min(one.steps, executed.SEARCH_STEPS)
            results += [replace(one, learning_rate=rate, steps=short) for rate in tried]
            results += [replace(one, learning_rate=rates[name], seed=seed) for seed in (0, 1, 2)]
    return results


def test_every_training_of_the_tables_is_there_whole_and_nothing_else():
    files: dict[Path, Trial] = {}
    for file in (*trials(TABLE), *trials(LONG)):  # a longer one goes on from a shorter one's steps
        path = file.steps_path(KEPT)
        files[path] = max(files.get(path, file), file, key=lambda trial: trial.steps)
    assert set(files) == set((FOLDER / "trials" / "steps").iterdir())
    for path, file in files.items():
        log = read_lines(path)
        steps = [json.loads(content) for content in log.contents]
        assert not log.damage and log.owner == json.loads(json.dumps(file.run_header))
        assert [step[0] for step in steps] == list(range(file.steps))
        assert all(len(step[2]) == len(step[3]) == file.queries for step in steps)


@pytest.mark.parametrize(
    ("result", "rows"),
    [(TABLE, (executed.MEZO, executed.Q4, executed.Q16)), (LONG, (executed.Q4,))],
    ids=["table2", "table2-long"],
)
def test_a_table_says_what_it_was_made_with(result, rows):
    assert {name: len(str(row[-1]).split(", ")) for name, *row in result.tables[0].rows if row[2]} == dict.fromkeys(
        rows, 3
    )
    assert result.source == "executed" and not result.quick


def test_the_long_training_reaches_what_its_finding_says():
    [row] = [row for row in LONG.tables[0].rows if row[0] == executed.Q4]
    each = [float(score) for score in str(row[-1]).split(", ")]
    assert row[5] == pytest.approx(sum(each) / 3, abs=0.1)
    assert f"{row[5]:.1f} %" in LONG.findings[0]


def score(model: CausalModel, name: str, max_length: int) -> float:
    task = load_task("sentiment", prompted=True, train_samples=1, validation_samples=1, test_samples=100)
    return 100 * evaluate(model.logits_at, task.test.prompts, model_encoder(task.template, name, max_length)).value


@cache
def untrained_score(name: str, max_length: int) -> float:
    """Return the score before any step, which no setting of LoRA changes: its B is zero."""
    return score(load_causal_model(name, TrainableConfig()), name, max_length)


@pytest.mark.parametrize(("result", "queries"), [(TABLE, 1), (LONG, 4)], ids=["q=1", "long"])
def test_a_kept_training_replayed_answers_as_the_table_says(result, queries, tmp_path):
    """No forward pass is needed to have the trained weights again; a tenth of the test sentences is scored."""
    trial = next(trial for trial in trials(result) if trial.queries == queries and trial.seed == 1)
    assert {field.name for field in fields(Trial)} == set(trial.run_header)
    copy = tmp_path / "steps.jsonl"
    copy.write_bytes(trial.steps_path(KEPT).read_bytes())
    model = load_causal_model(trial.model, TrainableConfig(rank=trial.rank, alpha=trial.alpha, seed=trial.seed))
    replay(model.trainables, LogFile(copy, trial.run_header).steps)
    after = score(model, trial.model, trial.max_length)
    [printed] = [str(row[-1]).split(", ") for row in result.tables[0].rows if row[1] == queries]
    assert after == pytest.approx(float(printed[1]), abs=12.0)  # three standard errors of 100 sentences
    assert after > untrained_score(trial.model, trial.max_length) + 10
