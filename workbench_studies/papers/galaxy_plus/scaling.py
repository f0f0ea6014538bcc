"""Weak (Fig. 14) and strong (Fig. 15) scaling of one layer on RPi-M at 1000 Mbit/s, computed (Galaxy+, section IV-E).

Also the basis of Table V: plans, and the same plans under our schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.methods.galaxy_plus.costs import layer_flops, stack_sizes
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.planners import Problem
from workbench_studies.papers.galaxy_plus.systems import (
    BASELINES,
    GALAXY,
    MEGATRON,
    OURS,
    SEQUENCE,
    printed_s,
    run_system,
)
from workbench_studies.papers.galaxy_plus.testbed import (
    ENVIRONMENTS,
    MODELS,
    TABLE_V,
    Constants,
    cluster,
    handling,
    load_constants,
    profile,
)
from workbench_studies.papers.items import Item, Rows
from workbench_studies.papers.result import OOM, Number, Result, Row

SCALED = ("GPT2-L", "OPT-L")
PRINTED = (2, 3, 4)
"""The paper's numbers of devices.  3 do not divide the heads: one device has one more, which does not affect SP."""
MANY = (1, 2, 3, 4, 8, 16, 32, 64)
SCHEDULED = "Galaxy+, as this workbench schedules it"
SYSTEMS = (OURS, SCHEDULED, GALAXY, MEGATRON, SEQUENCE)
NO_MESSAGE_S = 0.0
"""In the simulator: the testbed's links have the cost of a message in their latency."""
LAYERS = 24
"""The layer is repeated, as in the paper; embedding and head do not count."""
Seconds = Mapping[tuple[str, str], Mapping[int, float]]


def layer_plan(model: str, system: str, count: int, length: int) -> InferencePlan:
    """Return a method's plan of one layer, repeated, on equal devices; memory does not limit it ('we load one single
    layer').
    """
    [shape] = stack_sizes(MODELS[model])
    ranks = tuple(range(count))
    equal = (1.0,) * count
    units, columns = proportional_parts(shape.num_units, equal), proportional_parts(shape.columns, equal)
    if count == 1:
        return InferencePlan(method="local", paradigm="pipeline", ranks=ranks, layers=(LAYERS,), length=length)
    if system == SEQUENCE:
        return InferencePlan(method=system, paradigm="sequence", ranks=ranks, shares=equal, length=length)
    if system == MEGATRON:
        return InferencePlan(method=system, paradigm="tensor", ranks=ranks, units=units, columns=columns, length=length)
    return InferencePlan(
        method=system,
        paradigm="hybrid",
        ranks=ranks,
        units=units,
        columns=columns,
        shares=equal,
        schemes=(1 if system == GALAXY else 2,) * LAYERS,
        overlap=True,
        length=length,
    )


@lru_cache(maxsize=4096)
def layer_s(constants: Constants, model: str, system: str, count: int, length: int) -> float:
    """Return the seconds of one layer.  system: a name in systems.py, or SCHEDULED."""
    plan = layer_plan(model, OURS if system == SCHEDULED else system, count, length)
    collectives = system in (MEGATRON, SEQUENCE)
    on = cluster(constants, "Env. A", constants.scaling_bandwidth_mbit_per_s, count=count, collectives=collectives)
    costs = profile(constants, model, "Env. A", count, LAYERS)
    if system == SCHEDULED:
        return SequencePrice(Problem(costs, on, sequence_length=length), NO_MESSAGE_S)(plan) / LAYERS
    return printed_s(plan, costs, on, (length,), handling(constants, on)) / LAYERS


def weak(constants: Constants, model: str, system: str, counts: tuple[int, ...]) -> dict[int, float]:
    """Return FLOP/s relative to one device, by the number of devices, with the same tokens each: linear would be the
    number of devices.
    """
    [sizes] = stack_sizes(MODELS[model])

    def rate(count: int) -> float:
        length = constants.weak_tokens * count
        return layer_flops(sizes, length) / layer_s(constants, model, system, count, length)

    return {count: rate(count) / rate(1) for count in counts}


def strong(constants: Constants, model: str, system: str, counts: tuple[int, ...]) -> dict[int, float]:
    """Return the speed-up over one device by the number of devices, at one length of the sequence."""
    alone = layer_s(constants, model, system, 1, constants.strong_tokens)
    return {count: alone / layer_s(constants, model, system, count, constants.strong_tokens) for count in counts}


def _result(
    item: Item, scaled: Seconds, ours: Callable[[float], float], trivial: float, tables: dict[str, Rows], **texts: Any
) -> Result:
    """Return a figure's result: ours (value with 4 devices) for each method next to the paper's for Galaxy+."""
    paper = {model: value for (model, _), value in item.printed.items()}
    way = weak if item.name == "fig14" else strong
    behind = [
        f"{model} on {count} devices: {scaled[model, OURS][count]:.2f}, {system} {scaled[model, system][count]:.2f}"
        for model, system, count in product(SCALED, (MEGATRON, SEQUENCE), PRINTED)
        if scaled[model, OURS][count] < scaled[model, system][count]
    ]
    texts["holds"] = {"ahead": not behind} | texts.get("holds", {})
    texts["behind"] = "; ".join(behind) or "with 2, 3 and 4 devices"
    return item.result(
        [
            item.cell((model, system), paper[model] if system == OURS else None, ours(scaled[model, system][4]))
            for model, system in product(SCALED, SYSTEMS)
        ],
        tables=tables
        | {
            "sensitivity": item.sensitivity(
                load_constants(),
                lambda changed: [ours(way(changed, model, OURS, (1, 4))[4]) for model in SCALED],
                (trivial, trivial),
            )
        },
        columns={name: [str(count) for count in MANY] for name in tables},
        series={f"{model}, linear": ((1.0, 1.0), (64.0, 64.0)) for model in SCALED}
        | {
            f"{model}, {system.replace(',', '')}": tuple((float(count), value) for count, value in values.items())
            for (model, system), values in scaled.items()
        },
        **texts,
    )


def fig14(item: Item) -> Result:
    """Compute weak scaling, 96 tokens for each device."""
    constants = load_constants()
    scaled = {(model, system): weak(constants, model, system, MANY) for model, system in product(SCALED, SYSTEMS)}
    rows = [(*labels, *(100 * value / count for count, value in values.items())) for labels, values in scaled.items()]
    four = {model: scaled[model, OURS][4] for model in SCALED}
    return _result(
        item,
        scaled,
        lambda value: 100 * value / 4,
        100.0,
        {"share": rows},
        holds={"larger": four["OPT-L"] > four["GPT2-L"]},
        shares=", ".join(f"{model} {value / 4:.0%}" for model, value in four.items()),
        percent=", ".join(f"{model} {100 * value / 4:.1f} %" for model, value in four.items()),
    )


def fig15(item: Item) -> Result:
    """Compute strong scaling, 384 tokens in all."""
    constants = load_constants()
    scaled = {(model, system): strong(constants, model, system, MANY) for model, system in product(SCALED, SYSTEMS)}
    rows = []
    for (model, system), values in scaled.items():
        alone = 1e3 * layer_s(constants, model, system, 1, constants.strong_tokens)
        rows.append((model, system, *(alone / value for value in values.values())))
    best = {key: max(values, key=values.__getitem__) for key, values in scaled.items()}
    four = {model: scaled[model, OURS][4] for model in SCALED}
    return _result(
        item,
        scaled,
        lambda value: value,
        4.0,
        {"milliseconds": rows},
        fastest=", ".join(f"{model} by {system}: {count}" for (model, system), count in best.items()),
        factors=", ".join(f"{model} {value:.2f}" for model, value in four.items()),
    )


def plans(constants: Constants) -> Rows:
    """Return every method's partition, devices and seconds, or the missing memory."""
    rows: list[Row] = []
    for environment, model, system in product(ENVIRONMENTS, TABLE_V, (OURS, *BASELINES[::-1])):
        system_run = run_system(constants, model, environment, system)
        if system_run.plan is None:
            rows.append((model, environment, system, OOM, system_run.reason, None))
            continue
        plan, devices = system_run.plan, cluster(constants, environment).devices
        parts = f"layers {plan.layers}" if plan.layers else f"heads {plan.units}" if plan.units else "all heads"
        rows.append(
            (
                model,
                environment,
                system,
                parts,
                ", ".join(devices[rank].name for rank in plan.ranks),
                system_run.seconds,
            )
        )
    return rows


def scheduled(constants: Constants) -> Rows:
    """Return the seconds of the same plans under this workbench's schedules: no waiting, one way round the ring and
    both ways.
    """
    rows = []
    for environment, model in product(ENVIRONMENTS, TABLE_V):
        costs = profile(constants, model, environment)
        row: list[Number] = [model, environment]
        for system in (OURS, GALAXY, MEGATRON):
            system_run, columns = run_system(constants, model, environment, system), 1 + (system == OURS)
            on = cluster(constants, environment, collectives=system == MEGATRON)
            sequence_problem = Problem(
                costs, on, sequence_length=constants.length(model), decoder_length=constants.decoder_tokens
            )
            priced = SequencePrice(sequence_problem, NO_MESSAGE_S)
            ways = [] if system_run.plan is None else [system_run.plan, replace(system_run.plan, both_ways=True)]
            row.append(OOM if system_run.seconds is None else system_run.seconds)
            row += [priced(way) for way in ways[:columns]] or [OOM] * columns
        rows.append(row)
    return rows
