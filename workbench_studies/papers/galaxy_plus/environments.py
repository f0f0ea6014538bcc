"""Galaxy+ against the baselines at 125 to 1000 Mbit/s (Fig. 12), on Jetson Nanos and on GTX 1080 Ti (Fig. 13; Galaxy+,
IV-C, IV-D).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product

from workbench_studies.papers.galaxy_plus.systems import (
    BASELINES,
    EDGESHARD,
    GALAXY,
    MEGATRON,
    OURS,
    SEQUENCE,
    run_system,
    speed_up,
)
from workbench_studies.papers.galaxy_plus.testbed import (
    ENVIRONMENTS,
    GB,
    MODELS,
    PAPER,
    TABLE_V,
    Constants,
    cluster,
    load_constants,
)
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import OOM, Result, Row, printed

MBITS = (125, 250, 500, 750, 1000)
OTHERS = (MEGATRON, SEQUENCE, EDGESHARD)
WITHIN = ("DistilBert", "ViT-Huge")
"""The models whose printed speed-ups at 500 Mbit/s are in the range that the text gives for Env. A: the figure cannot
show the others'."""
NANOS, CARDS = "Env. C", "Env. D"
Cells = Mapping[tuple[str, str, str, int], float | None]


@lru_cache(maxsize=64)
def speed_ups(constants: Constants) -> Cells:
    """Return the speed-up of Galaxy+, None where a method runs out of memory, by (model, environment, baseline,
    Mbit/s).
    """
    return {
        (model, environment, system, mbits): speed_up(constants, model, environment, system, mbits)
        for environment, model, mbits, system in product(ENVIRONMENTS, TABLE_V, MBITS, BASELINES)
    }


def bounds(
    cells: Cells, environment: str, systems: tuple[str, ...], models: tuple[str, ...] = TABLE_V
) -> tuple[float, float]:
    """Return the minimum and the maximum speed-up over some baselines, over all bandwidths.  environment: 'any' for
    both.
    """
    chosen = [
        value
        for (model, where, system, _), value in cells.items()
        if value is not None and environment in (where, "any") and system in systems and model in models
    ]
    return min(chosen), max(chosen)


def fig12(item: Item) -> Result:
    """Compute every method at every bandwidth."""
    constants = load_constants()
    cells, (a, b) = speed_ups(constants), ENVIRONMENTS
    comparisons = []
    for (environment, against, bound), value in item.printed.items():
        systems = (GALAXY,) if against == GALAXY else OTHERS
        for name, models in (("models that fit the text", WITHIN), ("all models", TABLE_V)):
            value_of_bound = bounds(cells, environment, systems, models)[bound == "most"]
            comparisons.append(item.cell((environment, against, bound, name), value, value_of_bound))
    behind = [key for key, value in cells.items() if value is not None and value < 1]

    def megatron(model: str, mbits: int) -> float:
        return cells[model, a, MEGATRON, mbits] or 0.0

    slow = [model for model in TABLE_V if megatron(model, 125) > (cells[model, a, EDGESHARD, 125] or 0.0)]
    fast = max(megatron(model, 1000) for model in TABLE_V)
    over_galaxy = {
        mbits: max(value for key, value in cells.items() if key[2] == GALAXY and key[3] == mbits and value)
        for mbits in MBITS
    }

    def score(changed: Constants) -> Row:
        ours = speed_ups(changed)
        return (*bounds(ours, a, OTHERS), *bounds(ours, b, OTHERS), bounds(ours, "any", (GALAXY,))[1])

    # Table V's printed values, as if independent of bandwidth; over Galaxy its largest.
    table = printed(PAPER, "table5")
    printed_factors = {
        key: table[key[0], key[1], f"speed-up over {key[2]}"] for key in product(TABLE_V, ENVIRONMENTS, BASELINES)
    }
    flat = {(*key, 0): value if isinstance(value, float) else None for key, value in printed_factors.items()}
    rows: list[Row] = []
    for environment, model, system in product(ENVIRONMENTS, TABLE_V, BASELINES):
        values = [cells[model, environment, system, mbits] for mbits in MBITS]
        rows.append((model, environment, system, *(OOM if value is None else value for value in values)))
    trivial = (*bounds(flat, a, OTHERS), *bounds(flat, b, OTHERS), bounds(flat, "any", (GALAXY,))[1])
    return item.result(
        comparisons,
        tables={"all": rows, "sensitivity": item.sensitivity(constants, score, trivial)},
        holds={
            "ahead": not behind,
            "slow": len(slow) >= 1,
            "lowest": over_galaxy[125] == max(over_galaxy.values()) > over_galaxy[1000],
        },
        series={
            f"{model}, {environment}, {system}": tuple(
                (float(mbits), value)
                for mbits in MBITS
                if (value := cells[model, environment, system, mbits]) is not None
            )
            for environment, model, system in product(ENVIRONMENTS, TABLE_V, BASELINES)
        },
        behind="; ".join(map(str, behind)) or "everywhere",
        at_125=_collective_percent(constants, 125),
        at_500=_collective_percent(constants, 500),
        slow=", ".join(slow) or "no model",
        fast=fast,
        over_galaxy=", ".join(f"{mbits} Mbit/s: {value:.2f}" for mbits, value in over_galaxy.items()),
    )


def _collective_percent(constants: Constants, mbit_per_s: int) -> float:
    """Return the share of a nominal bandwidth that a collective reaches in Env. A."""
    reached = cluster(constants, ENVIRONMENTS[0], mbit_per_s, collectives=True).devices[0].link.mbit_per_s
    return 100 * reached / mbit_per_s


def factors(constants: Constants, environment: str) -> dict[tuple[str, str], float]:
    """Return a method's seconds over Galaxy+'s, by (baseline, model), if neither runs out of memory."""
    return {
        (system, model): value
        for system, model in product(BASELINES, MODELS)
        if (value := speed_up(constants, model, environment, system)) is not None
    }


def most(constants: Constants, environment: str) -> tuple[float, str, str]:
    """Return the largest speed-up over a baseline in an environment, the model and the baseline."""
    return max((value, model, system) for (system, model), value in factors(constants, environment).items())


def fig13(item: Item) -> Result:
    """Compute every method on four Nanos and on four cards."""
    constants, paper = load_constants(), item.printed
    factors_of = {environment: factors(constants, environment) for environment in (NANOS, CARDS)}
    largest = {environment: most(constants, environment) for environment in factors_of}
    comparisons = [
        item.cell((environment, "most"), paper[environment, "most"], value, note=f"{model} over {system}")
        for environment, (value, model, system) in largest.items()
    ]
    rows: list[Row] = []
    for environment, model in product(factors_of, MODELS):
        ours = run_system(constants, model, environment, OURS)
        milliseconds = OOM if ours.seconds is None else 1e3 * ours.seconds
        values = (factors_of[environment].get((system, model), OOM) for system in BASELINES)
        rows.append((model, environment, ours.configuration, milliseconds, *values))
    behind = {
        environment: {
            (model, system): value
            for model in MODELS
            for system in BASELINES
            if (value := each.get((system, model), 1)) < 1
        }
        for environment, each in factors_of.items()
    }
    words = {
        environment: "; ".join(f"{model} against {system} {value:.2f}" for (model, system), value in each.items())
        or "never"
        for environment, each in behind.items()
    }

    def score(changed: Constants) -> Row:
        return most(changed, NANOS)[0], most(changed, CARDS)[0]

    nanos, cards = (cluster(constants, environment).devices[0].memory_bytes / GB for environment in factors_of)
    return item.result(
        comparisons,
        tables={"factors": rows, "sensitivity": item.sensitivity(constants, score, (4.0, 4.0))},
        holds={
            "nanos": not behind[NANOS],
            "cards": not behind[CARDS],
            "gain": largest[CARDS][0] > largest[NANOS][0],
        },
        behind_nanos=words[NANOS],
        behind_cards=words[CARDS],
        largest=", ".join(f"{environment}: {value:.2f}" for environment, (value, _, _) in largest.items()),
        nanos=nanos,
        cards=cards,
    )
