"""Techniques trained on real tasks with a small model: Tables VI and VII, Fig. 14 (PAC+, section VI).

And epochs with and without the activation cache, timed on real steps (section VI-H, Fig. 18).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.core.serial import read_toml
from workbench.models.evaluation import set_statistics
from workbench.models.optimization import make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.quantization import held_bytes
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate
from workbench.trainings.inputs import Inputs, backbone, run_all, task_of
from workbench.trainings.techniques import Outcome, Training, reached, score_name, taped, taps_of
from workbench_studies.papers.items import Item, Rows
from workbench_studies.papers.pac_plus.differences import RESAMPLES, Difference, paired_bootstrap
from workbench_studies.papers.pac_plus.testbed import PAPER
from workbench_studies.papers.result import Number, Result, Row, Settings, paper_folder, printed, spread

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert"
_COMPARED = read_toml(paper_folder(PAPER) / "trainings.toml")
RATES, WAYS = _COMPARED["learning_rates"], _COMPARED["ways"]
TITLES = {"sentiment": "sentiment", "mrpc": "MRPC", "stsb": "STS-B", "sst2": "SST-2"}
EMBEDDED, GLUE = "sentiment", ("mrpc", "stsb", "sst2")
LABELS = {"full": "Full Model", "adapters": "Adapters", "lora": "LoRA", "parallel_adapters": "Parallel Adapters"}
SST2_TRAIN = 8000
"""Number of SST-2's 67,349 training phrases to use; all other tasks are used whole."""
BACKWARD = ("full", "adapters", "lora")
OURS = "parallel_adapters"
PRECISIONS = ("float32", "float16", "int8", "int4", "nf4")
Key = TypeVar("Key")
PAPER_LOSS_POINTS = 2.01
"""The largest loss in the paper's table: T5-Large on MRPC, FP32 to INT4."""


def tasks_of(settings: Settings) -> tuple[str, ...]:
    """Return the tasks: the paper's if a folder has them, otherwise the embedded one."""
    return (EMBEDDED,) if settings.data is None else GLUE


def training(settings: Settings, task: str, technique: str = OURS, **changes: Any) -> Training:
    """Return a training of the comparison, or its quick version, with the first seed."""
    quick = {"model": QUICK_MODEL, "epochs": 1, "max_length": 32, "samples": (48, 24, 24), "batch_size": 16}
    full = {"model": MODEL, "samples": (SST2_TRAIN if task == "sst2" else None, None, None)}
    chosen: dict[str, Any] = {"learning_rate": RATES[technique]} | (quick if settings.quick else full) | changes
    return Training(task=task, technique=technique, seed=settings.seeds[0], **chosen)


def outcomes_of(settings: Settings, plans: Mapping[Key, Training]) -> dict[Key, list[Outcome]]:
    """Run the training of each key with every seed, if no outcome of it is stored; outcomes are stored in the settings'
    workdir.
    """
    folder = None if settings.workdir is None else settings.workdir / "trainings"
    trainings = {key: [replace(plan, seed=seed) for seed in settings.seeds] for key, plan in plans.items()}
    # All trainings together, because some share the backbone's taps.
    results = run_all([each for plan in trainings.values() for each in plan], folder, settings.data, settings.progress)
    return {key: [results[each] for each in plan] for key, plan in trainings.items()}


def less(settings: Settings, first: Sequence[Outcome], second: Sequence[Outcome]) -> Difference:
    """Return the first side's score minus the second's, on the same test samples."""
    first_outputs, other = ([outcome.test_outputs for outcome in side] for side in (first, second))
    return paired_bootstrap(
        task_of(first[0].training, settings.data), first_outputs, other, 50 if settings.quick else RESAMPLES
    )


def tested(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return mean and standard deviation (0 of one) of the test scores over the seeds."""
    scores = [outcome.test_score for outcome in outcomes]
    return statistics.fmean(scores), spread(scores) or 0.0


def paper_means(table: str) -> dict[tuple[str, str], float]:
    """Return the paper's mean over its three models, by (technique or precision, task)."""
    values: dict[tuple[str, str], list[float]] = {}
    for (row, _, task), value in printed(PAPER, table).items():
        if isinstance(value, float):
            values.setdefault((row, task), []).append(value)
    return {key: statistics.fmean(column) for key, column in values.items()}


def paper_next_to(table: str, ours: Mapping[tuple[str, str], float]) -> Rows:
    """Return the paper's scores of its three models with ours, by task and row of a table; ours: by row and task."""
    rows: dict[tuple[str, str], list[Number]] = {}
    for (row, _, task), value in printed(PAPER, table).items():
        rows.setdefault((task, row), []).append(value)
    keys = dict.fromkeys([*((task, row) for row, task in ours), *rows])
    return [
        (*key, *rows.get(key, [None] * 3), ours.get((key[1], key[0])))
        for key in keys
        if len(rows.get(key, [])) in (0, 3)
    ]


def table6(item: Item, settings: Settings) -> Result:
    """Train each technique on each task with each seed."""
    tasks, paper = tasks_of(settings), paper_means("table6")
    plans = {(technique, task): training(settings, task, technique) for task, technique in product(tasks, LABELS)}
    outcomes_by_key = outcomes_of(settings, plans)
    comparisons, checks = [], []
    scores: list[Row] = []
    significance: list[Row] = []
    for name in tasks:
        title = TITLES[name]
        ours = {technique: tested(outcomes_by_key[technique, name])[0] for technique in LABELS}
        for against, others in (
            ("from the mean of the three", BACKWARD),
            *((f"from {LABELS[compared]}", (compared,)) for compared in BACKWARD),
        ):
            printed_here = all((technique, title) in paper for technique in LABELS)
            theirs = (
                paper[OURS, title] - sum(paper[compared, title] for compared in others) / len(others)
                if printed_here
                else None
            )
            comparisons.append(
                item.cell(
                    (against, title), theirs, ours[OURS] - sum(ours[compared] for compared in others) / len(others)
                )
            )
        for technique, label in LABELS.items():
            outcomes = outcomes_by_key[technique, name]
            validation = statistics.fmean(outcome.validation_score for outcome in outcomes)
            parameters = outcomes[0].trainable_parameters
            scores.append((title, label, parameters, *tested(outcomes), len(outcomes), score_name(name), validation))
        parallel, lora = outcomes_by_key[OURS, name], outcomes_by_key["lora", name]
        difference = less(settings, parallel, lora)
        significance.append((title, difference.points, difference.low, difference.high, difference.p_value))
        checks.append(
            item.check(
                "parity",
                not difference.is_significant,
                task=title,
                difference=difference.text,
                p=difference.p_value,
            )
        )
    means = {(name, TITLES[task]): tested(outcomes)[0] for (name, task), outcomes in outcomes_by_key.items()}
    return item.result(
        comparisons,
        tables={"scores": scores, "significance": significance, "beside": paper_next_to("table6", means)},
        checks=checks,
    )


def table7(item: Item, settings: Settings) -> Result:
    """Train Parallel Adapters on backbones with quantized weights, with each task and seed."""
    tasks, paper = tasks_of(settings), paper_means("table7")
    plans = {
        (precision, task): training(settings, task, backbone=precision)
        for task, precision in product(tasks, PRECISIONS)
    }
    outcomes_by_key = outcomes_of(settings, plans)
    comparisons, model = [], outcomes_by_key[PRECISIONS[0], tasks[0]][0].training.model
    differences: dict[str, list[Difference]] = {}
    for task in tasks:
        title = TITLES[task]
        for precision in PRECISIONS[1:]:
            difference = less(settings, outcomes_by_key[precision, task], outcomes_by_key["float32", task])
            differences.setdefault(precision, []).append(difference)
            theirs = paper[precision, title] - paper["float32", title] if (precision, title) in paper else None
            comparisons.append(item.cell((f"{precision} less float32", title), theirs, difference.points))
    scores: list[Row] = []
    for (precision, task), outcomes in outcomes_by_key.items():
        scores.append((TITLES[task], precision, *tested(outcomes), len(outcomes), score_name(task)))
    checks, findings = [], []
    for precision, each in differences.items():
        worst = min(each, key=lambda result: result.points)
        if any(row == precision for row, _ in paper):
            checks.append(item.check("loss", worst.points >= -PAPER_LOSS_POINTS, precision=precision, worst=worst.text))
        else:
            findings.append(item.finding("other", precision=precision, worst=worst.text))
    means = {(name, TITLES[task]): tested(outcomes)[0] for (name, task), outcomes in outcomes_by_key.items()}
    nbytes = [(precision, held_bytes(backbone(model, precision)) / 1e6) for precision in PRECISIONS]
    return item.result(
        comparisons,
        tables={"scores": scores, "bytes": nbytes, "beside": paper_next_to("table7", means)},
        checks=checks,
        findings=findings,
        model=model,
    )


def fig14(item: Item, settings: Settings) -> Result:
    """Train from each initialization with each seed, scoring the validation split every few steps."""
    task = EMBEDDED if settings.data is None else "mrpc"
    every = 1 if settings.quick else 10 if task == "mrpc" else 25
    ways = [how for how in WAYS if how != "torch_pruned" or find_spec("torch_pruning") is not None]
    plans = {how: training(settings, task, initialization=how, score_every=every) for how in ways}
    outcomes_by_key = outcomes_of(settings, plans)
    curves = {how: mean_curve(outcomes) for how, outcomes in outcomes_by_key.items()}
    target = curves["gaussian"][-1][1]
    iterations = {how: reached(curve, target) for how, curve in curves.items()}
    gaussian, paper = iterations["gaussian"], item.printed
    assert gaussian is not None, "a curve reaches its own end"
    rows: list[Row] = []
    for how, outcomes in outcomes_by_key.items():
        rows.append((WAYS[how], outcomes[0].losses[0], outcomes[0].losses[-1], *tested(outcomes)))
    checks, findings = [], []
    for how in ("distilled", "torch_pruned", "pruned", "fan_in"):
        if how in iterations:
            ours = iterations[how]
            words: dict[str, Any] = {"way": WAYS[how], "own": "not reached" if ours is None else ours}
            words |= {"gaussian": gaussian, "target": target}
            if ("BART-Large", how) in paper:
                checks.append(item.check("sooner", ours is not None and ours < gaussian, **words))
            else:
                findings.append(item.finding("other", **words))
    return item.result(
        [
            item.cell(
                (WAYS[how],), paper.get(("BART-Large", how)), reached, note="" if reached is not None else "not reached"
            )
            for how, reached in iterations.items()
        ],
        tables={"scores": rows},
        checks=checks,
        findings=findings,
        series={WAYS[how]: tuple((float(step), value) for step, value in curve) for how, curve in curves.items()},
        task=TITLES[task],
        seeds=len(settings.seeds),
        score=score_name(task),
        target=target,
    )


def mean_curve(outcomes: Sequence[Outcome]) -> list[tuple[int, float]]:
    """Return the mean over seeds at each scored step."""
    return [
        (points[0][0], sum(score for _, score in points) / len(points))
        for points in zip(*(outcome.curve for outcome in outcomes), strict=True)
    ]


EPOCHS = tuple(range(1, 11))
SAMPLES, WARM_UP_STEPS = 1024, 2


def fig18_executed(item: Item, settings: Settings) -> Result:
    """Time an epoch's steps with the backbone and from the cache in alternation, and sum them up to 1 to 10 epochs."""
    task = EMBEDDED if settings.data is None else "mrpc"
    limit: dict[str, Any] = {} if settings.quick else {"samples": (SAMPLES, 16, 16)}
    timed = training(settings, task, **limit)
    inputs = Inputs(timed, settings.data)
    train, stack = inputs.data.train, inputs.stack
    began = time.perf_counter()
    cached = taped(stack, train)
    writing_s = time.perf_counter() - began

    def through_backbone(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return stack(batch.input_ids, batch.attention_mask)[1]

    steps = []
    for source in (through_backbone, partial(taps_of, cached)):
        adapter = inputs.adapter(timed).train()
        set_statistics(adapter, inputs.statistics)
        optimizer = make_optimizer(adapter, timed.weight_decay)
        set_learning_rate(optimizer, timed.learning_rate)
        steps.append(partial(_step_s, train, adapter, optimizer, source))
    batches = epoch_batches(train.lengths, timed.batch_size, timed.seed, 0)
    for indices, step in product(batches[:WARM_UP_STEPS], steps):
        step(indices)
    # In alternation, so that other load on the machine affects both sides alike.
    seconds = [[step(indices) for step in steps] for indices in batches]
    without, with_cache = (sum(column) for column in zip(*seconds, strict=True))
    ratios = [backbone / cached for backbone, cached in seconds]
    quantities = {
        f"saved over {epochs} epochs ({model})": (value, saving(int(epochs), without, with_cache))
        for (quantity, model, epochs), value in printed(PAPER, "fig18").items()
        if epochs.isdigit() and quantity == "latency saved"
    } | {"saved in one cached epoch, at most": (79.51, 100 * (1 - with_cache / without))}
    named = {"backbone and Parallel Adapters": without, "Parallel Adapters from the cache": with_cache}
    return item.result(
        [item.cell((label,), paper, ours) for label, (paper, ours) in quantities.items()],
        tables={
            "seconds": list((named | {"one pass that fills the cache": writing_s}).items()),
            "ratios": [(len(ratios), statistics.median(ratios), min(ratios), max(ratios))],
        },
        holds={"shorter": with_cache < without},
        series={
            "without the cache": tuple((float(epochs), epochs * without) for epochs in EPOCHS),
            "with the cache": tuple((float(epochs), without + (epochs - 1) * with_cache) for epochs in EPOCHS),
        },
        task=TITLES[task],
        samples=len(train),
        batch=timed.batch_size,
        threads=torch.get_num_threads(),
        model=timed.model,
        without=without,
        with_cache=with_cache,
    )


def saving(epochs: int, without_s: float, cached_s: float) -> float:
    """Return the percentage of time that the cache saves over so many epochs, of which the first runs the backbone."""
    return 100 * (1 - (without_s + (epochs - 1) * cached_s) / (epochs * without_s))


def _step_s(
    split: TokenizedSplit,
    adapter: ParallelAdapter,
    optimizer: Any,
    source: Callable[[Batch], list[Tensor]],
    indices: Sequence[int],
) -> float:
    """Train on some samples; return the seconds.  source: where a batch's taps come from."""
    began = time.perf_counter()
    batch = collate(split, indices)
    logits = adapter.predict(source(batch), batch.attention_mask, batch.sample_ids)
    task_loss(logits, batch.labels, adapter.config.kind).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began
