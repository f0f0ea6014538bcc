"""Parallel Adapters on 2 to 8 Nano-H: throughput by paradigm (Fig. 16), and how PAC+ groups the devices (Fig. 17; PAC+,
section VI-G).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import product

from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.planners import TrainingProblem, candidates
from workbench.planners.fixed import data_parallel
from workbench.planners.memory import in_flight, plan_needs, rank_need
from workbench.profiler.analytic import Technique
from workbench.simulator.steps import sample_s
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus.testbed import (
    GIB,
    MODELS,
    Constants,
    load_constants,
    nanos,
    problem,
)
from workbench_studies.papers.result import OOM, Cells, Result, Row

COUNTS = (2, 4, 6, 8)
DATA, PIPELINE, HYBRID = "data_parallel", "pipeline_parallel", "hybrid"
TECHNIQUE: Technique = "parallel_adapters"
Cell = tuple[Plan, float, float]  # plan, samples per second, the maximum weights on a device in GB


def _problem(constants: Constants, model: str, count: int, micro_batches: int) -> TrainingProblem:
    """Return the problem of a number of devices.

    'The batch size was consistent with the number of devices' (section VI-G) is read as the micro-batch's, so that a
    group of all devices gives each one sample.
    """
    sizes = {"batch_size": count * micro_batches, "micro_batches": micro_batches}
    return problem(constants, model, TECHNIQUE, nanos(constants, count), **sizes)


@lru_cache(maxsize=256)
def best_plan(constants: Constants, model: str, count: int, micro_batches: int) -> Plan | None:
    """Return W_sigma of Algorithm 1; None if nothing fits."""
    return _plan(_problem(constants, model, count, micro_batches), HYBRID)


def _plan(problem: TrainingProblem, paradigm: str) -> Plan | None:
    try:
        if paradigm == DATA:
            return data_parallel(problem)
        return candidates(problem, max_group=None if paradigm == HYBRID else 1)[0]
    except PlanError:
        return None


@lru_cache(maxsize=64)
def scaling(constants: Constants) -> Mapping[tuple[str, str, int], Cell | None]:
    """Return each paradigm's result, by (paradigm, model, devices); None if it runs out of memory."""
    results: dict[tuple[str, str, int], Cell | None] = {}
    for model, count, paradigm in product(MODELS, COUNTS, (DATA, PIPELINE, HYBRID)):
        problem = _problem(constants, model, count, constants.micro_batches)
        plan = (
            best_plan(constants, model, count, constants.micro_batches)
            if paradigm == HYBRID
            else _plan(problem, paradigm)
        )
        results[paradigm, model, count] = None
        if plan is not None:
            needs = plan_needs(problem.profile, plan, sequence_length=problem.sequence_length).values()
            results[paradigm, model, count] = (
                plan,
                1 / sample_s(problem, plan),
                max(need.weights_bytes for need in needs) / GIB,
            )
    return results


def gains(constants: Constants) -> dict[tuple[str, int], float]:
    """Return PAC+'s throughput gain over a straight pipeline in per cent, where PAC+'s own plan is not that
    pipeline.
    """
    gains_of, cells = {}, scaling(constants)
    for model, count in product(MODELS, COUNTS):
        ours, straight = cells[HYBRID, model, count], cells[PIPELINE, model, count]
        if ours is not None and straight is not None and ours[0].grouping() != straight[0].grouping():
            gains_of[model, count] = 100 * (ours[1] / straight[1] - 1)
    return gains_of


def fig16(item: Item) -> Result:
    """Simulate data, pipeline and hybrid parallelism."""
    constants, paper = load_constants(), item.printed
    cells, gained = scaling(constants), gains(constants)
    runs_out = {model: all(cells[DATA, model, count] is None for count in COUNTS) for model in MODELS}

    def most_of(gains_of: Mapping[tuple[str, int], float]) -> tuple[float, float, list[float]]:
        return (
            min(gains_of.values()),
            max(gains_of.values()),
            [gain for (_, count), gain in gains_of.items() if count == COUNTS[-1]],
        )

    least, most, at_eight = most_of(gained)
    comparisons = [
        item.cell((quantity, bound), paper["throughput gained over pipeline_parallel", bound], ours)
        for quantity, bound, ours in (
            ("throughput gained over a pipeline", "least", least),
            ("throughput gained over a pipeline", "most", most),
            ("throughput gained over a pipeline on 8 Nanos", "least", min(at_eight)),
            ("throughput gained over a pipeline on 8 Nanos", "most", max(at_eight)),
        )
    ]
    comparisons += [
        item.cell((f"data parallelism, {model}", "any"), OOM, OOM if runs_out[model] else "fits")
        for model in MODELS[1:]
    ]
    rows: list[Row] = []
    for (paradigm, model, count), cell in cells.items():
        gain = gained.get((model, count)) if paradigm == HYBRID else None
        values = (OOM, None, None, None) if cell is None else (cell[0].grouping(), cell[1], cell[2], gain)
        rows.append((model, count, paradigm, *values))

    def score(changed: Constants) -> Row:
        low, high, eight = most_of(gains(changed))
        return low, high, max(eight)

    ideal = {count: 100 * (count - 1) / constants.micro_batches for count in COUNTS}
    return item.result(
        comparisons,
        tables={"throughput": rows, "sensitivity": item.sensitivity(constants, score, (ideal[2], ideal[8], ideal[8]))},
        series={
            f"{model}, {name}": tuple(
                (count, cell[1]) for count in COUNTS if (cell := cells[paradigm, model, count]) is not None
            )
            for model in MODELS
            for paradigm, name in ((DATA, DATA), (PIPELINE, PIPELINE), (HYBRID, "PAC+"))
        },
        verdicts=", ".join(f"{model}: {'OOM' if out else 'fits'}" for model, out in runs_out.items()),
        least=least,
    )


def groupings(constants: Constants, micro_batches: int | None = None) -> Cells:
    """Return the groupings by (model, devices)."""
    groupings_of: Cells = {}
    for model, count in product(MODELS, COUNTS):
        plan = best_plan(constants, model, count, micro_batches or constants.micro_batches)
        groupings_of[model, str(count)] = OOM if plan is None else plan.grouping()
    return groupings_of


def trivial_groupings(constants: Constants) -> Cells:
    """Return the groupings of the rule 'fewest stages that fit, even groups'; earlier groups get one more device if
    needed.
    """
    groupings_of: Cells = {}
    for model, count in product(MODELS, COUNTS):
        problem = _problem(constants, model, count, constants.micro_batches)
        even = (
            [count // stages + (index < count % stages) for index in range(stages)] for stages in range(1, count + 1)
        )
        groupings_of[model, str(count)] = next(
            (f"[{'-'.join(map(str, sizes))}]" for sizes in even if _fits(problem, sizes)), OOM
        )
    return groupings_of


def _fits(problem: TrainingProblem, sizes: list[int]) -> bool:
    """Return whether groups of these sizes have memory for all layers: each stage takes as many as fit."""
    start, num_layers, budget = 0, problem.profile.num_layers, problem.cluster.devices[0].memory_bytes
    for index, size in enumerate(sizes):
        need = partial(
            rank_need,
            problem.profile,
            0,
            start,
            samples=-(-sum(sizes) // size),
            sequence_length=problem.sequence_length,
            in_flight=in_flight(index, len(sizes), problem.micro_batches),
        )
        while start < num_layers and need(start + 1).total_bytes <= budget:
            start += 1
    return start == num_layers


def score(planned: Cells, paper: Cells, models: tuple[str, ...] = MODELS) -> int:
    """Return the number of groupings that equal the paper's."""
    return sum(planned[labels] == value for labels, value in paper.items() if labels[0] in models)


def fig17(item: Item) -> Result:
    """Plan the groupings."""
    constants, paper = load_constants(), item.printed
    planned, trivial = groupings(constants), trivial_groupings(constants)

    def scores(planned: Cells) -> tuple[int, ...]:
        return tuple(score(planned, paper, models) for models in (MODELS, MODELS[:2], MODELS[2:]))

    readings: list[Row] = []
    for micro_batches in (1, 2, 4, 8):
        planned_groups = groupings(constants, micro_batches)
        readings.append(
            (micro_batches, score(planned_groups, paper), *(planned_groups["T5-Large", str(count)] for count in COUNTS))
        )
    total, small, _ = scores(planned)
    return item.result(
        [
            item.cell(labels, value, planned[labels], note=f"trivial rule: {trivial[labels]}")
            for labels, value in paper.items()
        ],
        tables={
            "readings": readings,
            "sensitivity": item.sensitivity(constants, lambda changed: scores(groupings(changed)), scores(trivial)),
        },
        total=total,
        trivial=score(trivial, paper),
        small=small,
    )
