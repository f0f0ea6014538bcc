"""Table V: HMP configurations and speed-ups over the baselines in Env. A and B at 500 Mbit/s, computed (Galaxy+,
section IV-B).

The contradictions: where the table and the text contradict arithmetic or each other (Eq. 8-9, Tables I and V, section
IV-C).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.costs import stack_sizes
from workbench.methods.galaxy_plus.planners import algorithm_1
from workbench.plots.export import Captioned
from workbench_studies.papers.drawing import draw, paired_bars
from workbench_studies.papers.galaxy_plus.scaling import plans, scheduled
from workbench_studies.papers.galaxy_plus.systems import BASELINES, OURS, run_system, speed_up
from workbench_studies.papers.galaxy_plus.testbed import (
    ENVIRONMENTS,
    GB,
    GIB,
    MODELS,
    TABLE_V,
    Constants,
    cluster,
    load_constants,
    problem,
    profile,
)
from workbench_studies.papers.items import Item, Rows, columns_in_order, median_off
from workbench_studies.papers.result import OOM, Cells, Comparison, Number, Result, Row

CONFIGURATION = "HMP configuration"
SPEED_UP = {system: f"speed-up over {system}" for system in BASELINES}
QUANTITIES = (CONFIGURATION, *SPEED_UP.values())
NEAR_LAYERS = 2
SHARES = (0.0, 0.25, 0.375, 0.5, 1.0)
HANDLED = (1.6, 1.0, 0.6, 0.2, 0.0)
"""Shares of the fitted handling of a byte that are tried."""


def cells(constants: Constants) -> Cells:
    """Return our [P,Q] and speed-ups, or OOM, by (model, environment, quantity)."""
    values: Cells = {}
    for model, environment in product(TABLE_V, ENVIRONMENTS):
        values[model, environment, CONFIGURATION] = run_system(constants, model, environment, OURS).configuration
        for system in BASELINES:
            value = speed_up(constants, model, environment, system)
            values[model, environment, SPEED_UP[system]] = OOM if value is None else value
    return values


def configurations_near(ours: Cells, paper: Cells, environments: tuple[str, ...] = ENVIRONMENTS) -> int:
    """Return the number of cells whose layers of scheme 2 are within NEAR_LAYERS of the paper's."""
    keys = [labels for labels in paper if labels[2] == CONFIGURATION and labels[1] in environments]
    return sum(abs(_second(ours[labels]) - _second(paper[labels])) <= NEAR_LAYERS for labels in keys)


def median_deviation(ours: Cells, paper: Cells, environments: tuple[str, ...] = ENVIRONMENTS) -> float:
    """Return the median of |ours / paper - 1| in per cent over the speed-ups that are numbers in both."""
    return median_off((ours.get(labels), value) for labels, value in paper.items() if labels[1] in environments)


def verdicts(ours: Cells, paper: Cells) -> tuple[int, int]:
    """Return the number of speed-ups that are OOM or not as in the paper, and the number of all."""
    keys = [labels for labels in paper if labels[2] in SPEED_UP.values()]
    return sum((ours[labels] == OOM) == (paper[labels] == OOM) for labels in keys), len(keys)


def in_order(ours: Cells, paper: Cells) -> tuple[int, int, list[str]]:
    """Return the rows (model and environment) whose methods are in the paper's order (see columns_in_order).  Galaxy+
    itself counts as 1.
    """
    rows = {
        f"{model} in {environment}": [
            (OURS, 1.0, 1.0),
            *(
                (system, paper[model, environment, label], ours[model, environment, label])
                for system, label in SPEED_UP.items()
            ),
        ]
        for model, environment in product(TABLE_V, ENVIRONMENTS)
    }
    return columns_in_order(rows)


def table5(item: Item) -> Result:
    """Compute the time of every method's plan."""
    constants = load_constants()
    paper = {labels: value for labels, value in item.printed.items() if labels[2] in QUANTITIES}
    ours = cells(constants)
    comparisons = []
    for labels, value in paper.items():
        far = labels[2] == CONFIGURATION and abs(_second(value) - _second(ours[labels])) > NEAR_LAYERS
        note = "not to be had by arithmetic, or not by Algorithm 1: see the sums" if far else ""
        comparisons.append(item.cell(labels, value, ours[labels], note=note))

    def score(computed: Cells, printed_cells: Cells) -> Row:
        medians = (median_deviation(computed, printed_cells, (environment,)) for environment in ENVIRONMENTS)
        return (
            configurations_near(computed, paper),
            *medians,
            verdicts(computed, paper)[0],
            in_order(computed, paper)[0],
        )

    # Bert-L's printed cells of the same environment for every model, all layers scheme 2.
    copied: Cells = {}
    for labels, value in paper.items():
        layers = sum(map(int, str(value).strip("[]").split(","))) if labels[2] == CONFIGURATION else 0
        copied[labels] = f"[0,{layers}]" if layers else paper["Bert-L", labels[1], labels[2]]
    others = {labels: value for labels, value in paper.items() if labels[0] != "Bert-L"}
    median_a, median_b = (median_deviation(ours, paper, (environment,)) for environment in ENVIRONMENTS)
    near, in_a = configurations_near(ours, paper), configurations_near(ours, paper, ENVIRONMENTS[:1])
    agreeing, num_verdicts = verdicts(ours, paper)
    good, count, wrong = in_order(ours, paper)
    fitted = _fitted(constants, paper)
    return item.result(
        comparisons,
        tables={
            "plans": plans(constants),
            "scheduled": scheduled(constants),
            "sensitivity": item.sensitivity(
                constants, lambda changed: score(cells(changed), paper), score(copied, others)
            ),
            "fitted": fitted,
            **contradictions(constants, paper),
        },
        holds={"verdicts": agreeing == num_verdicts},
        in_a=in_a,
        near=near,
        agreeing=agreeing,
        asked=num_verdicts,
        plain_a=fitted[-1][1],
        plain_b=fitted[-1][2],
        trivial_b=median_deviation(copied, others, ENVIRONMENTS[1:]),
        median_a=median_a,
        median_b=median_b,
        good=good,
        count=count,
        swapped=f": {'; '.join(wrong)}" if wrong else "",
    )


def _fitted(constants: Constants, paper: Cells) -> list[tuple[float, ...]]:
    """Return what the constant that was fitted on Env. A does to both environments: with several values, 0 the last."""
    rows = []
    for share in HANDLED:
        ours = cells(replace(constants, handling_s_per_byte=share * constants.handling_s_per_byte))
        medians = (median_deviation(ours, paper, (environment,)) for environment in ENVIRONMENTS)
        rows.append((1e9 * share * constants.handling_s_per_byte, *medians, in_order(ours, paper)[0]))
    return rows


def _second(value: Number) -> int:
    return int(value.strip("[]").split(",")[1]) if isinstance(value, str) and value.startswith("[") else -(10**6)


def draw_table5(item: Item, result: Result) -> list[Captioned]:
    """Return the speed-ups, a figure for each environment, and the layers of scheme 2."""
    *charts, chart = item.figures
    layers = [
        Comparison(
            labels=(comparison.labels[1], comparison.labels[0]),
            paper=_second(comparison.paper),
            ours=_second(comparison.ours),
        )
        for comparison in sorted(result.comparisons, key=lambda comparison: comparison.labels[1])
        if comparison.labels[2] == CONFIGURATION
    ]
    return [*draw(charts, result), Captioned(chart.name, chart.caption, paired_bars(result, layers, chart))]


def contradictions(constants: Constants, paper: Cells) -> dict[str, Rows]:
    """Return the rows of each contradiction's table."""
    return {
        "weights": _weights(constants, paper),
        "accounting": _accounting(constants, paper),
        "balance": _balance(constants, paper),
    }


def least_bytes(model: str, second: int) -> tuple[float, float]:
    """Return each device's minimum memory with `second` layers of scheme 2, and the weights of all four devices
    together (Eq. 8).

    The layers of the first stack are taken first, as in Algorithm 1.
    """
    each = total = 0.0
    remaining = second
    for shape in stack_sizes(MODELS[model]):
        full = min(remaining, shape.num_layers)
        remaining -= full
        each += full * shape.feed_forward_bytes
        total += shape.num_layers * (shape.attention_bytes + shape.feed_forward_bytes)
    return each, total + 3 * each


def _weights(constants: Constants, paper: Cells) -> Rows:
    rows: list[Row] = []
    for environment in ENVIRONMENTS:
        budgets = [device.memory_bytes for device in cluster(constants, environment).devices]
        for model in TABLE_V:
            configuration = str(paper[model, environment, CONFIGURATION])
            second = _second(configuration)
            each, total = least_bytes(model, second)
            verdict = "possible"
            if each >= min(budgets):
                verdict = "impossible: the smallest device cannot hold the full MLPs alone"
            elif total > sum(budgets):
                verdict = "impossible: all devices together are too small"
            elif environment == ENVIRONMENTS[1] and not _fits(constants, model, environment, second):
                verdict = "possible, but not with heads and columns in proportion to speed (Algorithm 1)"
            rows.append(
                (
                    model,
                    environment,
                    configuration,
                    each / GB,
                    min(budgets) / GB,
                    total / GB,
                    sum(budgets) / GB,
                    verdict,
                )
            )
    return rows


def _fits(constants: Constants, model: str, environment: str, second: int) -> bool:
    layers = _second_layers(constants, model, cluster(constants, environment), environment)
    return isinstance(layers, float) and layers >= second


def _second_layers(constants: Constants, model: str, on: Cluster, environment: str) -> Number:
    costs = profile(constants, model, environment)
    try:
        plan = algorithm_1(problem(constants, costs, on, constants.length(model)))
    except PlanError:
        return OOM
    return float(plan.configuration[1])


def _accounting(constants: Constants, paper: Cells) -> Rows:
    """Q by Algorithm 1 under each memory accounting in Env. A, where only the accounting determines it."""
    rows: list[Row] = []
    on = cluster(constants, ENVIRONMENTS[0])
    larger = on.with_each(lambda device: replace(device, memory_bytes=round(device.memory_bytes / GB * GIB)))
    for name, budgets, shares in (("10^9 bytes", on, SHARES), ("2^30 bytes", larger, (constants.embedding_share,))):
        for share in shares:
            changed = replace(constants, embedding_share=share)
            layers = [_second_layers(changed, model, budgets, ENVIRONMENTS[0]) for model in TABLE_V]
            rows.append((f"GB = {name}, {share:g} of the embedding on each device", *layers))
    rows.append(
        ("the paper", *(float(_second(str(paper[model, ENVIRONMENTS[0], CONFIGURATION]))) for model in TABLE_V))
    )
    return rows


def _balance(constants: Constants, paper: Cells) -> Rows:
    """EdgeShard's maximum disadvantage in Env. B if Galaxy+ were perfectly balanced with a free network."""
    rows: list[Row] = []
    devices = cluster(constants, ENVIRONMENTS[1]).devices
    speeds = sorted((device.flops_per_s for device in devices), reverse=True)
    for model in TABLE_V:
        printed_factor = paper[model, ENVIRONMENTS[1], "speed-up over ES"]
        weights = least_bytes(model, 0)[1]
        remaining_bytes = weights
        seconds = 0.0  # of the layers, assigned to the fastest devices first, in units of the model's FLOPs
        for device in sorted(devices, key=lambda each: -each.flops_per_s):
            part_bytes = min(remaining_bytes, float(device.memory_bytes))
            seconds += part_bytes / weights / device.flops_per_s
            remaining_bytes -= part_bytes
        most = seconds * sum(speeds)
        rows.append(
            (
                model,
                weights / GB,
                printed_factor,
                most,
                printed_factor > most if isinstance(printed_factor, float) else None,
            )
        )
    return [(*row[:-1], "yes" if row[-1] else "no") for row in rows]
