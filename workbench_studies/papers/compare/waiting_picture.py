"""The item and the picture of waiting.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import BLACK, BLUE, GREEN, SYMBOLS, VERMILLION, finish
from workbench_studies.papers.compare.boards import NEVER_DRAINED
from workbench_studies.papers.compare.waiting import (
    COUNTS,
    MBIT_PER_S,
    MODELS,
    Waiting,
    idle_share,
    times_of,
    ways,
)
from workbench_studies.papers.drawing import words
from workbench_studies.papers.items import COMPARE, Item
from workbench_studies.papers.result import Result, Settings, shipped_result

SHOWN_MODEL = "BERT-Base"
SLOW = 100
"""Mbit/s: a link of Wi-Fi."""
COLOURS = {2: BLUE, 4: VERMILLION, 8: GREEN}
HALF = 0.5
LEAST = 0.2
"""The lowest efficiency of the line."""


def waiting(item: Item, settings: Settings) -> Result:
    """Simulate every way."""
    all_ways = list(ways(settings.progress, MODELS[:1] if settings.quick else MODELS))
    model = SHOWN_MODEL if any(way.model == SHOWN_MODEL for way in all_ways) else all_ways[0].model
    best = _fastest(all_ways)
    idle, slow = idle_share(), [way for (_, count, rate), way in best.items() if (count, rate) == (4, SLOW)]
    shown = [(count, rate, best[model, count, rate]) for count, rate in product(COUNTS, MBIT_PER_S)]
    frugal = sum(way.joules <= min(other.joules for other in _rivals(all_ways, way)) * 1.001 for way in best.values())
    drained = [
        way.joules / min(other.joules for other in _rivals(all_ways, way) if other.way == "lora, stages")
        for way in all_ways
        if way.way == NEVER_DRAINED and any(other.way == "lora, stages" for other in _rivals(all_ways, way))
    ]
    return item.result(
        tables={
            "fastest": [
                (float(count), float(rate), words(way.way), way.efficiency, way.times, way.waited_j / way.joules)
                for count, rate, way in shown
            ],
            "ways": all_ways,
        },
        holds={
            "frugal": frugal == len(best),
            "drained": median(drained) < 1,
        },
        model=model,
        ways=len(all_ways),
        settings=len(best),
        idle=100 * idle,
        half=100 * (times_of(HALF, idle) - 1),
        off=100 * max(abs(way.times / times_of(way.efficiency, idle) - 1) for way in all_ways),
        least=min(way.times for way in all_ways),
        frugal=frugal,
        drained=median(drained),
        slow=100 * median(way.waited_j / way.joules for way in slow),
        rate=SLOW,
    )


def _fastest(all_ways: Sequence[Waiting]) -> dict[tuple[str, float, float], Waiting]:
    """Return the fastest way by model, number of boards and link."""
    best: dict[tuple[str, float, float], Waiting] = {}
    for way in sorted(all_ways, key=lambda way: way.seconds):
        best.setdefault((way.model, way.boards, way.mbit_per_s), way)
    return best


def _rivals(all_ways: Sequence[Waiting], way: Waiting) -> list[Waiting]:
    """Return the ways with the same boards, link and model."""
    same = (way.model, way.boards, way.mbit_per_s)
    return [other for other in all_ways if (other.model, other.boards, other.mbit_per_s) == same]


def draw_waiting(result: Result) -> go.Figure:
    """Return the joules by efficiency, and the share of waiting by link, with emulated points if their result ships."""
    executed = shipped_result(COMPARE, "waiting-executed")
    in_pace = [] if executed is None else [row for row in executed.tables[0].records if row["in pace"] == "yes"]
    all_ways = [Waiting(*row) for row in result.tables[1].rows]  # type: ignore[arg-type]
    idle, best = idle_share(), _fastest(all_ways)
    model = SHOWN_MODEL if any(way.model == SHOWN_MODEL for way in all_ways) else all_ways[0].model
    titles = ["joules over those of one board", f"share of joules used waiting, {model}"]
    drawn = make_subplots(rows=1, cols=2, horizontal_spacing=0.09, subplot_titles=titles)
    shares = [LEAST + (1 - LEAST) * step / 60 for step in range(61)]
    line = {"color": BLACK, "width": 1.5}
    formula = go.Scatter(x=shares, y=[times_of(share, idle) for share in shares], mode="lines", line=line)
    drawn.add_trace(formula.update(name=f"1 + {idle:.2f} (1 / efficiency − 1)"), row=1, col=1)
    for count, symbol in zip(COUNTS, SYMBOLS, strict=False):
        of_count = [way for way in all_ways if way.boards == count and way.efficiency >= LEAST]
        points = go.Scatter(
            x=[way.efficiency for way in of_count],
            y=[way.times for way in of_count],
            mode="markers",
            marker={"color": COLOURS[count], "symbol": symbol, "size": 6, "opacity": 0.6},
            name=f"{count} boards",
            legendgroup=str(count),
            hovertext=[f"{way.model}, {way.mbit_per_s:g} Mbit/s: {words(way.way)}" for way in of_count],
        )
        drawn.add_trace(points, row=1, col=1)
        of_count = [best[model, count, rate] for rate in MBIT_PER_S]
        waited = go.Scatter(
            x=MBIT_PER_S,
            y=[way.waited_j / way.joules for way in of_count],
            mode="lines+markers",
            line={"color": COLOURS[count]},
            marker={"symbol": symbol, "size": 7},
            legendgroup=str(count),
            showlegend=False,
            hovertext=[f"{words(way.way)}, {way.mbit_per_s:g} Mbit/s" for way in of_count],
        )
        drawn.add_trace(waited, row=1, col=2)
        if executed_rows := [row for row in in_pace if row["boards"] == count]:
            markers = go.Scatter(
                x=[row["Mbit/s"] for row in executed_rows],
                y=[row["share waiting, executed"] for row in executed_rows],
                mode="markers",
                marker={"color": COLOURS[count], "symbol": f"{symbol}-open", "size": 12},
                legendgroup=str(count),
                showlegend=False,
                name=f"{count} boards, emulated",
                hovertext=[f"{words(row['way'])}, {row['Mbit/s']:g} Mbit/s, emulated" for row in executed_rows],
            )
            drawn.add_trace(markers, row=1, col=2)
    drawn.update_xaxes(title="efficiency: speedup / boards", tickformat=".0%", autorange="reversed", col=1)
    drawn.update_xaxes(type="log", title="Mbit/s", tickvals=MBIT_PER_S, col=2)
    drawn.update_yaxes(title="times", rangemode="tozero", col=1)
    drawn.update_yaxes(tickformat=".0%", rangemode="tozero", col=2)
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="What does waiting cost?",
        label="simulated; open markers emulated; joules modelled" if executed else "simulated, joules modelled",
        subtitle=f"A mini-batch on Raspberry Pi 4B, which idle at {idle:.0%} of their busy power. Left: every way, "
        "and the closed form. Right: the fastest way.",
        height=470,
        margin={"t": 130},
    )
