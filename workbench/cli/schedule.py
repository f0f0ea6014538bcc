"""`workbench schedule`: a published schedule, or one from a file, simulated with costs of its kinds of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.job import parse_options
from workbench.cli.output import Json, print_json, print_table, print_text
from workbench.core.cluster import MEGABIT_BYTES, Link
from workbench.core.errors import ConfigError
from workbench.core.program import Program
from workbench.core.ranges import range_of, require_range
from workbench.core.schedule import COLLECTIVES, COMMUNICATION, Op, Schedule
from workbench.core.serial import read_text, text_lines, user_path
from workbench.core.timeline import Timeline

FORMS = "Text of a Program or a Schedule, or torch's pipeline CSV."


def schedule(
    source: Annotated[
        str, typer.Argument(help="Name of a published schedule, or a file. " + FORMS, show_default="list the names")
    ] = "",
    ranks: Annotated[
        int | None, typer.Option(help="Number of devices of a published schedule.", show_default="4")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Number of micro-batches of a published schedule.", show_default="its own")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="SIZE=NUMBER", help="Another size of a published schedule; may be repeated."),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            "--cost",
            metavar="KIND=SECONDS",
            help="Time of an operation; SEND: latency of a transfer.",
            show_default="F=1, B=2",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="VALUE=BYTES", help="Size of a value: act, grad, ctx, ...", show_default="0"),
    ] = None,
    mbits: Annotated[
        float | None, typer.Option("--mbits", help="Rate of the links.", show_default="transfers are free")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Print the order of operations of every rank.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the Program as text: operations, seconds, bytes.")
    ] = None,
    draw: Annotated[Path | None, typer.Option("--draw", help="Write the Gantt chart here (HTML).")] = None,
    as_json: Json = False,
) -> None:
    """Print and simulate a pipeline schedule: its makespan, its bubble, and the memory of every device."""
    if not source:
        return _list(as_json)
    sizes = parse_options(option)
    sizes |= {
        name: number for name, number in (("ranks", ranks), ("micro_batches", micro_batches)) if number is not None
    }
    program = _program(source, sizes, _numbers("--cost", cost), _numbers("--size", size), mbits)
    from workbench.core.serial import write_text
    from workbench.simulator import live_counts, simulate

    timeline = simulate(program, title=f"Schedule {Path(source).name}")
    contexts = live_counts(program.schedule, timeline.spans, "ctx")
    if save is not None:
        write_text(save, program.to_text())
    if draw is not None:
        from workbench.plots import gantt
        from workbench.plots.export import write_html

        write_html(gantt(timeline), draw)
    facts = _summary(source, program, timeline, contexts)
    if as_json:
        print_json(facts)
        return
    if grid:
        kinds = frozenset(op.kind for ops in program.schedule.ops for op in ops) - (COMMUNICATION - COLLECTIVES)
        print_text(program.schedule.grid(kinds=kinds))
    print_table(
        f"{source}: {timeline.makespan_s:g} s in all, {timeline.bubble_fraction:.1%} of it idle (simulated)",
        ("device", "operations", "busy s", "idle", "contexts", "peak MB", "sent MB"),
        (
            (
                row["device"],
                row["operations"],
                f"{row['busy_s']:.4g}",
                f"{row['idle_share']:.1%}",
                row["contexts"],
                f"{row['peak_bytes'] / 1e6:.6g}",
                f"{row['bytes_sent'] / 1e6:.6g}",
            )
            for row in facts["ranks"]
        ),
    )


def _list(as_json: bool) -> None:
    from workbench.schedules.published import published_schedules

    schedules = published_schedules()
    if as_json:
        print_json(
            {name: {"paper": published.paper, "sizes": dict(published.sizes)} for name, published in schedules.items()}
        )
        return
    rows = (
        (name, published.paper, " ".join(f"{key}={value}" for key, value in published.sizes.items()))
        for name, published in schedules.items()
    )
    print_table("Published schedules", ("name", "of", "sizes"), rows)


def _program(
    source: str, sizes: Mapping[str, Any], costs: Mapping[str, float], nbytes: Mapping[str, float], mbits: float | None
) -> Program:
    from workbench.schedules.published import build_published, published_schedules

    if source in published_schedules() or not user_path(source, "The schedule").exists():
        return _priced(build_published(source, sizes), costs, nbytes, mbits)
    if sizes:
        raise ConfigError(
            f"Sizes {', '.join(sizes)} were given.",
            f"'{source}' is a file: its schedule has its sizes.",
            "Leave them out, or name a published schedule.",
        )
    from workbench.schedules.torch_csv import read_torch_csv

    text = read_text(user_path(source, "The schedule"), "the schedule")
    word = next(
        (line.split()[0] for line in text_lines(text) if line.strip() and not line.lstrip().startswith("#")), ""
    )
    if word == "device":
        if costs or nbytes or mbits is not None:
            raise ConfigError(
                "Costs were given.",
                f"The program in '{source}' has its costs in it.",
                "Leave out --cost, --size and --mbits, or change the file.",
            )
        return Program.from_text(text)
    return _priced(Schedule.from_text(text) if word == "rank" else read_torch_csv(text), costs, nbytes, mbits)


def _priced(
    schedule: Schedule, costs: Mapping[str, float], nbytes: Mapping[str, float], mbits: float | None
) -> Program:
    from workbench.core.costs import TableCosts
    from workbench.schedules.published import SECONDS

    if mbits is not None:
        require_range(mbits, range_of(Link, "bytes_per_s"), "The schedule", "mbits", unit=MEGABIT_BYTES)
    sizes = {name: round(size) for name, size in nbytes.items()}
    written = {value.name for ops in schedule.ops for op in ops for value in (*op.reads, *op.writes)}
    kinds = {op.kind for ops in schedule.ops for op in ops}
    for option, numbers, names in (("--cost", costs, kinds), ("--size", nbytes, written)):
        for name in numbers:
            if name not in names:
                raise ConfigError(
                    f"{option} {name}={numbers[name]:g} was given.",
                    f"The schedule has {', '.join(sorted(names))}.",
                    "Choose one of them.",
                )

    def transfer_s(rank: int, op: Op) -> float:
        rate = 0.0 if mbits is None else sizes.get(op.reads[0].name, 0) / (mbits * MEGABIT_BYTES)
        return costs.get("SEND", 0.0) + rate

    table = TableCosts(seconds_by_kind={**SECONDS, **costs, "SEND": transfer_s}, bytes_by_name=sizes)
    return Program(
        schedule=schedule, costs=table, devices=tuple(f"device-{rank}" for rank in range(schedule.world_size))
    )


def _numbers(option: str, words: list[str] | None) -> dict[str, float]:
    """Return NAME=NUMBER words as a dict.  Raises ConfigError unless it is a number from 0 to 1e15."""
    numbers: dict[str, float] = {}
    for word in words or ():
        name, _, value = word.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = -1.0
        if not name or not 0 <= numbers[name] <= 1e15:
            raise ConfigError(
                f"'{option} {word}' was given.",
                "It is not NAME=NUMBER with a number from 0 to 1e15.",
                f"Write, for example, {option} {'F=0.5' if option == '--cost' else 'act=1e6'}.",
            )
    return numbers


def _summary(source: str, program: Program, timeline: Timeline, contexts: tuple[int, ...]) -> dict[str, Any]:
    makespan_s = timeline.makespan_s
    ranks = []
    for rank, (name, spans) in enumerate(zip(program.devices, timeline.by_rank(), strict=True)):
        of_rank = replace(
            timeline, spans=tuple(spans)
        )  # with thousands of ranks, all spans once for each would take minutes
        busy_s = of_rank.busy_s(rank)
        ranks.append(
            {
                "device": name,
                "operations": sum(not op.is_communication for op in program.schedule.ops[rank]),
                "busy_s": busy_s,
                "idle_share": 1 - busy_s / makespan_s if makespan_s else 0.0,
                "contexts": contexts[rank],
                "peak_bytes": timeline.peak_bytes(rank),
                "bytes_sent": of_rank.bytes_sent(rank),
            }
        )
    return {
        "schedule": source,
        "digest": program.digest,
        "makespan_s": makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "source": timeline.source,
        "ranks": ranks,
    }
