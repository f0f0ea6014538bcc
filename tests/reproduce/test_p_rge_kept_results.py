"""The results that data/results/p_rge carries: trainings as seeds and scalars, and the table that was made from them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from workbench.core.serial import from_json
from workbench.models.loading import load_tokenizer
from workbench.models.zeroth_order import LogFile, TrainableConfig, load_causal_model, replay
from workbench.reproduce.p_rge import executed_settings, executed_table2
from workbench.reproduce.p_rge.executed_runs import Trial, TrialFolder
from workbench.reproduce.result import Result, Settings
from workbench.tasks.prompts import evaluate, load_prompt_task

FOLDER = Path(__file__).parents[2] / "data" / "results" / "p_rge"
RESULT = from_json((FOLDER / "table2.json").read_bytes(), Result)
KEPT = TrialFolder(FOLDER / "trials")


def trials() -> list[Trial]:
    """Return what the table's rows trained: the rates that were compared with the first seed, and the chosen one with all seeds."""
    rates = {row[0]: row[4] for row in RESULT.tables[0].rows}
    wanted = executed_table2.rows(Settings())
    found = []
    for name, one in wanted.items():
        if one.steps:
            tried = executed_settings.RATES[one.method, one.technique]
            assert rates[name] in tried
            found += [replace(one, learning_rate=rate) for rate in tried]
            found += [replace(one, learning_rate=rates[name], seed=seed) for seed in (1, 2)]
    return found


def test_every_training_of_the_table_is_there_whole_and_nothing_else():
    files = {KEPT.steps_path(one): one for one in trials()}
    assert set(files) == set((FOLDER / "trials" / "steps").iterdir())
    for path, one in files.items():
        header, *steps = (json.loads(line) for line in path.read_text().splitlines())
        assert header == json.loads(json.dumps(one.run_header))
        assert [step[0] for step in steps] == list(range(one.steps))
        assert all(len(step[2]) == len(step[3]) == one.queries for step in steps)


def test_the_table_says_what_it_was_made_with():
    assert {name: len(str(row[-1]).split(", ")) for name, *row in RESULT.tables[0].rows if row[2]} == dict.fromkeys(
        (executed_table2.MEZO, executed_table2.Q4, executed_table2.Q16), 3
    )
    assert RESULT.source == "executed" and RESULT.environment["quick"] == "false"


@pytest.mark.parametrize("queries", [1, 16])
def test_a_kept_training_replayed_answers_as_the_table_says(queries, tmp_path):
    """No forward pass is needed to have the trained weights again; a fifth of the test sentences is scored."""
    one = next(one for one in trials() if one.queries == queries and one.seed == 1)
    assert {field.name for field in fields(Trial)} == set(one.run_header)
    copy = tmp_path / "steps.jsonl"
    copy.write_bytes(KEPT.steps_path(one).read_bytes())
    task, tokenizer = load_prompt_task("sentiment", train_samples=1, validation_samples=1, test_samples=200), load_tokenizer(one.model)
    model = load_causal_model(one.model, TrainableConfig(rank=one.rank, alpha=one.alpha, seed=one.seed))

    def score() -> float:
        return 100 * evaluate(model.logits_at, task, task.test, tokenizer, is_causal=True, max_length=one.max_length).value

    before = score()
    with LogFile(copy, one.run_header) as log:
        replay(model.trainables, log.steps)
    after = score()
    [printed] = [str(row[-1]).split(", ") for row in RESULT.tables[0].rows if row[1] == queries]
    assert after == pytest.approx(float(printed[1]), abs=9.0)  # three standard errors of 200 sentences
    assert after > before + 10
