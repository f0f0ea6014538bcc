"""Iterations to a target score for each initialization of the Parallel Adapters (PAC+, section VI-E, Fig. 14)."""

from __future__ import annotations

from importlib.util import find_spec

from workbench.plots.export import Captioned
from workbench.reproduce.drawing import lines
from workbench.reproduce.pac_plus.executed_runs import Outcome, score_name
from workbench.reproduce.pac_plus.executed_settings import TITLES, run_trainings, training
from workbench.reproduce.pac_plus.executed_statistics import spread
from workbench.reproduce.result import Check, Comparison, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

LABELS = {
    "distilled": "knowledge distillation",
    "pruned": "structural pruning (ours)",
    "torch_pruned": "structural pruning (Torch-Pruning)",
    "fan_in": "Gaussian, scaled by inputs",
    "gaussian": "Gaussian, 0.02",
    "all_zero": "zero, all projections",
}
PAPER_TARGET = "BART-Large"


def run(settings: Settings) -> Result:
    """Train from each initialization with each seed, scoring the validation split every few steps."""
    task = "sentiment" if settings.data is None else "mrpc"
    every = 1 if settings.quick else 10 if task == "mrpc" else 25
    ways = [how for how in LABELS if how != "torch_pruned" or find_spec("torch_pruning") is not None]
    plan = [
        training(settings, task, "parallel_adapters", seed, initialization=how, score_every=every)
        for how in ways
        for seed in settings.seeds
    ]
    found: dict[str, list[Outcome]] = {how: [] for how in ways}
    for one, outcome in run_trainings(settings, plan).items():
        found[one.initialization].append(outcome)
    curves = {how: mean_curve(outcomes) for how, outcomes in found.items()}
    target = curves["gaussian"][-1][1]
    iterations = {how: reached(curve, target) for how, curve in curves.items()}
    paper = lookup(paper_values("pac_plus", "fig14"))
    comparisons = tuple(
        Comparison(
            labels=(LABELS[how],), paper=paper.get((PAPER_TARGET, how)), ours=iterations[how], unit="iterations", kind="measured",
            note="" if iterations[how] is not None else "not reached",
        )
        for how in ways
    )  # fmt: skip
    return Result(
        item="fig14", title="Initialization of the Parallel Adapters", paper_section="VI-E", source="executed",
        label_columns=("initialization",), comparisons=comparisons, tables=(_scores(found),), checks=_checks(iterations, target),
        explanation=(
            f"{TITLES[task]}: mean curve of {len(settings.seeds)} seeds on the validation split, {score_name(task)}. The target is what "
            f"the Gaussian initialization of 0.02 has at its end, {target:.2f}; iterations are the first at which a curve is there. The "
            "paper's target is .875 on MRPC with BART-Large, so only the order can be compared.",
            "Our distillation has no teacher that writes rationales: the student learns the backbone's hidden states and the similarities "
            "that it finds between unlabelled sentences.",
        ),
        series={LABELS[how]: tuple((float(step), value) for step, value in curve) for how, curve in curves.items()},
    )  # fmt: skip


def draw(result: Result) -> list[Captioned]:
    """Return the curves."""
    figure = lines(
        result,
        result.series,
        title="Validation score by initialization",
        subtitle="mean over the seeds",
        x_title="iterations",
        y_title="score",
    )
    lowest = min(value for points in result.series.values() for _, value in points)
    figure.update_yaxes(rangemode="normal", range=[lowest - 2, None])
    return [Captioned(name="fig14", caption="Validation score of Parallel Adapters by their initial weights.", figure=figure)]


def mean_curve(outcomes: list[Outcome]) -> tuple[tuple[int, float], ...]:
    """Return the mean over seeds at each step that was scored."""
    return tuple(
        (points[0][0], sum(score for _, score in points) / len(points)) for points in zip(*(one.curve for one in outcomes), strict=True)
    )


def reached(curve: tuple[tuple[int, float], ...], target: float) -> int | None:
    """Return the first step with at least the target, None if there is none."""
    return next((step for step, score in curve if score >= target), None)


def _scores(found: dict[str, list[Outcome]]) -> Table:
    rows = []
    for how, outcomes in found.items():
        mean, deviation = spread([one.test_score for one in outcomes])
        rows.append((LABELS[how], outcomes[0].losses[0], outcomes[0].losses[-1], mean, deviation))
    columns = ("initialization", "loss of epoch 1", "loss of the last epoch", "test score", "standard deviation")
    return Table(title="After the last epoch", columns=columns, rows=tuple(rows), note="Losses are the first seed's.")


def _checks(iterations: dict[str, int | None], target: float) -> tuple[Check, ...]:
    gaussian, checks = iterations["gaussian"], []
    assert gaussian is not None, "a curve reaches its own end"
    for how in ("distilled", "pruned", "torch_pruned", "fan_in"):
        if how in iterations:
            own = iterations[how]
            found = f"{'not reached' if own is None else own} against {gaussian} iterations to {target:.2f}"
            claim = f"From {LABELS[how]} the target is reached sooner than from {LABELS['gaussian']}"
            checks.append(Check(claim=claim, holds=own is not None and own < gaussian, found=found))
    return tuple(checks)
