"""The item and the picture of waiting.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.export import Captioned
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
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, Settings, Table

COLUMNS = ("model", "boards", "Mbit/s", "way", "s", "J", "J waiting", "s on one board", "J on one board")
SHOWN_MODEL = "BERT-Base"
SLOW = 100
"""Mbit/s: a link of Wi-Fi."""
COLOURS = {2: BLUE, 4: VERMILLION, 8: GREEN}
HALF = 0.5
LEAST = 0.2
"""The lowest efficiency of the line."""


def waiting(item: Item, settings: Settings) -> Result:
    """Simulate every way."""
    found = list(ways(settings.progress, MODELS[:1] if settings.quick else MODELS))
    model = SHOWN_MODEL if any(one.model == SHOWN_MODEL for one in found) else found[0].model
    best = _fastest(found)
    idle, slow = idle_share(), [one for (_, count, rate), one in best.items() if (count, rate) == (4, SLOW)]
    shown = [(count, rate, best[model, count, rate]) for count, rate in product(COUNTS, MBIT_PER_S)]
    frugal = sum(one.joules <= min(other.joules for other in _rivals(found, one)) * 1.001 for one in best.values())
    drained = [
        one.joules / min(other.joules for other in _rivals(found, one) if other.way == "lora, stages")
        for one in found
        if one.way == NEVER_DRAINED and any(other.way == "lora, stages" for other in _rivals(found, one))
    ]
    return item.result(
        [],
        tables={
            "fastest": [
                (float(count), float(rate), words(one.way), one.efficiency, one.times, one.waited_j / one.joules)
                for count, rate, one in shown
            ],
            "ways": [_row(one) for one in found],
        },
        holds={
            "one": min(one.times for one in found) >= 1,
            "frugal": frugal == len(best),
            "drained": median(drained) < 1,
        },
        model=model,
        ways=len(found),
        settings=len(best),
        idle=100 * idle,
        half=100 * (times_of(HALF, idle) - 1),
        off=100 * max(abs(one.times / times_of(one.efficiency, idle) - 1) for one in found),
        least=min(one.times for one in found),
        frugal=frugal,
        most=max(one.times for one in best.values()),
        drained=median(drained),
        slow=100 * median(one.waited_j / one.joules for one in slow),
        rate=SLOW,
    )


def _fastest(found: Sequence[Waiting]) -> dict[tuple[str, int, int], Waiting]:
    """Return the fastest way by model, number of boards and link."""
    best: dict[tuple[str, int, int], Waiting] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        best.setdefault((one.model, one.count, one.mbit_per_s), one)
    return best


def _rivals(found: Sequence[Waiting], one: Waiting) -> list[Waiting]:
    """Return the ways with the same boards, link and model."""
    same = (one.model, one.count, one.mbit_per_s)
    return [other for other in found if (other.model, other.count, other.mbit_per_s) == same]


def _row(one: Waiting) -> tuple[Number, ...]:
    spent = (one.seconds, one.joules, one.waited_j, one.alone_s, one.alone_j)
    return (one.model, float(one.count), float(one.mbit_per_s), one.way, *spent)


def draw_waiting(item: Item, result: Result) -> list[Captioned]:
    """Return the picture."""
    return [Captioned("waiting", item.title, figure(result.tables[1]))]


def figure(table: Table) -> go.Figure:
    """Return the joules by efficiency, and the share of waiting by link.  table: the result's ways."""
    found = [_of_row(dict(zip(COLUMNS, row, strict=True))) for row in table.rows]
    idle, best = idle_share(), _fastest(found)
    model = SHOWN_MODEL if any(one.model == SHOWN_MODEL for one in found) else found[0].model
    titles = ["joules over those of one board", f"share of joules used waiting, {model}"]
    drawn = make_subplots(rows=1, cols=2, horizontal_spacing=0.09, subplot_titles=titles)
    shares = [LEAST + (1 - LEAST) * step / 60 for step in range(61)]
    line = {"color": BLACK, "width": 1.5}
    formula = go.Scatter(x=shares, y=[times_of(one, idle) for one in shares], mode="lines", line=line)
    drawn.add_trace(formula.update(name=f"1 + {idle:.2f} (1 / efficiency − 1)"), row=1, col=1)
    for count, symbol in zip(COUNTS, SYMBOLS, strict=False):
        own = [one for one in found if one.count == count and one.efficiency >= LEAST]
        points = go.Scatter(
            x=[one.efficiency for one in own],
            y=[one.times for one in own],
            mode="markers",
            marker={"color": COLOURS[count], "symbol": symbol, "size": 6, "opacity": 0.6},
            name=f"{count} boards",
            legendgroup=str(count),
            hovertext=[f"{one.model}, {one.mbit_per_s} Mbit/s: {words(one.way)}" for one in own],
        )
        drawn.add_trace(points, row=1, col=1)
        own = [best[model, count, rate] for rate in MBIT_PER_S]
        waited = go.Scatter(
            x=MBIT_PER_S,
            y=[one.waited_j / one.joules for one in own],
            mode="lines+markers",
            line={"color": COLOURS[count]},
            marker={"symbol": symbol, "size": 7},
            legendgroup=str(count),
            showlegend=False,
            hovertext=[f"{words(one.way)}, {one.mbit_per_s} Mbit/s" for one in own],
        )
        drawn.add_trace(waited, row=1, col=2)
    drawn.update_xaxes(title="efficiency: speedup / boards", tickformat=".0%", autorange="reversed", col=1)
    drawn.update_xaxes(type="log", title="Mbit/s", tickvals=MBIT_PER_S, col=2)
    drawn.update_yaxes(title="times", rangemode="tozero", col=1)
    drawn.update_yaxes(tickformat=".0%", rangemode="tozero", col=2)
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="What does waiting cost?",
        label="simulated, joules modelled",
        subtitle=f"A mini-batch on Raspberry Pi 4B, which idle at {idle:.0%} of their busy power. Left: every way, "
        "and the closed form. Right: the fastest way.",
        height=470,
        margin={"t": 130},
    )


def _of_row(row: dict[str, Any]) -> Waiting:
    return Waiting(
        model=row["model"],
        count=int(row["boards"]),
        mbit_per_s=int(row["Mbit/s"]),
        way=row["way"],
        seconds=row["s"],
        joules=row["J"],
        waited_j=row["J waiting"],
        alone_s=row["s on one board"],
        alone_j=row["J on one board"],
    )
