"""Tables 2 and 7 executed with a small model on the embedded sentences, a longer training, and references (P-RGE,
section 4.1, Table 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

from workbench.core.run_folder import scratch_folder
from workbench.core.serial import read_toml
from workbench.trainings.queries import Method, Trial
from workbench_studies.papers.items import Item
from workbench_studies.papers.p_rge.outcomes import Runner, TrialOutcome
from workbench_studies.papers.p_rge.testbed import PAPER, TINY
from workbench_studies.papers.result import Result, Settings, paper_folder, printed, spread

MODEL, QUICK_MODEL = "SmolLM2-135M", "tiny-llama-2"
TASK = "sentiment"
SCORE_EVERY = 100
SEARCH_STEPS = 300
"""Learning rates are compared after so many steps, or at the end of a shorter training."""
LONG_RATES, OVER_VOCABULARY = (2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3)
"""Learning rates tried for P-RGE's long training, and for its loss over the vocabulary, which has larger gradients."""
NEARLY = 1.0
"""In points; a score on 500 sentences is uncertain by two points, and a smaller rate is safer."""
LOSS: Literal["vocabulary", "label_words"] = "label_words"
"""MeZO's own loss: a few hundred steps are enough for it."""
_QUICK: dict[str, Any] = {"model": QUICK_MODEL, "steps": 4, "score_every": 2, "samples": (16, 8, 8), "max_length": 64}
ZERO_SHOT, CALIBRATED = "zero-shot", "calibrated"
MEZO, Q4, Q16 = "MeZO (LoRA-FA)", "P-RGE (q=4)", "P-RGE (q=16)"
FEWER_STEPS = "MeZO (q=4, E=16, a quarter of the steps)"


def trials() -> dict[str, dict[str, Any]]:
    """Return the rows of each executed table, and the learning rates that are tried ('rates'): trainings.toml."""
    return read_toml(paper_folder(PAPER) / "trainings.toml")


def rows_of(table: str, settings: Settings) -> dict[str, Trial]:
    """Return the trials of an executed table by row, or their quick versions."""
    return {name: trial(settings, **row) for name, row in trials()[table].items()}


def trial(settings: Settings, method: Method, technique: str = "lora_fa", **changes: Any) -> Trial:
    """Return a trial of the comparison, or its quick version."""
    trial_fields: dict[str, Any] = {"model": MODEL, "task": TASK, "score_every": SCORE_EVERY, "loss": LOSS}
    trial_fields |= {"epsilon": 1e-3 if technique == "full" else 1e-2} | changes  # Table 9's
    if settings.quick:
        trial_fields |= _QUICK | ({"rank": 8} if "rank" in changes else {})
    if method in ("zero-shot", "calibrated"):
        trial_fields |= {"steps": 0, "loss": "vocabulary"}
    return Trial(method=method, technique=technique, **trial_fields)


def best_rate(runner: Runner, trial: Trial, seed: int) -> float:
    """Return the smallest learning rate whose validation score is within NEARLY of the best, with one seed."""
    rates: tuple[float, ...]
    if trial.loss == "vocabulary":
        rates = OVER_VOCABULARY
    elif trial.steps > SEARCH_STEPS:
        rates = LONG_RATES
    else:
        rates = tuple(trials()["rates"][f"{trial.method}, {trial.technique}"])
    if len(rates) == 1:
        return rates[0]
    steps = min(trial.steps, SEARCH_STEPS)
    tries = {
        rate: runner.validation_score(replace(trial, learning_rate=rate, seed=seed, steps=steps)) for rate in rates
    }
    return min(rate for rate in rates if tries[rate] >= max(tries.values()) - NEARLY)


def run_searched(
    settings: Settings,
    trials_by_row: Mapping[str, Trial],
    one_seed: Sequence[str] = (),
    rate_of: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[TrialOutcome]]:
    """Run each row's trial with each seed and return their outcomes, which are stored in the settings' workdir, if
    there is one.

    one_seed: rows that run only with the first seed.  rate_of: rows that use the rate of another, earlier row without a
    search.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder()) if settings.workdir is None else settings.workdir / "trials"
        runner = Runner(folder, settings.progress)
        outcomes: dict[str, list[TrialOutcome]] = {}
        for name, trial in trials_by_row.items():
            if not trial.steps:
                outcomes[name] = [runner.outcome(trial)]
                continue
            same = rate_of.get(name)
            rate = (
                best_rate(runner, trial, settings.seeds[0]) if same is None else outcomes[same][0].trial.learning_rate
            )
            seeds = settings.seeds[:1] if name in one_seed else settings.seeds
            outcomes[name] = [runner.outcome(replace(trial, learning_rate=rate, seed=seed)) for seed in seeds]
        return outcomes


def table2(item: Item, settings: Settings) -> Result:
    """Execute it, or load earlier outcomes."""
    trials_by_row = rows_of(item.name, settings)
    outcomes = run_searched(settings, trials_by_row)
    single, four = mean_score(outcomes[MEZO]), mean_score(outcomes[Q4])
    holds = {"queries": four >= single}
    return _result(
        item, outcomes, holds, model=trials_by_row[Q4].model, steps=trials_by_row[Q4].steps, four=four, single=single
    )


def table2_long(item: Item, settings: Settings) -> Result:
    """Execute a longer training of q = 4 with E = 4."""
    trials_by_row = rows_of(item.name, settings)
    outcomes = run_searched(settings, trials_by_row)
    reached, steps = mean_score(outcomes[Q4]), trials_by_row[Q4].steps
    zero, calibrated = (mean_score(outcomes[name]) for name in (ZERO_SHOT, CALIBRATED))
    return _result(
        item,
        outcomes,
        {},
        steps=steps,
        search=min(steps, SEARCH_STEPS),
        reached=reached,
        zero=zero,
        calibrated_score=calibrated,
    )


def table2_references(item: Item, settings: Settings) -> Result:
    """Execute first-order references, MeZO over all parameters, fewer steps, and the loss over the vocabulary."""
    outcomes = run_searched(settings, rows_of(item.name, settings), [name for _, name in item.notes], {FEWER_STEPS: Q4})
    batch, steps = mean_score(outcomes[Q4]), mean_score(outcomes[FEWER_STEPS])
    return _result(item, outcomes, {"batch": batch > steps}, batch=batch, steps=steps)


def _result(item: Item, outcomes: dict[str, list[TrialOutcome]], holds: dict[str, bool], **texts: Any) -> Result:
    """Return each row's mean test score with the paper's (Tables 2 and 10), its training settings, and its validation
    scores by steps.
    """
    paper = {
        method: value
        for (model, method, task), value in printed(PAPER, "table2").items()
        if (model, task) == (TINY, "SST-2")
    }
    paper |= {
        f"FO-Adam ({space})": value for (space, task), value in printed(PAPER, "table10").items() if task == "SST-2"
    }
    seeds, curves = [], {}
    for name, each in outcomes.items():
        trial, values = each[0].trial, [outcome.test_score for outcome in each]
        how = (
            (trial.queries, trial.batch_size, trial.steps, trial.learning_rate)
            if trial.steps
            else (None, None, 0, None)
        )
        seeds.append((name, *how, fmean(values), spread(values), ", ".join(f"{value:.1f}" for value in values)))
        if trial.steps:
            curves[name] = {
                step: fmean(outcome.curve[index][1] for outcome in each)
                for index, (step, _) in enumerate(each[0].curve)
            }
    steps = sorted({step for curve in curves.values() for step in curve})
    # All start from zero-shot, if that is a row.
    begin = tuple((0.0, outcome.validation_score) for outcome in outcomes.get(ZERO_SHOT, ()))
    return item.result(
        [item.cell((name,), paper.get(name.split(", ")[0]), mean_score(each)) for name, each in outcomes.items()],
        tables={
            "seeds": seeds,
            "validation": [(name, *(curve.get(step) for step in steps)) for name, curve in curves.items()],
        },
        columns={"validation": [f"step {step}" for step in steps]},
        holds=holds,
        series={
            name: (*begin, *((float(step), value) for step, value in curve.items())) for name, curve in curves.items()
        },
        **texts,
    )


def mean_score(outcomes: Sequence[TrialOutcome]) -> float:
    """Return the mean test score over the seeds in per cent."""
    return fmean(outcome.test_score for outcome in outcomes)


def table7(item: Item, settings: Settings) -> Result:
    """Execute LoRA, LoRA-FA, DoRA and VeRA, trained with forward passes only."""
    trials_by_row, paper = rows_of(item.name, settings), item.printed
    outcomes = run_searched(settings, trials_by_row)
    means = {name: mean_score(each) for name, each in outcomes.items()}
    rows = []
    for name, each in outcomes.items():
        deviation = spread([outcome.test_score for outcome in each])
        rows.append((name, each[0].trained_values, each[0].trial.learning_rate, means[name], deviation))
    return item.result(
        [item.cell((name,), paper[(name,)], mean, "%") for name, mean in means.items()],
        tables={"trained": rows},
        first=max(means, key=means.__getitem__),
        scores_found=", ".join(f"{name} {mean:.1f}" for name, mean in means.items()),
        model=trials_by_row["LoRA-FA"].model,
        steps=trials_by_row["LoRA-FA"].steps,
    )
