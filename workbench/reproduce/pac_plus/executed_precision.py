"""Precision against precision: Parallel Adapters on backbones that are stored in fewer bits (PAC+, section VI-F, Table VII)."""

from __future__ import annotations

from workbench.models.quantization import held_bytes
from workbench.plots.export import Captioned
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.pac_plus.executed_build import backbone
from workbench.reproduce.pac_plus.executed_runs import Outcome, score_name
from workbench.reproduce.pac_plus.executed_settings import PROTOCOL, TITLES, resamples, run_trainings, task_of, tasks_of, training
from workbench.reproduce.pac_plus.executed_statistics import Difference, paired_bootstrap, spread
from workbench.reproduce.result import Check, Comparison, Result, Settings, Table
from workbench.reproduce.values import paper_values

PRECISIONS = ("float32", "float16", "int8", "int4", "nf4")
PAPER_LOSS_POINTS = 2.01
"""The largest loss in the paper's table: T5-Large on MRPC, FP32 to INT4."""


def run(settings: Settings) -> Result:
    """Train Parallel Adapters on each backbone, task and seed."""
    tasks = tasks_of(settings)
    plan = [
        training(settings, task, "parallel_adapters", seed, backbone=precision)
        for task in tasks
        for precision in PRECISIONS
        for seed in settings.seeds
    ]
    found: dict[tuple[str, str], list[Outcome]] = {}
    for one, outcome in run_trainings(settings, plan).items():
        found.setdefault((one.backbone, one.task), []).append(outcome)
    differences = {(precision, task): _difference(settings, found, precision, task) for task in tasks for precision in PRECISIONS[1:]}
    paper = _paper_losses()
    comparisons = tuple(
        Comparison(
            labels=(f"{precision} less float32", TITLES[task]), paper=paper.get((precision, TITLES[task])), ours=one.points, unit="points",
            kind="measured", deviation_in="points",
        )
        for (precision, task), one in differences.items()
    )  # fmt: skip
    model = plan[0].model
    return Result(
        item="table7", title="Performance with a quantized backbone", paper_section="VI-F", source="executed",
        label_columns=("precision", "task"), comparisons=comparisons, tables=(_scores(found, tasks), _bytes(model)),
        checks=tuple(_checks(differences)),
        explanation=(
            "Compared is what a precision loses against float32; the paper's value is the mean over its three models. NF4 is ours only.",
            "Weights are stored in blocks of 64 and computed with in float32; float16 computes in float16 in the backbone. Parallel "
            "Adapters are float32 throughout, and their inputs are cached in bfloat16.",
            *PROTOCOL[1:],
        ),
    )  # fmt: skip


def draw(result: Result) -> list[Captioned]:
    """Return the losses as bars."""
    title, subtitle = "What a lower precision of the backbone costs", "score less that of float32, mean over the seeds"
    figure = paired_bars(result, result.comparisons, title=title, subtitle=subtitle, unit="points")
    return [Captioned(name="table7", caption="Score with a quantized backbone less that with float32.", figure=figure)]


def _difference(settings: Settings, found: dict[tuple[str, str], list[Outcome]], precision: str, task: str) -> Difference:
    low, full = found[precision, task], found["float32", task]
    loaded = task_of(settings, low[0].training)
    return paired_bootstrap(loaded, [one.test_outputs for one in low], [one.test_outputs for one in full], resamples(settings))


def _paper_losses() -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], list[float]] = {}
    for value in paper_values("pac_plus", "table7"):
        if isinstance(value.value, float):
            values.setdefault((value.labels["precision"], value.labels["task"]), []).append(value.value)
    means = {key: sum(column) / len(column) for key, column in values.items()}
    return {(precision, task): mean - means["float32", task] for (precision, task), mean in means.items()}


def _scores(found: dict[tuple[str, str], list[Outcome]], tasks: tuple[str, ...]) -> Table:
    rows = []
    for task in tasks:
        for precision in PRECISIONS:
            outcomes = found[precision, task]
            rows.append((TITLES[task], precision, *spread([one.test_score for one in outcomes]), len(outcomes), score_name(task)))
    return Table(title="Scores", columns=("task", "precision", "test score", "standard deviation", "seeds", "score"), rows=tuple(rows))


def _bytes(model: str) -> Table:
    rows = [(precision, held_bytes(backbone(model, precision)) / 1e6) for precision in PRECISIONS]
    return Table(
        title=f"Bytes that {model} holds",
        columns=("precision", "megabytes"),
        rows=tuple(rows),
        note="Of all storages, embeddings included.",
    )


def _checks(differences: dict[tuple[str, str], Difference]) -> list[Check]:
    checks = []
    for precision in PRECISIONS[1:]:
        worst = min((one for (name, _), one in differences.items() if name == precision), key=lambda one: one.points)
        claim = f"With {precision}, no task loses more than the paper's worst cell ({PAPER_LOSS_POINTS} points)"
        checks.append(Check(claim=claim, holds=worst.points >= -PAPER_LOSS_POINTS, found=f"at worst {worst.text}"))
    return checks
