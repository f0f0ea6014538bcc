"""How far to trust an emulation: its late time against how far it is from its simulation (item `trust`).

`workbench bench executor` runs made-up programs on emulated devices.  An emulated device that the host holds up ends an
operation after its deadline; the seconds after it are late.  The bench runs at several time dilations, because devices
that are emulated more slowly leave a busy host more time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go

from workbench.core.serial import load_or_compute
from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.plots.export import Captioned
from workbench.plots.style import BLUE, DARK_GREY, GREEN, SYMBOLS, VERMILLION, finish
from workbench.tasks.metrics import spearman
from workbench_studies.bench.executor import bench
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, Settings, Table

DILATIONS = (1.0, 4.0, 16.0)
DEVICES, ROUNDS = (4,), 3
COLUMNS = ("program", "devices", "dilation", "simulated, ms", "measured, ms", "ratio", "late share")
FIELDS = ("program", "devices", "dilation", "simulated_ms", "measured_ms", "ratio", "late")
WITHIN = 0.05
LEAST = 1e-4
"""Where the axes begin: smaller shares and deviations are drawn there."""


def trust(item: Item, settings: Settings) -> Result:
    """Execute the programs at every dilation.  Finished measurements are stored."""
    dilations, devices, rounds = ((16.0,), (2,), 1) if settings.quick else (DILATIONS, DEVICES, ROUNDS)
    points: list[dict[str, Any]] = []
    for dilation in dilations:
        sizes = "-".join(map(str, devices))
        name = f"dilation-{dilation:g}-devices-{sizes}-rounds-{rounds}.json"
        path = None if settings.workdir is None else settings.workdir / "trust" / name

        def run(dilation: float = dilation) -> list[dict[str, Any]]:
            done = bench(settings.progress, ("switch",), sizes=devices, rounds=rounds, dilation=dilation)
            return [point | {"dilation": dilation} for point in done["points"]]

        points += load_or_compute(path, list[dict[str, Any]], run)
    return compared(item, points, rounds)


def compared(item: Item, points: Sequence[dict[str, Any]], rounds: int) -> Result:
    """Return the comparison.  points: as the bench writes them, with their dilation."""
    off = [abs(point["ratio"] - 1) for point in points]
    late = [point["late"] for point in points]
    in_pace = [deviation for deviation, share in zip(off, late, strict=True) if share <= BUSY_OVERRUN_SHARE]
    held_up = [deviation for deviation, share in zip(off, late, strict=True) if share > BUSY_OVERRUN_SHARE]
    rows: list[tuple[Number, ...]] = [
        tuple(float(point[name]) if name != "program" else point[name] for name in FIELDS) for point in points
    ]
    by_dilation = [
        (
            dilation,
            float(len(group)),
            median(point["ratio"] for point in group),
            max(point["ratio"] for point in group),
            median(point["late"] for point in group),
        )
        for dilation in sorted({point["dilation"] for point in points})
        for group in [[point for point in points if point["dilation"] == dilation]]
    ]
    return item.result(
        [],
        tables={"dilations": by_dilation, "programs": rows},
        holds={
            "valid": bool(in_pace) and max(in_pace) <= WITHIN,
            "order": spearman(late, off) > 0.5,
        },
        rounds=rounds,
        programs=len(points),
        mark=100 * BUSY_OVERRUN_SHARE,
        within=100 * WITHIN,
        valid=len(in_pace),
        inside=sum(deviation <= WITHIN for deviation in in_pace),
        worst=100 * max(in_pace, default=0.0),
        held_up=len(held_up),
        held_off=100 * (median(held_up) if held_up else 0.0),
        correlation=spearman(late, off),
    )


def draw_trust(item: Item, result: Result) -> list[Captioned]:
    """Return the picture."""
    return [Captioned("trust", item.title, figure(result.tables[1]))]


def figure(table: Table) -> go.Figure:
    """Return the deviation by the late share.  table: the result's programs."""
    rows: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    drawn = go.Figure()
    colours = (VERMILLION, GREEN, BLUE)
    for index, dilation in enumerate(sorted({row["dilation"] for row in rows})):
        group = [row for row in rows if row["dilation"] == dilation]
        drawn.add_scatter(
            x=[max(LEAST, row["late share"]) for row in group],
            y=[max(LEAST, abs(row["ratio"] - 1)) for row in group],
            mode="markers",
            marker={"color": colours[index % len(colours)], "symbol": SYMBOLS[index], "size": 9, "opacity": 0.8},
            name=f"time dilation {dilation:g}",
            hovertext=[
                f"{row['program']}: {row['measured, ms']:.4g} ms of {row['simulated, ms']:.4g} simulated, "
                f"late {row['late share']:.2%}"
                for row in group
            ],
        )
    line = {"color": DARK_GREY, "dash": "dot", "width": 1}
    drawn.add_vline(x=BUSY_OVERRUN_SHARE, line=line)
    drawn.add_hline(y=WITHIN, line=line)
    drawn.update_xaxes(type="log", title="late share of the paced time", tickformat="~%")
    drawn.update_yaxes(type="log", title="measured over simulated, off by", tickformat="~%")
    return finish(
        drawn,
        title="How far to trust an emulation",
        label="emulated, kernel links" + ", a busy host" * any(row["late share"] > BUSY_OVERRUN_SHARE for row in rows),
        subtitle=f"{len(rows)} runs of made-up programs on four emulated devices, medians of {ROUNDS} rounds. Right "
        "of the dots a run is marked as invalid.",
        height=470,
    )
