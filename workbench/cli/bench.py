"""`workbench bench`: what the workbench itself costs, and the methods beside what they are compared to."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from workbench.cli.output import Json, print_json, say
from workbench.core.catalogue import kit_file
from workbench.core.errors import ConfigError

BENCHES = {
    name: f"workbench.bench.{name}"
    for name in ["executor", "runtime", "pac_plus", "galaxy_plus", "p_rge", "p_rge_engine", "ringada", "confidant", "recovery", "kit"]
}
"""Each module has `bench(progress) -> dict`: what was measured, ready for JSON."""
CHOOSING = ("galaxy_plus", "p_rge", "ringada", "confidant", "recovery", "kit")
"""Benchmarks that can measure a part of what they have."""


def bench(
    name: Annotated[str, typer.Argument(help=f"Which: {', '.join(BENCHES)}, or all.")] = "all",
    only: Annotated[
        str,
        typer.Option(
            help="Of galaxy_plus: only these points, such as minilm,500 or bert-base,heterogeneous,latency; of p_rge: steps, copies, full,"
            " quantized, memory; of ringada: equal, unequal or bert-base, Mbit/s; of confidant: processors, schedule, partition;"
            " of recovery: methods, or kinds of faults; of kit: reach, files, start, epochs, faults."
        ),
    ] = "",
    soak: Annotated[int, typer.Option(help="Of recovery: instead, so many short runs with random faults.", min=0, max=100_000)] = 0,
    as_json: Json = False,
) -> None:
    """Measure the workbench itself, both sides of each comparison interleaved on this machine."""
    if name != "all" and name not in BENCHES:
        raise ConfigError(f"The benchmark '{name}' was asked for.", f"There are {', '.join(BENCHES)}.", "Name one of them, or all.")
    words = [word.strip() for word in only.split(",") if word.strip()]
    if words and name not in CHOOSING:
        raise ConfigError(
            f"Only the points '{only}' of {name} were asked for.",
            f"Only {' and '.join(CHOOSING)} have points to choose.",
            "Leave out --only.",
        )
    from workbench.cli.show import show_bench

    options: dict[str, dict[str, Any]] = {chosen: {"only": words} for chosen in CHOOSING}
    if soak and name != "recovery":
        raise ConfigError(f"A soak of {name} was asked for.", "Only recovery has one.", "Name it, or leave out --soak.")
    options["recovery"]["soak"] = soak
    names = tuple(one for one in BENCHES if one != "kit" or kit_file()) if name == "all" else (name,)
    results = {chosen: import_module(BENCHES[chosen]).bench(say, **options.get(chosen, {})) for chosen in names}
    if as_json:
        print_json(results)
    else:
        for chosen, result in results.items():
            show_bench(chosen, result)
