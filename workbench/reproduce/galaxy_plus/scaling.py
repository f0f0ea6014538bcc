"""Weak and strong scaling of one layer on RPi-M at 1000 Mbit/s (Galaxy+, section IV-E); what Fig. 14 and 15 share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from workbench.core.inference import InferencePlan, proportional_parts
from workbench.profiler.inference import stack_sizes
from workbench.reproduce.galaxy_plus.latency import sequence_s
from workbench.reproduce.galaxy_plus.printed import printed_s
from workbench.reproduce.galaxy_plus.systems import GALAXY, MEGATRON, OURS, SEQUENCE
from workbench.reproduce.galaxy_plus.testbed import MODELS, Constants, cluster, handling, profile

SCALED = ("GPT2-L", "OPT-L")
FOUR = (1, 2, 3, 4)
EVEN = (2, 4)
"""Devices, of the paper's, by which the heads divide: with 3 one has a head more than the others, which SP does not mind."""
MANY = (1, 2, 3, 4, 8, 16, 32, 64)
SCHEDULED = "Galaxy+, as this workbench schedules it"
LAYERS = 24
"""The layer is repeated, as the paper repeats it: what embedding and head take does not count."""


def layer_plan(model: str, system: str, count: int, length: int) -> InferencePlan:
    """Return a method's plan of one layer, repeated, on equal devices; memory does not limit it ('we load one single layer')."""
    [sizes] = stack_sizes(MODELS[model])
    shape, ranks = sizes.shape, tuple(range(count))
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
    """Return the seconds of one layer.  system: of systems.py, or SCHEDULED."""
    plan = layer_plan(model, OURS if system == SCHEDULED else system, count, length)
    collectives = system in (MEGATRON, SEQUENCE)
    on = cluster(constants, "Env. A", constants.scaling_bandwidth_mbit_per_s, count=count, collectives=collectives)
    costs = profile(constants, model, "Env. A", count, LAYERS)
    if system == SCHEDULED:
        return sequence_s(plan, costs, on, (length,)) / LAYERS
    return printed_s(plan, costs, on, (length,), handling(constants, on)) / LAYERS


def weak(constants: Constants, model: str, system: str, counts: tuple[int, ...]) -> dict[int, float]:
    """Return FLOP/s over one device's by the number of devices, each with as many tokens: the devices' number would be linear."""
    [sizes] = stack_sizes(MODELS[model])

    def rate(count: int) -> float:
        length = constants.weak_tokens * count
        return sizes.layer_flops(length) / layer_s(constants, model, system, count, length)

    return {count: rate(count) / rate(1) for count in counts}


def strong(constants: Constants, model: str, system: str, counts: tuple[int, ...]) -> dict[int, float]:
    """Return the speed-up over one device by the number of devices, at one length of the sequence."""
    alone = layer_s(constants, model, system, 1, constants.strong_tokens)
    return {count: alone / layer_s(constants, model, system, count, constants.strong_tokens) for count in counts}


def series(found: Mapping[tuple[str, str], Mapping[int, float]]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return lines for a figure."""
    return {f"{model}, {system}": tuple((float(count), value) for count, value in made.items()) for (model, system), made in found.items()}
