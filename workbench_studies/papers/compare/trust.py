"""How far to trust an emulation: its late time against how far it is from its simulation (item `trust`).

Programs drawn at random run on emulated devices.  The host holds a device up that ends an operation after its deadline,
or waits for a message that comes after it is due; these seconds are late (see Pacer).
The programs run at several time dilations, because devices that are emulated more slowly leave a busy host more time,
and on a host that is free or computes for others, too.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

import plotly.graph_objects as go

from workbench.core.costs import Spec
from workbench.core.program import Program
from workbench.core.serial import load_or_compute
from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.plots.export import Captioned
from workbench.plots.style import CYCLE, DOTTED, SYMBOLS, finish
from workbench.tasks.metrics import spearman
from workbench_studies.bench.executor import measure
from workbench_studies.bench.executor_programs import SECONDS, Case, cluster_of, costs_on, schedules_of
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, Settings, Table

DILATIONS = (1.0, 2.0, 4.0, 8.0)
OTHERS = (0, 2)
"""Number of other processes that compute during the emulation, with the same priority."""
DEVICES, PROGRAMS = (2, 3, 4), 42
"""Numbers of devices, and of programs for each number at each dilation, with and without other processes."""
MICRO_BATCHES = (2, 8)
OPERATION_S, MESSAGE_BYTES, GRADIENT_BYTES = (1e-3, 2e-2), (1e3, 1.3e5), (1e4, 4e5)
"""Ranges: the time of an operation, the size of a message between stages, and the size of an all-reduce."""
COLUMNS = ("program", "devices", "other processes", "dilation", "simulated, ms", "measured, ms", "ratio", "late share")
FIELDS = ("program", "devices", "others", "dilation", "simulated_ms", "measured_ms", "ratio", "late")
LENGTHS_MS = (20.0, 50.0, 100.0, 200.0)
WITHIN = 0.05
LEAST = 1e-4
"""Lower end of the axes: smaller shares and deviations are drawn there."""
_COMPUTES = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""A process that computes until its parent ends."""


def drawn_programs(size: int, numbers: Sequence[int]) -> dict[str, Case]:
    """Return programs for this many devices, drawn by their numbers; the same for the same numbers.

    The schedule, the number of micro-batches, the seconds of each kind of operation and the sizes of messages are
    drawn.  Seconds and sizes are distributed evenly over their logarithms.
    """
    cluster, programs = cluster_of(size, "switch"), dict[str, Case]()
    for number in numbers:
        draw = random.Random(number)

        def between(least: float, most: float, draw: random.Random = draw) -> float:
            return float(least * (most / least) ** draw.random())

        schedules = schedules_of(size, draw.randint(*MICRO_BATCHES))
        name = draw.choice(sorted(schedules))
        seconds = {kind: between(*OPERATION_S) for kind in SECONDS}
        crossing, gradient = (Spec((round(between(*sizes) / 4),)) for sizes in (MESSAGE_BYTES, GRADIENT_BYTES))
        costs = costs_on(cluster, crossing, seconds, gradient)
        programs[f"{name}, {number}"] = Case(program=Program.on(cluster, schedules[name], costs), cluster=cluster)
    return programs


def trust(item: Item, settings: Settings) -> Result:
    """Execute every program once.  Finished measurements are stored."""
    sessions = [(16.0, 0, 2)] if settings.quick else list(product(DILATIONS, OTHERS, DEVICES))
    each = 2 if settings.quick else PROGRAMS
    points: list[dict[str, Any]] = []
    for session, (dilation, others, size) in enumerate(sessions):
        # Files named "programs-..." are of a version whose late time had no messages.
        name = f"drawn-{each}-dilation-{dilation:g}-others-{others}-devices-{size}.json"
        path = None if settings.workdir is None else settings.workdir / "trust" / name
        # One more, which comes first and opens the connections, is not counted.
        numbers = range(session * (each + 1), (session + 1) * (each + 1))

        def run(
            dilation: float = dilation, others: int = others, size: int = size, numbers: Sequence[int] = numbers
        ) -> list[dict[str, Any]]:
            settings.progress(f"trust: {size} devices, time dilation {dilation:g}, {others} other processes")
            make_cases = partial(drawn_programs, size, numbers)
            with computing_beside(others):
                measurements, _ = measure(
                    cluster_of(size, "switch"), make_cases, dilation=dilation, rounds=1, warm=False
                )
            return [point | {"dilation": dilation, "others": others} for point in measurements[1:]]

        points += load_or_compute(path, list[dict[str, Any]], run)
    return compared(item, points)


@contextmanager
def computing_beside(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Inside the context, let so many processes compute with the priority of this one.  They end with it."""
    processes = [subprocess.Popen([sys.executable, "-c", _COMPUTES]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compared(item: Item, points: Sequence[dict[str, Any]]) -> Result:
    """Return the comparison.  points: as the bench writes them, with their dilation and other processes."""
    off = [abs(point["ratio"] - 1) for point in points]
    late = [point["late"] for point in points]
    in_pace = [point for point in points if _is_valid(point)]
    held_up = [abs(point["ratio"] - 1) for point in points if not _is_valid(point)]
    worst = max(in_pace, key=lambda point: abs(point["ratio"] - 1), default=None)
    rows: list[tuple[Number, ...]] = [
        tuple(float(point[name]) if name != "program" else point[name] for name in FIELDS) for point in points
    ]
    alone = [point for point in points if point["others"] == 0]
    conditions = sorted({(point["others"], point["dilation"]) for point in points})
    return item.result(
        [],
        tables={
            "conditions": [_summary(points, *condition) for condition in conditions],
            "lengths": _by_length(alone),
            "marks": _by_mark(points),
            "programs": rows,
        },
        holds={
            "valid": bool(in_pace) and _num_inside(in_pace) == len(in_pace),
            "order": spearman(late, off) > 0.5,
        },
        programs=len(points),
        mark=100 * BUSY_OVERRUN_SHARE,
        within=100 * WITHIN,
        valid=len(in_pace),
        inside=_num_inside(in_pace),
        worst=100 * abs(worst["ratio"] - 1) if worst else 0.0,
        worst_program=worst["program"] if worst else "",
        held_up=len(held_up),
        held_off=100 * (median(held_up) if held_up else 0.0),
        correlation=spearman(late, off),
    )


def _is_valid(point: dict[str, Any]) -> bool:
    return bool(point["late"] <= BUSY_OVERRUN_SHARE)


def _num_inside(points: Sequence[dict[str, Any]]) -> int:
    return sum(abs(point["ratio"] - 1) <= WITHIN for point in points)


def _by_mark(points: Sequence[dict[str, Any]]) -> list[tuple[Number, ...]]:
    """Return how many programs are within WITHIN and how many not, by the number of other processes and mark."""
    rows: list[tuple[Number, ...]] = []
    for others, is_valid in product(sorted({point["others"] for point in points}), (True, False)):
        group = [point for point in points if point["others"] == others and _is_valid(point) == is_valid]
        inside = _num_inside(group)
        rows.append((float(others), "valid" if is_valid else "invalid", float(inside), float(len(group) - inside)))
    return rows


def _summary(points: Sequence[dict[str, Any]], others: int, dilation: float) -> tuple[Number, ...]:
    """Return the row of all programs that ran at a dilation with this many other processes."""
    group = [point for point in points if (point["others"], point["dilation"]) == (others, dilation)]
    valid = [point for point in group if _is_valid(point)]
    return (
        float(others),
        dilation,
        float(len(group)),
        float(len(valid)),
        float(_num_inside(valid)),
        median(point["ratio"] for point in group),
        max(point["ratio"] for point in group),
        median(point["late"] for point in group),
    )


def _by_length(points: Sequence[dict[str, Any]]) -> list[tuple[Number, ...]]:
    """Return rows by the simulated length of the programs."""
    rows: list[tuple[Number, ...]] = []
    for least, most in pairwise((0.0, *LENGTHS_MS, math.inf)):
        off = [abs(point["ratio"] - 1) for point in points if least <= point["simulated_ms"] < most]
        inside = float(sum(deviation <= WITHIN for deviation in off))
        words = f"{least:g} ms and more" if most == math.inf else f"{least:g} to {most:g} ms"
        rows.append((words, float(len(off)), inside, 100 * median(off) if off else None))
    return rows


def draw_trust(item: Item, result: Result) -> list[Captioned]:
    """Return the picture."""
    return [Captioned("trust", item.title, figure(result.tables[-1]))]


def figure(table: Table) -> go.Figure:
    """Return the deviation by the late share.  table: the result's programs."""
    rows: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    drawn = go.Figure()
    for index, others in enumerate(sorted({row["other processes"] for row in rows})):
        group = [row for row in rows if row["other processes"] == others]
        drawn.add_scatter(
            x=[max(LEAST, row["late share"]) for row in group],
            y=[max(LEAST, abs(row["ratio"] - 1)) for row in group],
            mode="markers",
            marker={"color": CYCLE[index], "symbol": SYMBOLS[index], "size": 6, "opacity": 0.55},
            name=f"{others:g} processes beside it" if others else "nothing beside it",
            hovertext=[
                f"{row['program']}, time dilation {row['dilation']:g}: {row['measured, ms']:.4g} ms of "
                f"{row['simulated, ms']:.4g} simulated, late {row['late share']:.2%}"
                for row in group
            ],
        )
    drawn.add_vline(x=BUSY_OVERRUN_SHARE, line=DOTTED)
    drawn.add_hline(y=WITHIN, line=DOTTED)
    drawn.update_xaxes(type="log", title="late share of the time", tickformat="~%")
    drawn.update_yaxes(type="log", title="measured over simulated, off by", tickformat="~%")
    return finish(
        drawn,
        title="How far to trust an emulation",
        label="emulated, kernel links",
        subtitle=f"{len(rows):,} made-up programs on 2 to 4 emulated devices, each run once. Right of the dots a run "
        "is marked as invalid.",
        height=470,
    )
