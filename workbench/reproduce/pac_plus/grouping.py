"""Parallel Adapters on 2 to 8 Nano-H: throughput by paradigm (Fig. 16), and how PAC+ groups the devices (Fig. 17; PAC+, section VI-G)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product

from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.planners import Problem, candidates
from workbench.planners.fixed import data_parallel
from workbench.planners.memory import in_flight, plan_needs, rank_need
from workbench.profiler.analytic import Technique
from workbench.reproduce.items import Item
from workbench.reproduce.pac_plus.steps import fastest, seconds_per_sample
from workbench.reproduce.pac_plus.testbed import GIB, MODELS, PAPER, Constants, load_constants, nanos, profile
from workbench.reproduce.result import OOM, Number, Result, Settings, printed

COUNTS = (2, 4, 6, 8)
DATA, PIPELINE, HYBRID = "data_parallel", "pipeline_parallel", "hybrid"
TECHNIQUE: Technique = "parallel_adapters"
Cell = tuple[Plan, float, float]  # plan, samples per second, the maximum weights on a device in GB
Cells = Mapping[tuple[str, ...], Number]


def _candidates(constants: Constants, costs_of: Profile, count: int, micro_batches: int, max_group: int | None) -> list[Plan]:
    """Return plans of each number of stages, none if nothing fits.

    'The batch size was consistent with the number of devices' (section VI-G) is read as the micro-batch's, so that a group of all
    devices gives each one sample.
    """
    try:
        return candidates(_problem(constants, costs_of, count, micro_batches), objective="bottleneck", max_group=max_group)
    except PlanError:
        return []


def _problem(constants: Constants, costs_of: Profile, count: int, micro_batches: int) -> Problem:
    sizes = {"batch_size": count * micro_batches, "micro_batches": micro_batches}
    return Problem(costs_of, nanos(constants, count), **sizes, sequence_length=constants.sequence_length)


@lru_cache(maxsize=256)
def best_plan(constants: Constants, model: str, count: int, micro_batches: int) -> Plan | None:
    """Return the plan with the shortest simulated mini-batch, among those of each number of stages; None if nothing fits."""
    cluster = nanos(constants, count)
    costs_of = profile(constants, model, TECHNIQUE, cluster)
    plans = _candidates(constants, costs_of, count, micro_batches, None)
    return fastest(costs_of, cluster, plans, TECHNIQUE, constants.sequence_length)[1] if plans else None


@lru_cache(maxsize=64)
def scaling(constants: Constants) -> Mapping[tuple[str, str, int], Cell | None]:
    """Return each paradigm's result, by (paradigm, model, devices); None if it runs out of memory."""
    found: dict[tuple[str, str, int], Cell | None] = {}
    for model, count, paradigm in product(MODELS, COUNTS, (DATA, PIPELINE, HYBRID)):
        cluster = nanos(constants, count)
        costs_of = profile(constants, model, TECHNIQUE, cluster)
        plan = _plan(constants, costs_of, model, count, paradigm)
        found[paradigm, model, count] = None
        if plan is not None:
            seconds = seconds_per_sample(costs_of, cluster, plan, TECHNIQUE, constants.sequence_length)
            needs = plan_needs(costs_of, plan, sequence_length=constants.sequence_length)
            found[paradigm, model, count] = (plan, 1 / seconds, max(need.weights_bytes for need in needs.values()) / GIB)
    return found


def _plan(constants: Constants, costs_of: Profile, model: str, count: int, paradigm: str) -> Plan | None:
    micro_batches = constants.micro_batches
    if paradigm == HYBRID:
        return best_plan(constants, model, count, micro_batches)
    if paradigm == PIPELINE:
        plans = _candidates(constants, costs_of, count, micro_batches, 1)
        return next((plan for plan in plans if len(plan.stages) == count), None)
    try:
        return data_parallel(_problem(constants, costs_of, count, micro_batches))
    except PlanError:
        return None


def gains(constants: Constants) -> dict[tuple[str, int], float]:
    """Return PAC+'s throughput gain over a straight pipeline in per cent, where PAC+'s own plan is not that pipeline."""
    found, cells = {}, scaling(constants)
    for model, count in product(MODELS, COUNTS):
        own, straight = cells[HYBRID, model, count], cells[PIPELINE, model, count]
        if own is not None and straight is not None and own[0].grouping() != straight[0].grouping():
            found[model, count] = 100 * (own[1] / straight[1] - 1)
    return found


def fig16(item: Item, settings: Settings) -> Result:
    """Simulate data, pipeline and hybrid parallelism."""
    constants, paper = load_constants(), printed(PAPER, "fig16")
    cells, gained = scaling(constants), gains(constants)
    runs_out = {model: all(cells[DATA, model, count] is None for count in COUNTS) for model in MODELS}

    def most_of(found: Mapping[tuple[str, int], float]) -> tuple[float, float, list[float]]:
        return min(found.values()), max(found.values()), [gain for (_, count), gain in found.items() if count == COUNTS[-1]]

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
    comparisons += [item.cell((f"data parallelism, {model}", "any"), OOM, OOM if runs_out[model] else "fits") for model in MODELS[1:]]
    rows: list[tuple[Number, ...]] = []
    for (paradigm, model, count), cell in cells.items():
        gain = gained.get((model, count)) if paradigm == HYBRID else None
        found = (OOM, None, None, None) if cell is None else (cell[0].grouping(), cell[1], cell[2], gain)
        rows.append((model, count, paradigm, *found))

    def score(changed: Constants) -> tuple[Number, ...]:
        low, high, eight = most_of(gains(changed))
        return low, high, max(eight)

    ideal = {count: 100 * (count - 1) / constants.micro_batches for count in COUNTS}
    return item.result(
        comparisons,
        tables={"throughput": rows, "sensitivity": item.sensitivity(constants, score, (ideal[2], ideal[8], ideal[8]))},
        holds={"memory": runs_out == {"T5-Base": False, "BART-Large": True, "T5-Large": True}, "faster": least >= 0},
        series={
            f"{model}, {name}": tuple((count, cell[1]) for count in COUNTS if (cell := cells[paradigm, model, count]) is not None)
            for model in MODELS
            for paradigm, name in ((DATA, DATA), (PIPELINE, PIPELINE), (HYBRID, "PAC+"))
        },
        verdicts=", ".join(f"{model}: {'OOM' if out else 'fits'}" for model, out in runs_out.items()),
        least=least,
    )


def groupings(constants: Constants, micro_batches: int | None = None) -> dict[tuple[str, ...], Number]:
    """Return the groupings by (model, devices)."""
    found: dict[tuple[str, ...], Number] = {}
    for model, count in product(MODELS, COUNTS):
        plan = best_plan(constants, model, count, micro_batches or constants.micro_batches)
        found[model, str(count)] = OOM if plan is None else plan.grouping()
    return found


def trivial_groupings(constants: Constants) -> dict[tuple[str, ...], Number]:
    """Return the groupings of the rule 'fewest stages that fit, even groups'; earlier groups get one more device if needed."""
    found: dict[tuple[str, ...], Number] = {}
    for model, count in product(MODELS, COUNTS):
        costs_of = profile(constants, model, TECHNIQUE, nanos(constants, count))
        even = ([count // stages + (index < count % stages) for index in range(stages)] for stages in range(1, count + 1))
        fitting = (f"[{'-'.join(map(str, sizes))}]" for sizes in even if _fits(constants, costs_of, sizes, count))
        found[model, str(count)] = next(fitting, OOM)
    return found


def _fits(constants: Constants, costs_of: Profile, sizes: list[int], count: int) -> bool:
    """Return whether groups of these sizes have memory for all layers: each stage takes as many as fit."""
    start = 0
    for index, size in enumerate(sizes):
        samples = -(-count // size)
        live = in_flight(index, len(sizes), constants.micro_batches)
        stop = start
        while stop < costs_of.num_layers:
            need = rank_need(costs_of, 0, start, stop + 1, samples=samples, sequence_length=constants.sequence_length, in_flight=live)
            if need.total_bytes > constants.nano_bytes:
                break
            stop += 1
        start = stop
    return start == costs_of.num_layers


def score(found: Cells, paper: Cells, models: tuple[str, ...] = MODELS) -> int:
    """Return the number of groupings that equal the paper's."""
    return sum(found[labels] == value for labels, value in paper.items() if labels[0] in models)


def fig17(item: Item, settings: Settings) -> Result:
    """Plan the groupings."""
    constants, paper = load_constants(), printed(PAPER, "fig17")
    found, trivial = groupings(constants), trivial_groupings(constants)

    def scores(made: Cells) -> tuple[int, ...]:
        return tuple(score(made, paper, models) for models in (MODELS, MODELS[:2], MODELS[2:]))

    readings: list[tuple[Number, ...]] = []
    for micro_batches in (1, 2, 4, 8):
        made = groupings(constants, micro_batches)
        readings.append((micro_batches, score(made, paper), *(made["T5-Large", str(count)] for count in COUNTS)))
    total, small, _ = scores(found)
    return item.result(
        [item.cell(labels, value, found[labels], note=f"trivial rule: {trivial[labels]}") for labels, value in paper.items()],
        tables={
            "readings": readings,
            "sensitivity": item.sensitivity(constants, lambda changed: scores(groupings(changed)), scores(trivial)),
        },
        holds={"all": total >= 8, "small": small == 8},
        total=total,
        trivial=score(trivial, paper),
        small=small,
    )
