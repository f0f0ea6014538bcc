"""P-RGE's executed tables, with a tiny model: interrupted trainings go on where they were, and come out the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json
from workbench.trainings import queries as executed_training
from workbench.trainings.queries import Trial
from workbench_studies.papers import Result, Settings, find_item
from workbench_studies.papers.p_rge import executed
from workbench_studies.papers.p_rge.outcomes import Runner
from workbench_studies.papers.p_rge.testbed import TINY
from workbench_studies.papers.result import printed

SMALL = Trial(
    model="tiny-llama-2",
    method="P-RGE",
    queries=2,
    batch_size=2,
    steps=6,
    score_every=2,
    learning_rate=1e-2,
    samples=(24, 12, 12),
    max_length=64,
)


def silent(line: str) -> None:
    """Drop a line."""


class Killed(BaseException):
    """Stands for a process that ends in the middle of a step."""


@pytest.mark.parametrize("method", ["P-RGE", "MeZO"])
def test_a_training_that_is_killed_goes_on_from_its_steps_and_ends_the_same(method, tmp_path, monkeypatch):
    trial = replace(SMALL, method=method)
    reference, cut = tmp_path / "whole", tmp_path / "cut"
    expected = Runner(reference, silent).outcome(trial)
    result = executed_training.training_batch

    def dies_at_4(encoded, batch_size, seed, step):
        if step == 4:
            raise Killed
        return result(encoded, batch_size, seed, step)

    with monkeypatch.context() as patch:
        patch.setattr(executed_training, "training_batch", dies_at_4)
        with pytest.raises(Killed):
            Runner(cut, silent).outcome(trial)
    assert not trial.path(cut).exists()
    path = trial.steps_path(cut)
    assert len(path.read_text().splitlines()) == 1 + 4
    with path.open("a", encoding="utf-8") as file:
        file.write("[4,0.01,[12")  # torn by the crash
    steps = []
    monkeypatch.setattr(
        executed_training, "training_batch", lambda *given: (steps.append(given[-1]), result(*given))[1]
    )
    actual = Runner(cut, silent).outcome(trial)
    assert steps == [4, 5]
    assert (actual.curve, actual.test_score) == (expected.curve, expected.test_score)
    assert path.read_bytes() == trial.steps_path(reference).read_bytes()
    # A longer training goes on from a shorter one's steps; an outcome that is there is not run again.
    steps.clear()
    runner = Runner(cut, silent)
    assert runner.outcome(trial) == actual
    longer = runner.outcome(replace(trial, steps=7))
    assert steps == [6]
    assert longer.curve[:-1] == actual.curve
    # A search finds a score that is on a longer training's way, and trains only as far as it has to; nothing of it is
    # tested.
    monkeypatch.setattr(Runner, "_run", lambda *given: pytest.fail("tested"))
    assert runner.validation_score(replace(trial, steps=4)) == dict(actual.curve)[4]
    assert steps == [6]
    other = replace(trial, seed=1, steps=2)
    assert runner.validation_score(other) == runner.validation_score(other)
    assert steps == [6, 0, 1]
    assert not other.path(cut).exists()


def test_trainings_are_told_apart_and_bad_ones_refused():
    here, longer = Path(), replace(SMALL, steps=9)
    assert (
        SMALL.steps_path(here)
        == replace(longer, score_every=5).steps_path(here)
        != replace(SMALL, seed=1).steps_path(here)
    )
    assert len({one.path(here) for one in (SMALL, longer, replace(SMALL, learning_rate=1e-3))}) == 3
    among = replace(SMALL, loss="label_words")
    assert SMALL.steps_path(here) != among.steps_path(here) and SMALL.curve_path(here) != among.curve_path(here)
    with pytest.raises(ConfigError, match="Known are zero-shot"):
        replace(SMALL, method="magic")
    with pytest.raises(ConfigError, match="-1 steps"):
        replace(SMALL, steps=-1)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [((64.0, 72.6, 72.8), 8e-3), ((60.0, 61.0, 64.0), 1.6e-2), ((72.0, 71.0, 50.0), 4e-3), ((70.0, 70.5, 71.1), 8e-3)],
)
def test_of_rates_that_do_nearly_as_well_the_smallest_is_taken(scores, chosen):
    short, longer = replace(SMALL, loss="label_words", steps=200), replace(SMALL, loss="label_words", steps=900)
    assert executed.trials()["rates"]["P-RGE, lora_fa"] == [4e-3, 8e-3, 1.6e-2]
    for wanted, rates, scale in (
        (short, executed.trials()["rates"]["P-RGE, lora_fa"], 1),
        (longer, executed.LONG_RATES, 2),
        (replace(short, loss="vocabulary"), executed.OVER_VOCABULARY, 4),
    ):
        asked = []

        class Known:
            def validation_score(self, trial, rates=rates, asked=asked):
                asked.append(trial)
                return dict(zip(rates, scores, strict=True))[trial.learning_rate]

        assert executed.best_rate(Known(), wanted, seed=5) == chosen / scale
        assert {one.seed for one in asked} == {5}
        assert {one.steps for one in asked} == {min(wanted.steps, 300)}


def test_tables_2_and_7_run_quickly_and_search_their_rates_on_validation(tmp_path, monkeypatch):
    """Every row's trial is made; what trains is a row of each kind."""
    settings = Settings(quick=True, seeds=(0, 1), workdir=tmp_path)
    names = ("table2", "table2-long", "table2-references", "table7")
    two, long, beside_it, seven_item = (find_item("p_rge", name) for name in names)
    full, beside = (executed.rows_of(name, Settings()) for name in ("table2", "table2-references"))
    q4, fewer, vocabulary = executed.Q4, executed.FEWER_STEPS, f"{executed.Q4}, loss over the vocabulary"
    assert {one.queries * one.batch_size for one in full.values() if one.steps} == {16}
    assert executed.rows_of("table2-long", Settings())[q4] == replace(full[q4], steps=900)
    assert beside[q4] == full[q4]
    assert beside[q4].steps == 4 * beside[fewer].steps == 200
    assert beside["MeZO (full)"].epsilon == 1e-3
    result = two.run(settings)
    assert set(result.series) == {name for name, one in full.items() if one.steps}
    by_name = {comparison.labels[0]: comparison for comparison in result.comparisons}
    text = printed("p_rge", "table2")
    assert by_name[q4].paper == text[TINY, q4, "SST-2"]
    rates = {row[0]: row[4] for row in result.tables[0].rows if row[3]}
    assert set(rates.values()) <= set(executed.trials()["rates"]["P-RGE, lora_fa"])
    assert two.draw(from_json(to_json(result), Result))
    longer = long.run(settings)
    assert not longer.checks and {
        comparison.kind for comparison in longer.comparisons if comparison.ours is not None
    } == {"quick trial"}
    [figure] = long.draw(from_json(to_json(longer), Result))
    assert figure.name == "table2-long"
    kept = (q4, vocabulary, fewer, "FO-Adam (LoRA-FA)")
    rows, seven = (executed.rows_of(name, settings) for name in ("table2-references", "table7"))
    monkeypatch.setattr(executed, "rows_of", lambda table, settings: {name: rows[name] for name in kept})
    references = beside_it.run(settings)
    by_name = {comparison.labels[0]: comparison for comparison in references.comparisons}
    assert by_name[vocabulary].paper == text[TINY, q4, "SST-2"]
    assert by_name[fewer].paper is None
    assert by_name["FO-Adam (LoRA-FA)"].paper == 94.2
    seeds = {row[0]: len(str(row[-1]).split(", ")) for row in references.tables[0].rows}
    assert seeds == {q4: 2, vocabulary: 1, fewer: 2, "FO-Adam (LoRA-FA)": 1}
    again = {row[0]: row[4] for row in references.tables[0].rows}
    assert again[q4] == again[fewer] == rates[q4]
    assert again[vocabulary] in executed.OVER_VOCABULARY
    [figure] = beside_it.draw(from_json(to_json(references), Result))
    assert figure.name == "table2-references"
    monkeypatch.setattr(
        executed, "rows_of", lambda table, settings: {name: seven[name] for name in ("LoRA-FA", "VeRA")}
    )
    techniques = seven_item.run(replace(settings, seeds=(0,)))
    assert [comparison.labels[0] for comparison in techniques.comparisons] == ["LoRA-FA", "VeRA"]
    assert seven_item.draw(techniques)
