"""`workbench bench`: the benchmarks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from workbench.cli.output import Json, print_json, print_table, print_text, say
from workbench.core.catalogue import kit_file
from workbench.core.errors import ConfigError

NAMES = [
    "executor",
    "runtime",
    "pac_plus",
    "galaxy_plus",
    "p_rge",
    "p_rge_engine",
    "ringada",
    "confidant",
    "recovery",
    "serving",
    "serve",
    "text",
    "live",
    "advise",
    "memory",
    "planning",
    "classroom",
    "heat",
    "kit",
]
BENCHES = {name: f"workbench_studies.bench.{name}" for name in NAMES}
"""Each module has `bench(progress) -> dict`: what was measured, ready for JSON."""
CHOOSING = {
    "executor": "switch, slow, wifi, unequal",
    "galaxy_plus": "minilm, bert-base, homogeneous, heterogeneous, 125, 250, 500, 1000, latency, overlap, scaling, "
    "planner",
    "p_rge": "steps, copies, full, quantized, memory",
    "ringada": "equal, 1000, 125, unequal, bert-base",
    "confidant": "processors, schedule, partition, phones, frameworks",
    "recovery": "pac_plus, cached, fine_tuning, lora, confidant, idle, ringada, p_rge, kill, freeze, leave, slow, "
    "return",
    "advise": ", ".join(map(str, range(20))),
    "classroom": "1, 2, 3, 4",
    "heat": "2, 4, 0.8, 0.5, 0.2",
    "kit": "reach, files, start, epochs, faults",
    "text": "devices, process",
}
"""Benchmarks that can measure a part of what they have, and the words that choose it: their modules' WORDS."""
SOAKS = ("recovery", "serving", "serve")
"""Benchmarks with random faults."""


def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCHES)}, or all.")] = "all",
    only: Annotated[
        str,
        typer.Option(
            help="Run only the parts with these words, such as minilm,500. "
            + " ".join(f"For {chosen}: {words}." for chosen, words in CHOOSING.items())
        ),
    ] = "",
    soak: Annotated[
        int,
        typer.Option(
            help="Test with random faults instead.  For recovery: this many short runs.  For serving: this many "
            "requests.  For serve: this many texts, a third at each rate of faults.",
            min=0,
            max=10_000_000,
        ),
    ] = 0,
    minutes: Annotated[
        float,
        typer.Option(
            help="For advise: start nothing new after this many minutes. The same command continues later.", min=0
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Measure the workbench itself, both sides of each comparison interleaved on this machine."""
    if name != "all" and name not in BENCHES:
        raise ConfigError(
            f"The benchmark '{name}' was asked for.", f"There are {', '.join(BENCHES)}.", "Name one of them, or all."
        )
    words = [word.strip() for word in only.split(",") if word.strip()]
    if words and name not in CHOOSING:
        raise ConfigError(
            f"Only the points '{only}' of {name} were asked for.",
            f"Only {' and '.join(CHOOSING)} have points to choose.",
            "Leave out --only.",
        )
    if minutes and name != "advise":
        raise ConfigError(
            f"{minutes:g} minutes of {name} were asked for.", "Only advise can go on later.", "Leave out --minutes."
        )
    options: dict[str, dict[str, Any]] = {chosen: {"only": words} for chosen in CHOOSING}
    options["advise"]["minutes"] = minutes
    if soak and name not in SOAKS:
        raise ConfigError(
            f"A soak of {name} was asked for.",
            f"Only {' and '.join(SOAKS)} have one.",
            "Name one, or leave out --soak.",
        )
    for chosen in SOAKS:
        options.setdefault(chosen, {})["soak"] = soak
    names = (
        tuple(bench_name for bench_name in BENCHES if bench_name != "kit" or kit_file()) if name == "all" else (name,)
    )
    results = {chosen: import_module(BENCHES[chosen]).bench(say, **options.get(chosen, {})) for chosen in names}
    if as_json:
        print_json(results)
    else:
        for chosen, result in results.items():
            show_bench(chosen, result)


def show_bench(name: str, result: Mapping[str, Any]) -> None:
    """Print a benchmark: its values, and its lists of points as tables with one row each."""
    print_text(f"Benchmark {name}")
    tables = {
        key: value for key, value in result.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, value in result.items():
        if key not in tables:
            print_text(f"  {key.replace('_', ' ')}: {_figure(value)}")
    for title, points in tables.items():
        keys = [
            key for key, value in points[0].items() if not isinstance(value, dict | list | tuple)
        ]  # the rest is for --json
        columns = tuple(key.replace("_", " ") for key in keys)
        rows = ([_figure(point.get(key, "")) for key in keys] for point in points)
        print_table(title.capitalize(), columns, rows)


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
