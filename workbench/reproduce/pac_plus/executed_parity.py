"""Where Parallel Adapters are as good as LoRA and where not: wider networks, other initial weights, ensembles (PAC+, section VI-B)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from workbench.plots.export import Captioned
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.pac_plus.executed_runs import Outcome, score
from workbench.reproduce.pac_plus.executed_settings import PROTOCOL, TITLES, resamples, run_trainings, task_of, tasks_of, training
from workbench.reproduce.pac_plus.executed_statistics import Difference, ensemble, paired_bootstrap, spread
from workbench.reproduce.result import Check, Comparison, Result, Settings, Table
from workbench.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train Parallel Adapters.  changes: of the comparison's settings; is_everywhere: tried on GLUE's tasks too."""

    label: str
    changes: dict[str, Any] = field(default_factory=dict)
    is_everywhere: bool = False


VARIANTS = (
    Variant(label="r = 8", is_everywhere=True),
    Variant(label="r = 4", changes={"reduction": 4}, is_everywhere=True),
    Variant(label="r = 2, rate 1e-3", changes={"reduction": 2, "learning_rate": 1e-3}, is_everywhere=True),
    Variant(label="r = 8, distilled", changes={"initialization": "distilled"}),
    Variant(label="r = 8, pruned", changes={"initialization": "pruned"}),
    Variant(label="r = 8, averaged weights", changes={"averaging": 0.995}),
    Variant(label="r = 8, rate 1e-3", changes={"learning_rate": 1e-3}),
)
BASE = VARIANTS[0]
EMBEDDED = "sentiment"
"""The task on which the variants that change more than the width are tried."""
COLUMNS = (
    "task", "variant", "trainable parameters", "validation", "test", "standard deviation", "seeds together", "less LoRA",
    "seeds together less LoRA",
)  # fmt: skip


def run(settings: Settings) -> Result:
    """Train each variant and LoRA on each task with each seed; an ensemble is the mean of the seeds' logits."""
    tasks = tasks_of(settings)
    comparisons: list[Comparison] = []
    rows: list[tuple[Any, ...]] = []
    checks: list[Check] = []
    for name in tasks:
        references = [training(settings, name, "lora", seed) for seed in settings.seeds]
        variants = [one for one in VARIANTS if one.is_everywhere or name == EMBEDDED]
        plans = [[training(settings, name, "parallel_adapters", seed, **one.changes) for seed in settings.seeds] for one in variants]
        found = run_trainings(settings, [*references, *itertools.chain(*plans)])  # together: all variants share the backbone's taps
        lora = [found[one] for one in references]
        task = task_of(settings, lora[0].training)
        rows.append(_row(task, "LoRA", lora, None, None))
        for variant, plan in zip(variants, plans, strict=True):
            outcomes = [found[one] for one in plan]
            single = paired_bootstrap(task, [one.test_outputs for one in outcomes], [one.test_outputs for one in lora], resamples(settings))
            joined = paired_bootstrap(task, [ensemble(outcomes)], [one.test_outputs for one in lora], resamples(settings))
            rows.append(_row(task, variant.label, outcomes, single, joined))
            labels = (variant.label, TITLES[name])
            comparisons.append(
                Comparison(labels=labels, paper=None, ours=single.points, unit="points", kind="measured", deviation_in="points")
            )
            checks.append(_check(f"{variant.label} on {TITLES[name]}", single))
            if variant is BASE:
                checks.append(_check(f"{variant.label}, {len(outcomes)} seeds together, against single LoRA on {TITLES[name]}", joined))
    return Result(
        item="parity", title="Where parity with LoRA holds", paper_section="VI-B", source="executed", label_columns=("variant", "task"),
        comparisons=tuple(comparisons), tables=(Table(title="Variants of Parallel Adapters", columns=COLUMNS, rows=tuple(rows)),),
        checks=tuple(checks),
        explanation=(
            "The paper claims parity; the values are Parallel Adapters less LoRA in points, each the mean over the seeds, with a 95 % "
            "interval of a bootstrap over test samples, paired. Parity is called what the interval does not contradict.",
            "Widths (r = 8, 4, 2) are tried on every task, the other variants on sentiment alone.",
            *PROTOCOL,
        ),
    )  # fmt: skip


def draw(result: Result) -> list[Captioned]:
    """Return the differences as bars."""
    title, subtitle = "Parallel Adapters less LoRA", "mean over the seeds; 0 is parity"
    figure = paired_bars(result, result.comparisons, title=title, subtitle=subtitle, unit="points")
    return [Captioned(name="parity", caption="How far variants of Parallel Adapters are from LoRA.", figure=figure)]


def _row(task: Task, label: str, outcomes: list[Outcome], single: Difference | None, joined: Difference | None) -> tuple[Any, ...]:
    validation = spread([one.validation_score for one in outcomes])[0]
    together = score(task, ensemble(outcomes), task.test.labels)
    return (
        TITLES[task.name], label, outcomes[0].trainable_parameters, validation, *spread([one.test_score for one in outcomes]), together,
        None if single is None else single.text, None if joined is None else joined.text,
    )  # fmt: skip


def _check(what: str, difference: Difference) -> Check:
    found = f"{difference.text}, p = {difference.p_value:.3g}"
    return Check(claim=f"{what}: parity with LoRA is not contradicted", holds=difference.high >= 0, found=found)
