"""Table V: training durations in Env. A, simulated (PAC+, section VI-B; 3 epochs of MRPC and STS-B, 1 of SST-2 and
QNLI).

The contradictions: where the table and the text about it contradict each other, arithmetic, or physics (sections I,
II-B).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product

from workbench.profiler.analytic import Technique
from workbench.profiler.descriptions import describe
from workbench_studies.papers.items import Item, Rows, columns_in_order, median_off
from workbench_studies.papers.pac_plus import testbed
from workbench_studies.papers.pac_plus.techniques import flops, footprint
from workbench_studies.papers.pac_plus.testbed import (
    DEVICES,
    GIB,
    MODELS,
    PAPER,
    Constants,
    Paradigm,
    Step,
    load_constants,
    step,
)
from workbench_studies.papers.result import OOM, Cells, Result, Row, printed

PARADIGMS: tuple[Paradigm, ...] = ("standalone", "pipeline_parallel", "data_parallel")
BASELINES = tuple(product(testbed.BASELINES, PARADIGMS))
OURS: tuple[Technique, Paradigm] = ("parallel_adapters", "hybrid")
ROWS = (*BASELINES, OURS)
PREDICTED_MODELS = MODELS[1:]


@lru_cache(maxsize=64)
def steps(constants: Constants) -> Mapping[tuple[str, str, str], Step]:
    """Return every row's step for every model, by (technique, paradigm, model)."""
    return {
        (technique, paradigm, model): step(constants, model, technique, paradigm)
        for technique, paradigm in ROWS
        for model in MODELS
    }


@lru_cache(maxsize=64)
def durations(constants: Constants) -> Cells:
    """Return hours, or OOM, by (technique, paradigm, model, task)."""
    hours: Cells = {}
    for (technique, paradigm, model), result in steps(constants).items():
        for task, samples, epochs in constants.datasets:
            if result.seconds_per_sample is None:
                hours[technique, paradigm, model, task] = OOM
            elif technique == "parallel_adapters":
                assert result.plan is not None
                cluster = testbed.nanos(constants, DEVICES)
                spent = testbed.phases(constants, model, cluster, result.plan, result.seconds_per_sample, samples)
                hours[technique, paradigm, model, task] = testbed.hours(spent, epochs)
            else:
                hours[technique, paradigm, model, task] = epochs * samples * result.seconds_per_sample / 3600
    return hours


def median_deviation(ours: Cells, paper: Cells, models: tuple[str, ...]) -> float:
    """Return the median of |ours / paper - 1| in per cent over the cells of some models that are numbers in both."""
    return median_off((ours[labels], value) for labels, value in paper.items() if labels[2] in models)


def verdicts(ours: Cells, paper: Cells) -> int:
    """Return the number of the 27 baseline x model verdicts (out of memory or not) that agree with the paper."""
    cells = [(*row, model, "MRPC") for row in BASELINES for model in MODELS]
    return sum((ours[labels] == OOM) == (paper[labels] == OOM) for labels in cells)


def in_order(ours: Cells, paper: Cells) -> tuple[int, int, list[str]]:
    """Return the columns (model and task) whose methods are in the paper's order (see columns_in_order)."""
    columns = {
        f"{model} {task}": [(" ".join(row), paper[*row, model, task], ours[*row, model, task]) for row in ROWS]
        for model, task in product(MODELS, ("MRPC", "STS-B", "SST-2", "QNLI"))
    }
    return columns_in_order(columns)


def fastest_columns(hours: Cells) -> int:
    """Return the number of columns (model and task) in which PAC+ takes less time than every other method that runs."""
    columns: dict[tuple[str, ...], list[float]] = {}
    for labels, value in hours.items():
        if labels[:2] != OURS and isinstance(value, float):
            columns.setdefault(labels[2:], []).append(value)
    return sum(hours[*OURS, *column] < min(others) for column, others in columns.items())


def table5(item: Item) -> Result:
    """Simulate every method."""
    constants, paper = load_constants(), item.printed
    ours = durations(constants)

    def score(cells: Cells) -> Row:
        deviations = [median_deviation(cells, paper, models) for models in (MODELS[:1], PREDICTED_MODELS)]
        return verdicts(cells, paper), *deviations, in_order(cells, paper)[0]

    base = describe(MODELS[0]).params
    scaled: Cells = {}
    for technique, paradigm, model, task in paper:
        value = paper[technique, paradigm, MODELS[0], task]
        scaled[technique, paradigm, model, task] = (
            value * describe(model).params / base if isinstance(value, float) else value
        )
    median, agreeing = median_deviation(ours, paper, PREDICTED_MODELS), verdicts(ours, paper)
    good, count, wrong = in_order(ours, paper)
    first = fastest_columns(ours)
    return item.result(
        item.compare(lambda *labels: ours[labels]),
        tables={
            "speedups": speedups(ours, paper),
            "plans": _plans(constants),
            "readings": _readings(constants, paper),
            "sensitivity": item.sensitivity(constants, lambda changed: score(durations(changed)), score(scaled)),
            **contradictions(constants, paper),
        },
        columns={"epochs": (*(name for name, _, _ in constants.datasets), "spread %")},
        holds={"verdicts": agreeing == 27, "fastest": first == count},
        first=first,
        median=median,
        base=median_deviation(ours, paper, MODELS[:1]),
        agreeing=agreeing,
        good=good,
        count=count,
        swapped=len(wrong),
        pairs="; ".join(sorted({pair.split(": ")[1] for pair in wrong})) or "none",
    )


def speedups(ours: Cells, paper: Cells) -> Rows:
    """Return the speedups of section VI-B: from the text, from the paper's cells and from ours."""
    claims = printed(PAPER, "claims")
    large, small = ("SST-2", "QNLI"), ("MRPC", "STS-B")
    pipelines = [row for row in BASELINES if row[1] == "pipeline_parallel"]

    def ratios(cells: Cells, rows: list[tuple[Technique, Paradigm]], tasks: tuple[str, ...]) -> list[float]:
        pairs = [
            (cells[*row, model, task], cells[*OURS, model, task]) for row, model, task in product(rows, MODELS, tasks)
        ]
        return [value / ours for value, ours in pairs if isinstance(value, float) and isinstance(ours, float)]

    return [
        (claim, claims[claim, ""], *(pick(ratios(cells, rows, tasks)) for cells in (paper, ours)))
        for claim, tasks, rows, pick in (
            ("speedup on SST-2 and QNLI, least", large, list(BASELINES), min),
            ("speedup on SST-2 and QNLI, most", large, list(BASELINES), max),
            ("speedup over pipeline parallelism on SST-2 and QNLI, most", large, pipelines, max),
            ("speedup on MRPC and STS-B, most", small, list(BASELINES), max),
        )
    ]


def _plans(constants: Constants) -> Rows:
    rows: list[Row] = []
    for labels, result in steps(constants).items():
        if result.plan is None:
            rows.append((*labels, OOM, "", "", result.reason))
        else:
            batches = f"{result.plan.num_micro_batches} x {result.plan.micro_batch_size}"
            rows.append((*labels, result.seconds_per_sample, result.plan.grouping(), result.plan.partition(), batches))
    return rows


def _readings(constants: Constants, paper: Cells) -> Rows:
    """Return the verdicts if one device trains its share of the mini-batch at a time, or all of it."""
    rows = []
    for name, alone in (
        ("4 samples at a time, as a device of data parallelism", None),
        ("the mini-batch of 16", constants.mini_batch),
    ):
        hours = dict(durations(constants))
        for technique, model in product(testbed.BASELINES, MODELS):
            seconds = step(constants, model, technique, "standalone", alone=alone).seconds_per_sample
            hours[technique, "standalone", model, "MRPC"] = OOM if seconds is None else seconds
        rows.append((name, verdicts(hours, paper)))
    return rows


def contradictions(constants: Constants, paper: Cells) -> dict[str, Rows]:
    """Return the rows of each contradiction's table."""
    tables = {"epochs": _epochs, "full": _full, "idle": _idle, "memory": _memory, "minutes": _minutes}
    return {name: rows_of(constants, paper) for name, rows_of in tables.items()}


def _epochs(constants: Constants, paper: Cells) -> Rows:
    """Seconds per sample of every row from every task: they should agree, and they give the cost of a cached epoch."""
    rows: list[Row] = []
    for labels in dict.fromkeys(labels[:3] for labels in paper):
        values = [(paper[*labels, task], samples * epochs) for task, samples, epochs in constants.datasets]
        each = [3600 * value / count for value, count in values if isinstance(value, float)]
        if each:
            rows.append((*labels, *each, 100 * (max(each) / min(each) - 1)))
    return rows


def _full(constants: Constants, paper: Cells) -> Rows:
    """Full fine-tuning over adapters in the same pipeline: 1.5 by FLOPs; 1.17 for T5-Base, 4.45 for BART-Large."""
    rows = []
    for model in MODELS[:2]:
        full, adapters = (paper[technique, "pipeline_parallel", model, "SST-2"] for technique in ("full", "adapters"))
        ratio = sum(flops(constants, model, "full")) / sum(flops(constants, model, "adapters"))
        rows.append((model, full, adapters, full / adapters, ratio))
    first, second = rows
    return [*rows, ("BART-Large over T5-Base", second[1] / first[1], second[2] / first[2], None, None)]


def _idle(constants: Constants, paper: Cells) -> Rows:
    """The speed of a Nano that the pipeline cells imply, if each stage computes in 4 of 7 slots as in a synchronous
    pipeline.
    """
    cores, mhz = next((cores, mhz) for name, cores, mhz in constants.cores_and_mhz if name == "jetson-nano-h")
    peak = cores * testbed.FLOPS_PER_CORE_AND_CYCLE * mhz * 1e6
    samples = constants.samples("SST-2")
    slots = constants.micro_batches / (constants.micro_batches + DEVICES - 1)

    def rate(model: str, technique: Technique, hours: float) -> float:
        return sum(flops(constants, model, technique)) / constants.mini_batch * samples / (3600 * hours)

    alone = rate(MODELS[0], "lora", paper["lora", "standalone", MODELS[0], "SST-2"])
    rows: list[Row] = [("lora, standalone", MODELS[0], alone / 1e9, 100 * alone / peak, None, None)]
    for technique, model in product(testbed.BASELINES, MODELS):
        value = paper[technique, "pipeline_parallel", model, "SST-2"]
        if isinstance(value, float):
            each = rate(model, technique, value) / DEVICES
            rows.append(
                (technique, model, each / 1e9, 100 * each / peak, each / slots / 1e9, 100 * each / slots / peak)
            )
    return rows


def _memory(constants: Constants, paper: Cells) -> Rows:
    """Standalone T5-Base runs, BART-Large with data parallelism does not: no budget fits both at 16 samples on one and
    4 on the other.
    """

    def gb(model: str, technique: Technique, share: float) -> float:
        parts = footprint(constants, model, technique)
        return (parts["weights"] + parts["gradients"] + share * parts["activations"]) / GIB

    ways = (("T5-Base", 1.0), ("T5-Base", 1 / DEVICES), ("BART-Large", 1 / DEVICES))
    return [(technique, *(gb(model, technique, share) for model, share in ways)) for technique in testbed.BASELINES[1:]]


def _minutes(constants: Constants, paper: Cells) -> Rows:
    """Sections I and II-B call 72.6 minutes one epoch; Table V's 1.21 h are three."""
    hours = {name: paper["lora", "standalone", "T5-Base", name] for name, _, _ in constants.datasets}
    seconds = {name: 3600 * hours[name] / (n * e) for name, n, e in constants.datasets}
    claimed_hours = printed(PAPER, "claims")["standalone LoRA, one epoch", "T5-Base"]
    return [
        ("Table V, MRPC, three epochs", 60 * hours["MRPC"], seconds["MRPC"]),
        (
            "sections I and II-B: 'per training epoch', 'an epoch time'",
            claimed_hours,
            claimed_hours * 60 / constants.samples("MRPC"),
        ),
        ("Table V, SST-2, one epoch", 60 * hours["SST-2"], seconds["SST-2"]),
    ]
