"""Techniques trained on real tasks with a small model: Tables VI and VII, Fig. 14, and when parity with LoRA holds (PAC+, section VI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from workbench.core.serial import read_toml
from workbench.models.quantization import held_bytes
from workbench.reproduce.items import Item
from workbench.reproduce.pac_plus.executed_build import backbone, run_all, task_of
from workbench.reproduce.pac_plus.executed_runs import (
    RESAMPLES,
    Difference,
    Outcome,
    Training,
    ensemble,
    mcnemar,
    paired_bootstrap,
    score,
    score_name,
    spread,
)
from workbench.reproduce.pac_plus.testbed import PAPER
from workbench.reproduce.result import Number, Result, Settings, paper_folder, printed

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert"
_COMPARED = read_toml(paper_folder(PAPER) / "trainings.toml")
RATES, WAYS, VARIANTS = (_COMPARED[name] for name in ("learning_rates", "ways", "variants"))
TITLES = {"sentiment": "sentiment", "mrpc": "MRPC", "stsb": "STS-B", "sst2": "SST-2"}
LABELS = {"full": "Full Model", "adapters": "Adapters", "lora": "LoRA", "parallel_adapters": "Parallel Adapters"}
SST2_TRAIN = 8000
"""Number of SST-2's 67,349 training phrases to use; all other tasks are used whole."""
BACKWARD = ("full", "adapters", "lora")
OURS = "parallel_adapters"
TARGET_POINTS = 2.5
"""Maximum loss against LoRA on the embedded task: a search over thirty configurations of the side network reached 2.4."""
PRECISIONS = ("float32", "float16", "int8", "int4", "nf4")
PAPER_LOSS_POINTS = 2.01
"""The largest loss in the paper's table: T5-Large on MRPC, FP32 to INT4."""


def tasks_of(settings: Settings) -> tuple[str, ...]:
    """Return the tasks: the embedded one, and GLUE's if a folder is given."""
    return ("sentiment",) if settings.data is None else ("sentiment", "mrpc", "stsb", "sst2")


def training(settings: Settings, task: str, technique: str, seed: int, **changes: Any) -> Training:
    """Return a training of the comparison, or its quick version."""
    quick = {"model": QUICK_MODEL, "epochs": 1, "max_length": 32, "samples": (48, 24, 24), "batch_size": 16}
    full = {"model": MODEL, "samples": (SST2_TRAIN if task == "sst2" else None, None, None)}
    given: dict[str, Any] = {"learning_rate": RATES[technique]} | (quick if settings.quick else full) | changes
    return Training(task=task, technique=technique, seed=seed, **given)


def run_trainings(settings: Settings, trainings: list[Training]) -> dict[Training, Outcome]:
    """Run the trainings without a stored outcome; outcomes are stored in the settings' workdir."""
    folder = None if settings.workdir is None else settings.workdir / "trainings"
    return run_all(trainings, folder, settings.data, settings.progress)


def less(settings: Settings, first: Sequence[Outcome], second: Sequence[Outcome]) -> Difference:
    """Return the first side's score minus the second's, on the same test samples."""
    own, other = ([one.test_outputs for one in side] for side in (first, second))
    return paired_bootstrap(task_of(first[0].training, settings.data), own, other, 50 if settings.quick else RESAMPLES)


def mean_score(outcomes: Sequence[Outcome]) -> float:
    """Return the mean test score over the seeds."""
    return spread([one.test_score for one in outcomes])[0]


def paper_means(table: str) -> dict[tuple[str, str], float]:
    """Return the paper's mean over its three models, by (technique or precision, task)."""
    values: dict[tuple[str, str], list[float]] = {}
    for (row, _, task), value in printed(PAPER, table).items():
        if isinstance(value, float):
            values.setdefault((row, task), []).append(value)
    return {key: spread(column)[0] for key, column in values.items()}


def table6(item: Item, settings: Settings) -> Result:
    """Train each technique on each task with each seed."""
    tasks, paper = tasks_of(settings), paper_means("table6")
    plan = [training(settings, task, technique, seed) for task in tasks for technique in LABELS for seed in settings.seeds]
    found: dict[tuple[str, str], list[Outcome]] = {}
    for one, outcome in run_trainings(settings, plan).items():
        found.setdefault((one.technique, one.task), []).append(outcome)
    comparisons, checks = [], []
    scores: list[tuple[Number, ...]] = []
    significance: list[tuple[Number, ...]] = []
    for name in tasks:
        title = TITLES[name]
        ours = {technique: mean_score(found[technique, name]) for technique in LABELS}
        for against, others in (("from the mean of the three", BACKWARD), *((f"from {LABELS[one]}", (one,)) for one in BACKWARD)):
            printed_here = all((technique, title) in paper for technique in LABELS)
            theirs = paper[OURS, title] - sum(paper[one, title] for one in others) / len(others) if printed_here else None
            comparisons.append(item.cell((against, title), theirs, ours[OURS] - sum(ours[one] for one in others) / len(others)))
        for technique, label in LABELS.items():
            outcomes = found[technique, name]
            mean, deviation = spread([one.test_score for one in outcomes])
            validation = spread([one.validation_score for one in outcomes])[0]
            row = (title, label, outcomes[0].trainable_parameters, mean, deviation, len(outcomes), score_name(name), validation)
            scores.append(row)
        own, lora = found[OURS, name], found["lora", name]
        difference, task = less(settings, own, lora), task_of(own[0].training, settings.data)
        p_values = []
        if task.kind != "regression":
            p_values = [mcnemar(task, one.test_outputs, other.test_outputs) for one, other in zip(own, lora, strict=True)]
        by_seed = ", ".join(f"{one:.3g}" for one in p_values)
        significance.append((title, difference.points, difference.low, difference.high, difference.p_value, by_seed))
        said: dict[str, Any] = {"task": title, "difference": difference.text, "p": difference.p_value}
        if name == "sentiment":
            checks.append(item.check("target", difference.points >= -TARGET_POINTS, **said))
        checks.append(item.check("parity", not difference.is_significant, **said))
    return item.result(comparisons, tables={"scores": scores, "significance": significance}, checks=checks)


def parity(item: Item, settings: Settings) -> Result:
    """Train each variant and LoRA on each task with each seed; an ensemble is the mean of the seeds' logits."""
    comparisons, checks = [], []
    rows: list[tuple[Number, ...]] = []
    for name in tasks_of(settings):
        variants = list(VARIANTS) if name == "sentiment" else list(VARIANTS)[:3]
        plans = {"LoRA": [training(settings, name, "lora", seed) for seed in settings.seeds]}
        for variant in variants:
            plans[variant] = [training(settings, name, OURS, seed, **VARIANTS[variant]) for seed in settings.seeds]
        # All trainings together, because the variants share the backbone's taps.
        done = run_trainings(settings, [one for plan in plans.values() for one in plan])
        found = {variant: [done[one] for one in plan] for variant, plan in plans.items()}
        lora, title = found["LoRA"], TITLES[name]
        task = task_of(lora[0].training, settings.data)
        for variant, outcomes in found.items():
            texts: tuple[Number, Number] = (None, None)
            together = ensemble(outcomes)
            if variant != "LoRA":
                single, joined = less(settings, outcomes, lora), less(settings, [replace(outcomes[0], test_outputs=together)], lora)
                texts = (single.text, joined.text)
                comparisons.append(item.cell((variant, title), None, single.points))
                said = [(f"{variant} on {title}", single)]
                if variant == "r = 8":
                    said.append((f"{variant}, {len(outcomes)} seeds together, against single LoRA on {title}", joined))
                checks += [item.check("parity", one.high >= 0, what=what, difference=one.text, p=one.p_value) for what, one in said]
            validation = spread([one.validation_score for one in outcomes])[0]
            joint = score(task, together, task.test.labels)
            tested = spread([one.test_score for one in outcomes])
            rows.append((title, variant, outcomes[0].trainable_parameters, validation, *tested, joint, *texts))
    return item.result(comparisons, tables={"variants": rows}, checks=checks)


def table7(item: Item, settings: Settings) -> Result:
    """Train Parallel Adapters on backbones with quantized weights, with each task and seed."""
    tasks, paper = tasks_of(settings), paper_means("table7")
    plan = [
        training(settings, task, OURS, seed, backbone=precision) for task in tasks for precision in PRECISIONS for seed in settings.seeds
    ]
    found: dict[tuple[str, str], list[Outcome]] = {}
    for one, outcome in run_trainings(settings, plan).items():
        found.setdefault((one.backbone, one.task), []).append(outcome)
    comparisons, model = [], plan[0].model
    differences: dict[str, list[Difference]] = {}
    for task in tasks:
        title = TITLES[task]
        for precision in PRECISIONS[1:]:
            difference = less(settings, found[precision, task], found["float32", task])
            differences.setdefault(precision, []).append(difference)
            theirs = paper[precision, title] - paper["float32", title] if (precision, title) in paper else None
            comparisons.append(item.cell((f"{precision} less float32", title), theirs, difference.points))
    scores: list[tuple[Number, ...]] = []
    for task in tasks:
        for precision in PRECISIONS:
            outcomes = found[precision, task]
            scores.append((TITLES[task], precision, *spread([one.test_score for one in outcomes]), len(outcomes), score_name(task)))
    checks = []
    for precision, each in differences.items():
        worst = min(each, key=lambda one: one.points)
        checks.append(item.check("loss", worst.points >= -PAPER_LOSS_POINTS, precision=precision, worst=worst.text))
    nbytes = [(precision, held_bytes(backbone(model, precision)) / 1e6) for precision in PRECISIONS]
    return item.result(comparisons, tables={"scores": scores, "bytes": nbytes}, checks=checks, model=model)


def fig14(item: Item, settings: Settings) -> Result:
    """Train from each initialization with each seed, scoring the validation split every few steps."""
    task = "sentiment" if settings.data is None else "mrpc"
    every = 1 if settings.quick else 10 if task == "mrpc" else 25
    ways = [how for how in WAYS if how != "torch_pruned" or find_spec("torch_pruning") is not None]
    plan = [training(settings, task, OURS, seed, initialization=how, score_every=every) for how in ways for seed in settings.seeds]
    found: dict[str, list[Outcome]] = {how: [] for how in ways}
    for one, outcome in run_trainings(settings, plan).items():
        found[one.initialization].append(outcome)
    curves = {how: mean_curve(outcomes) for how, outcomes in found.items()}
    target = curves["gaussian"][-1][1]
    iterations = {how: reached(curve, target) for how, curve in curves.items()}
    gaussian, paper = iterations["gaussian"], printed(PAPER, "fig14")
    assert gaussian is not None, "a curve reaches its own end"
    rows: list[tuple[Number, ...]] = []
    for how, outcomes in found.items():
        tested = spread([one.test_score for one in outcomes])
        rows.append((WAYS[how], outcomes[0].losses[0], outcomes[0].losses[-1], *tested))
    checks = []
    for how in ("distilled", "pruned", "torch_pruned", "fan_in"):
        if how in iterations:
            own = iterations[how]
            said = {"way": WAYS[how], "own": "not reached" if own is None else own, "gaussian": gaussian, "target": target}
            checks.append(item.check("sooner", own is not None and own < gaussian, **said))
    return item.result(
        [
            item.cell((WAYS[how],), paper.get(("BART-Large", how)), own, note="" if own is not None else "not reached")
            for how, own in iterations.items()
        ],
        tables={"scores": rows},
        checks=checks,
        series={WAYS[how]: tuple((float(step), value) for step, value in curve) for how, curve in curves.items()},
        task=TITLES[task],
        seeds=len(settings.seeds),
        score=score_name(task),
        target=target,
    )


def mean_curve(outcomes: Sequence[Outcome]) -> list[tuple[int, float]]:
    """Return the mean over seeds at each scored step."""
    return [
        (points[0][0], sum(score for _, score in points) / len(points)) for points in zip(*(one.curve for one in outcomes), strict=True)
    ]


def reached(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """Return the first step with at least the target, None if there is none."""
    return next((step for step, score in curve if score >= target), None)
