"""The item and the picture of churn.py."""

from __future__ import annotations

from statistics import median

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import CYCLE, DOTTED, SYMBOLS, finish
from workbench_studies.papers.compare import churn as simulated
from workbench_studies.papers.compare.churn import COUNT, LIDS, STAYS_S, WAYS, lessons, points
from workbench_studies.papers.items import COMPARE, Item
from workbench_studies.papers.result import Record, Result, Settings, shipped_result

DRAWS = 2
"""Seeds at each point: each has dozens of stays."""
LESSONS = "lessons"


def churn(item: Item, settings: Settings) -> Result:
    """Simulate every way at every mean stay, and a lesson."""
    seeds = settings.seeds[:1] if settings.quick else settings.seeds[:DRAWS]
    goodputs = list(points(settings, seeds))
    classroom = list(lessons(settings, settings.seeds[0]))
    by_way = {(point.way, point.stay_s): point for point in goodputs}
    short, long = STAYS_S[0], STAYS_S[-1]
    order = sorted(WAYS, key=lambda way: by_way[way, short].of_free)
    [present] = {round(run.present, 6) for _, run, _ in classroom}
    by_goodput = sorted(classroom, key=lambda lesson: lesson[2])
    return item.result(
        tables={
            "points": [
                (
                    point.way,
                    float(point.stay_s),
                    point.goodput,
                    min(point.goodputs),
                    max(point.goodputs),
                    sum(point.free) / len(point.free),
                    100 * point.lost,
                )
                for point in goodputs
            ],
            LESSONS: [
                (
                    way,
                    float(run.in_use),
                    float(run.changes),
                    100 * run.present,
                    goodput,
                    100 * run.lost_s / simulated.LESSON_S,
                )
                for way, run, goodput in classroom
            ],
        },
        holds={
            "longer": all(by_way[way, short].of_free < by_way[way, long].of_free for way in WAYS),
        },
        away=simulated.SHARE_AWAY,
        there=100 / (1 + simulated.SHARE_AWAY),
        seeds=len(seeds),
        most=max(point.of_free for point in goodputs),
        short=short,
        long=long,
        worst_long=min(by_way[way, long].of_free for way in WAYS),
        median_short=median(by_way[way, short].of_free for way in WAYS),
        best=order[-1],
        best_of=by_way[order[-1], short].of_free,
        worst=order[0],
        worst_of=by_way[order[0], short].of_free,
        worst_time=100 * by_way[order[0], short].lost,
        worst_then=by_way[order[0], long].of_free,
        cached_short=by_way["PAC+", short].of_free,
        cached_long=by_way["PAC+", long].of_free,
        lids=LIDS,
        present=100 * present,
        first=by_goodput[-1][0],
        first_of=by_goodput[-1][2],
        first_used=by_goodput[-1][1].in_use,
        last=by_goodput[0][0],
        last_of=by_goodput[0][2],
        last_used=by_goodput[0][1].in_use,
    )


def draw_churn(result: Result) -> go.Figure:
    """Return goodput by mean stay, over the undisturbed one and over free changes, and that of a lesson.

    The points that were executed are drawn if their result ships.
    """
    executed = shipped_result(COMPARE, "churn-executed")
    rows, lesson_rows = (table.records for table in result.tables)
    drawn = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        row_heights=[0.6, 0.4],
        vertical_spacing=0.17,
        horizontal_spacing=0.08,
        subplot_titles=["over devices that stay", "over changes that cost nothing", f"a lesson with {LIDS} lids"],
    )
    for number, way in enumerate(WAYS):
        rows_of_way = [row for row in rows if row["way"] == way]
        for column, values in (
            (1, [row["goodput"] for row in rows_of_way]),
            (2, [row["goodput"] / row["if changes cost nothing"] for row in rows_of_way]),
        ):
            line = go.Scatter(
                x=[row["mean stay, s"] for row in rows_of_way],
                y=values,
                mode="lines+markers",
                line={"color": CYCLE[number], "width": 1.8},
                marker={"symbol": SYMBOLS[number], "size": 8},
                name=way,
                legendgroup=way,
                showlegend=column == 1,
                hovertext=[
                    f"{way}, mean stay {row['mean stay, s']:.0f} s: {value:.0%}; {row['time lost, %']:.0f} % of the "
                    "time lost"
                    for row, value in zip(rows_of_way, values, strict=True)
                ],
            )
            drawn.add_trace(line, row=1, col=column)
    executed_rows = [] if executed is None else executed.tables[0].records
    for number, way in enumerate(WAYS):
        rows_of_way = [row for row in executed_rows if row["way"] == way and row["in pace"] == "yes"]
        if rows_of_way:
            drawn.add_trace(_points(rows_of_way, number), row=1, col=1)
    lessons_of = {row["way"]: row for row in lesson_rows}
    shown = [lessons_of[way] for way in WAYS]
    bars = go.Bar(
        x=[row["goodput"] for row in shown],
        y=list(WAYS),
        orientation="h",
        marker={"color": [CYCLE[list(WAYS).index(way)] for way in WAYS]},
        text=[f"{row['goodput']:.0%}, {row['lids in use at first']:.0f} in use" for row in shown],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    drawn.add_trace(bars, row=2, col=1)
    drawn.add_vline(
        x=lesson_rows[0]["lids open, %"] / 100,
        line=DOTTED,
        row=2,
        col=1,
    )
    ticks = {"tickvals": list(STAYS_S), "ticktext": [f"{stay_s}" for stay_s in STAYS_S]}
    drawn.update_xaxes(type="log", title_text="mean stay, s", row=1, **ticks)
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.09], row=1)
    drawn.update_yaxes(title_text="goodput", row=1, col=1)
    drawn.update_xaxes(tickformat=".0%", range=[0, 1.6], tickvals=[0, 0.25, 0.5, 0.75, 1, 1.25], row=2)
    drawn.update_yaxes(autorange="reversed", row=2)
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="What is left of a training when devices come and go?",
        label="simulated; open markers executed" if executed else "simulated",
        subtitle=f"Samples of finished steps per second. Above: {COUNT} Raspberry Pi 5 that are there for 80 % of the "
        "time. Below: laptops; dotted: the share of the lids that is open.",
        height=760,
        margin={"l": 20, "r": 30, "t": 130, "b": 110},
    )


def _points(rows: list[Record], number: int) -> go.Scatter:
    """Return a way's executed points, whose host kept pace."""
    return go.Scatter(
        x=[row["mean stay, s"] for row in rows],
        y=[row["goodput, executed"] for row in rows],
        mode="markers",
        marker={"symbol": f"{SYMBOLS[number]}-open", "size": 15, "color": CYCLE[number], "line": {"width": 2}},
        name=f"{rows[0]['way']}, executed",
        legendgroup=rows[0]["way"],
        showlegend=False,
        hovertext=[
            f"{row['way']}, executed with a tiny model: {row['goodput, executed']:.0%}; the same simulated: "
            f"{row['simulated']:.0%}"
            for row in rows
        ],
    )
