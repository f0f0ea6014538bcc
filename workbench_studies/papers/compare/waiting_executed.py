"""Some points of waiting.py, executed on emulated boards with kernel links: joules modelled from executed seconds."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.runtime.pacing import asked_dilation
from workbench.simulator import simulate
from workbench_studies.bench.executor import measure
from workbench_studies.bench.executor_programs import Case, case_of
from workbench_studies.papers.compare.boards import Way, boards, trainings
from workbench_studies.papers.compare.waiting import BOARD
from workbench_studies.papers.drawing import words
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, Settings

MODEL, QUICK_MODEL = "BERT-Base", "all-MiniLM-L6-v2"
COUNTS, RATES = (2, 4), (20, 100, 1000)
HOST_SHARE = 0.25
"""Of a core, for each emulated board: operations take their time and compute nothing."""


def emulated(count: int, mbit_per_s: int) -> Cluster:
    """Return the boards."""
    return boards(count, mbit_per_s, BOARD).emulated(HOST_SHARE)


def fastest(model: str, cluster: Cluster) -> Way:
    """Return the fastest way to train a mini-batch that is one program."""
    ways = [way for way in trainings(model, cluster) if way.program is not None]
    return min(ways, key=lambda way: way.replay(cluster)[0])


def cases(model: str, count: int, mbit_per_s: int) -> dict[str, Case]:
    """Return the fastest way by its name."""
    cluster = emulated(count, mbit_per_s)
    way = fastest(model, cluster)
    assert way.program is not None
    return {way.name: case_of(way.program(cluster), cluster)}


def waiting_executed(item: Item, settings: Settings) -> Result:
    """Execute the points once.  Finished ones are stored."""
    dilation, model = asked_dilation() or 1.0, QUICK_MODEL if settings.quick else MODEL
    places = [(2, 1000)] if settings.quick else list(product(COUNTS, RATES))
    points: dict[tuple[int, int], dict[str, Any]] = {}
    for count, rate in places:

        def run(count: int = count, rate: int = rate) -> dict[str, Any]:
            [point], _ = measure(emulated(count, rate), partial(cases, model, count, rate), dilation=dilation, rounds=1)
            return point

        name = f"waiting-executed/{model}-{count}-{rate}-{dilation:g}.json"
        points[count, rate] = settings.remember(name, dict[str, Any], run)
        settings.progress(f"{count} boards, {rate} Mbit/s: {points[count, rate]['ratio']:.3f} of the simulated seconds")
    return compared(item, points, model, dilation)


def compared(item: Item, points: dict[tuple[int, int], dict[str, Any]], model: str, dilation: float) -> Result:
    """Return the comparison.  points: as the executor's bench writes them, by boards and Mbit/s."""
    rows: list[Row] = []
    for (count, rate), point in points.items():
        cluster = emulated(count, rate)
        way = fastest(model, cluster)
        assert way.program is not None
        timeline = simulate(way.program(cluster), memory=False)
        busy_s = [timeline.busy_s(rank) for rank in range(count)]
        watts = [(device.watts_busy, device.watts_idle) for device in cluster.devices]

        def shares(
            seconds: float, busy_s: list[float] = busy_s, watts: list[tuple[float, float]] = watts
        ) -> tuple[float, float]:
            """Return joules, and the share of them that boards use while they wait."""
            waited_j = sum(idle * (seconds - one_s) for one_s, (_, idle) in zip(busy_s, watts, strict=True))
            joules = waited_j + sum(busy * one_s for one_s, (busy, _) in zip(busy_s, watts, strict=True))
            return joules, waited_j / joules

        executed_s, simulated_s = point["measured_ms"] / 1e3, point["simulated_ms"] / 1e3
        (executed_j, executed), (simulated_j, simulated) = shares(executed_s), shares(simulated_s)
        in_pace = "yes" if point["late"] <= BUSY_OVERRUN_SHARE else "no"
        seconds, joules = (executed_s, simulated_s), (executed_j, simulated_j)
        rows.append(
            (float(count), float(rate), words(point["program"]), *seconds, *joules, executed, simulated, in_pace)
        )
    return item.result(
        tables={"executed": rows},
        model=model,
        off=max(abs(point["ratio"] - 1) for point in points.values()) * 100,
        points=len(rows),
        in_pace=sum(row[-1] == "yes" for row in rows),
        apart=max(abs(float(row[7] or 0) - float(row[8] or 0)) for row in rows) * 100,
        dilation=dilation,
    )
