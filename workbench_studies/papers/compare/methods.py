"""All methods and baselines next to each other: same devices, model, data and samples (item `methods`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from workbench_studies.papers.compare.runs import (
    SAME_LEARNING,
    SERVING,
    TRAINING_JOB,
    TRAININGS,
    Run,
    simulated,
    training,
)
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, Settings, spread

TARGETS = (70.0, 75.0)
"""Validation accuracies, per cent; the time to reach each is reported."""
QUICK = replace(TRAINING_JOB, model="tiny-bert", train_samples=32, validation_samples=32, epochs=1)


def methods(item: Item, settings: Settings) -> Result:
    """Execute the trainings, simulate every plan, and compare."""
    shape = QUICK if settings.quick else TRAINING_JOB
    priced = simulated(shape)
    runs: dict[str, list[Run]] = {name: [] for name in TRAININGS}
    for seed in settings.seeds:
        for name in TRAININGS:
            runs[name].append(training(name, seed, shape, settings))
            settings.progress(f"{name}, seed {seed}: {runs[name][-1].scores[-1]:.1f} %")
    return compared(item, priced, runs)


def compared(item: Item, priced: dict[str, Run], runs: dict[str, list[Run]]) -> Result:
    """Return the comparison.  priced: every way, simulated; runs: the executed trainings by name."""
    ways = [*TRAININGS, *SAME_LEARNING]
    scores = {name: _means(runs[SAME_LEARNING[name][0] if name in SAME_LEARNING else name]) for name in ways}
    reached = {name: [_reached(priced[name], scores[name], target) for target in TARGETS] for name in ways}
    whole_s = {name: priced[name].ends_s[-1] for name in ways}
    answers = {name: fmean(priced[name].predicted_s) for name in SERVING}
    low = reached["PAC+ (one device)"][0], reached["RingAda"][0]
    least = min((priced[name].memory_bytes, name) for name in ways)
    return item.result(
        tables={
            "ways": [_row(name, priced[name], runs, scores[name], reached[name]) for name in ways],
            "serving": [
                (
                    name,
                    len(priced[name].devices),
                    1e3 * answers[name],
                    priced[name].memory_bytes / 1e6,
                    priced[name].sent_bytes / 1e6 / len(priced[name].predicted_s),
                    priced[name].joules / len(priced[name].predicted_s),
                )
                for name in SERVING
            ],
            "runs": [_executed(run) for runs_of in runs.values() for run in runs_of],
        },
        holds={
            "alone": low[0] is not None and (low[1] is None or low[0] < low[1]),
            "pac": whole_s["PAC+"] < whole_s["PAC+ (one device)"],
            "ringada": whole_s["RingAda"] < whole_s["LoRA (one device)"],
            "pipeline": whole_s["LoRA (pipeline)"] < whole_s["LoRA (data parallel)"],
            "drain": whole_s["Confidant (LoRA)"] < whole_s["LoRA (pipeline)"],
            "forward": least[1] == "P-RGE",
            "learns": scores["P-RGE"][-1] > 55,
            "galaxy": answers["Galaxy+"] == min(answers.values()),
        },
        series={f"score, {name}": tuple(zip(priced[name].ends_s, scores[name], strict=True)) for name in ways},
        target=TARGETS[0],
        low=_words(low[0]),
        ring=_words(low[1]),
        whole=whole_s,
        score=scores["P-RGE"][-1],
        least=least[1],
        megabytes=least[0] / 1e6,
        forward=priced["P-RGE"].memory_bytes / 1e6,
        answers=answers,
        seeds=", ".join(f"{name} {len(runs_of)}" for name, runs_of in runs.items()),
        in_pace=sum(run.is_measured for runs_of in runs.values() for run in runs_of),
        executed=sum(map(len, runs.values())),
    )


def _means(runs: Sequence[Run]) -> list[float]:
    """Return the mean score over the seeds after each epoch."""
    return [fmean(values) for values in zip(*(run.scores for run in runs), strict=True)]


def _reached(priced: Run, scores: Sequence[float], target: float) -> float | None:
    """Return the seconds at the end of the first epoch whose mean score reaches a target; None: it does not."""
    pairs = zip(priced.ends_s, scores, strict=True)
    return next((seconds for seconds, score in pairs if score >= target), None)


def _row(
    name: str, priced: Run, runs: dict[str, list[Run]], scores: Sequence[float], reached: Sequence[float | None]
) -> Row:
    own_runs = runs.get(name, [])
    measured = [run.ends_s[-1] for run in own_runs if run.is_measured]
    ends = [run.scores[-1] for run in own_runs or runs[SAME_LEARNING[name][0]]]
    return (
        name,
        float(len(priced.devices)),
        *reached,
        scores[-1],
        spread(ends),
        float(len(ends)),
        priced.ends_s[-1],
        fmean(measured) if measured else None,
        priced.memory_bytes / 1e6,
        priced.sent_bytes / 1e6,
        priced.joules,
    )


def _executed(run: Run) -> Row:
    scores = " ".join(f"{score:.1f}" for score in run.scores)
    pace = "yes" if run.in_pace else "no"
    return (run.name, float(run.seed), scores, sum(run.epochs_s) + run.other_s, run.dilation, pace)


def _words(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"
