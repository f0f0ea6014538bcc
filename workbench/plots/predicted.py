"""Predicted and measured step times; and several runs in one figure: bars with their spread, lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from workbench.core.report import Report, busy_note, sweep_note
from workbench.core.spread import Spread
from workbench.core.timeline import label_of
from workbench.plots.style import BLACK, BLUE, CYCLE, DARK_GREY, ORANGE, SYMBOLS, empty, error_bars, finish, time_unit

DASHES = ("solid", "dash", "dot", "dashdot")
MAX_MARKERS = 60


def compared_bars(
    series: Mapping[str, Mapping[Any, Spread]],
    *,
    x_title: str,
    unit: str = "",
    bars: str = "mean, with the standard deviation over runs",
    **words: Any,
) -> go.Figure:
    """Return a group of bars for each x and a colour for each series.

    series: by name, the value at each x.  bars: what the error bars show.  words: title, label, subtitle and note, see
    style.finish.
    """
    figure = go.Figure()
    order = list(dict.fromkeys(x for points in series.values() for x in points))
    for index, (name, points) in enumerate(series.items()):
        spreads = list(points.values())
        figure.add_bar(
            name=name,
            x=list(points),
            y=[spread.median for spread in spreads],
            error_y=error_bars(spreads, color=BLACK, visible=any(spread.high > spread.low for spread in spreads)),
            marker={
                "color": CYCLE[index % len(CYCLE)],
                "pattern": {"shape": ("", "/", "x", ".")[index // len(CYCLE) % 4]},
            },
            hovertemplate=f"<b>{name}</b>, %{{x}}: %{{y:.4g}} {unit}<extra></extra>",
            showlegend=len(series) > 1 and bool(points),
        )
    figure.update_xaxes(title=x_title, type="category", categoryorder="array", categoryarray=order, showgrid=False)
    figure.update_yaxes(title=unit, rangemode="tozero")
    varies = any(spread.high > spread.low for points in series.values() for spread in points.values())
    words["subtitle"] = "; ".join(filter(None, [words.get("subtitle"), bars if varies else ""]))
    return finish(figure, height=430, barmode="group", **words)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_title: str,
    y_title: str,
    logarithmic: str = "",
    **words: Any,
) -> go.Figure:
    """Return a figure with a line through the (x, y) points of each series, with markers if there are few.

    logarithmic: the logarithmic axes, such as 'x' or 'xy'.  words: title, label, subtitle and note, see style.finish.
    """
    figure = go.Figure()
    for index, (name, points) in enumerate(series.items()):
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers" if len(points) <= MAX_MARKERS else "lines",
            name=name,
            line={"color": CYCLE[index % len(CYCLE)], "width": 2, "dash": DASHES[index // len(CYCLE) % len(DASHES)]},
            marker={"size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)]},
            showlegend=True,
        )
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title, rangemode="tozero")
    if "x" in logarithmic:
        marked = sorted({x for points in series.values() for x, _ in points})
        figure.update_xaxes(
            type="log", tickvals=marked, ticktext=[f"{x:,g}" if x < 1e6 else f"{x:.3g}" for x in marked]
        )
    if "y" in logarithmic:
        figure.update_yaxes(type="log", dtick=1)
    return finish(figure, height=430, **words)


BAND = 0.10  # the deviation that the shaded band allows
MAX_NAMED_POINTS = 14
STEPS = {False: "step through the backbone", True: "step from the cache"}
NAME_SIZE = (0.008, 0.035)  # approximate width of a character and height of a line, as shares of the axes


class Point(NamedTuple):
    """One plan of a sweep or one step: simulated and measured seconds.  mark: follows the measured ones of an invalid
    run.
    """

    name: str
    group: str
    predicted_s: float
    measured_s: float
    mark: str = ""

    @property
    def deviation(self) -> float:
        """Return |predicted - measured| / measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def points(report: Report) -> list[Point]:
    """Return the sweep's measured plans; if there are none, the measured steps."""
    swept = [
        # The sweep was measured separately, before or after the run, so it has a separate mark for the host's pace.
        Point(point.name, "plan", point.predicted_s, point.measured_s, point.mark)
        for point in report.sweep
        if point.measured_s
    ]
    if swept:
        return swept
    answers = report.plan.inference is not None
    return [
        Point(
            f"request {step.step + 1}" if answers else f"epoch {step.epoch + 1}, step {step.step + 1}",
            "request" if answers else STEPS[step.cached],
            step.predicted_s,
            step.measured_s,
            report.mark,
        )
        for step in report.steps
        if step.predicted_s and step.measured_s
    ]


def predicted_against_measured(report: Report) -> go.Figure:
    """Return measured over predicted step times, with the line y = x and a band of 10 % to both sides."""
    answers = report.plan.inference is not None
    title = f"Predicted against measured {'latency' if answers else 'step time'}"
    steps = points(report)
    if not steps:
        why = "Nothing was measured: run with --mode execute to compare."
        return empty(title=title, label=report.label, why=why, note=busy_note(report))
    mark = next((point.mark for point in steps if point.mark), "")
    swept = steps[0].group == "plan"
    note = sweep_note(report) if swept else busy_note(report)
    measured_label = label_of(report.source, report.fidelity, valid=not mark)
    longest = max(max(point.predicted_s, point.measured_s) for point in steps)
    shortest = min(min(point.predicted_s, point.measured_s) for point in steps)
    unit = time_unit(longest)
    logarithmic = longest > 20 * shortest
    margin = 1.3 if logarithmic else 1.15
    low, high = shortest * unit.factor / margin, longest * unit.factor * margin
    figure = go.Figure()
    figure.add_scatter(
        x=[low, high, high, low],
        y=[low * (1 + BAND), high * (1 + BAND), high * (1 - BAND), low * (1 - BAND)],
        fill="toself",
        fillcolor="rgba(153,153,153,0.22)",
        line={"width": 0},
        mode="lines",
        name=f"within {BAND:.0%}",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": DARK_GREY, "dash": "dash"},
        name="equal",
        hoverinfo="skip",
    )
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in steps:
        groups[point.group].append(point)
    named = len(steps) <= MAX_NAMED_POINTS
    scale: Callable[[float], float] = math.log if logarithmic else float

    def along(seconds: float) -> float:
        return (scale(seconds * unit.factor) - scale(low)) / (scale(high) - scale(low))

    places = dict.fromkeys(steps, "middle right")
    if named:
        places = _label_places({point: (along(point.predicted_s), along(point.measured_s)) for point in steps})
    for (group, members), colour, symbol in zip(groups.items(), (BLUE, ORANGE), ("circle", "diamond"), strict=False):
        figure.add_scatter(
            x=[point.predicted_s * unit.factor for point in members],
            y=[point.measured_s * unit.factor for point in members],
            mode="markers+text" if named else "markers",
            # The spaces keep the marker off the first or last letter.
            text=["" if named and not places[point] else f"\u00a0{point.name}{point.mark}\u00a0" for point in members],
            hovertext=[point.name for point in members],
            textposition=[places[point] or "middle right" for point in members],
            textfont={"size": 11},
            marker={
                "size": 11 if named else 7,
                "color": colour,
                "symbol": [f"{symbol}-open" if point.mark else symbol for point in members],
                "line": {
                    "width": [2 if point.mark else 1 for point in members],
                    "color": [colour if point.mark else "white" for point in members],
                },
            },
            name=group,
            customdata=[[point.deviation, point.mark] for point in members],
            hovertemplate=(
                f"<b>%{{hovertext}}</b><br>predicted %{{x:.4g}} {unit.name}, measured %{{y:.4g}} "
                f"{unit.name}%{{customdata[1]}}"
                "<br>deviation %{customdata[0]:.1%}<extra></extra>"
            ),
        )
    axis = {"type": "log", "range": [math.log10(low), math.log10(high)]} if logarithmic else {"range": [low, high]}
    figure.update_xaxes(title=f"predicted, simulated ({unit.name})", **axis)
    figure.update_yaxes(title=f"measured, {measured_label} ({unit.name})", **axis)
    within = sum(point.deviation <= BAND for point in steps)
    kind = "plans" if swept else "requests" if answers else "steps"
    return finish(
        figure,
        title=f"{title}: median deviation {median([point.deviation for point in steps]):.1%}{mark}",
        label=f"simulated against {measured_label}",
        subtitle=f"{within} of {len(steps)} {kind} within {BAND:.0%}{mark}",
        note=note,
        height=620,
    )


def _label_places(places: Mapping[Point, tuple[float, float]]) -> dict[Point, str]:
    """Return a position for each point's name; '' next to a named point, where it would collide (the hover text has the
    name).

    places: the position of each point, as shares of both axes.
    """
    named: dict[Point, str] = {}
    for point, (x, y) in sorted(places.items(), key=lambda item: item[1]):
        wide, high = NAME_SIZE[0] * len(point.name + point.mark), NAME_SIZE[1]
        if all(abs(x - places[other][0]) > wide or abs(y - places[other][1]) > high for other in named):
            named[point] = "bottom right" if x < 0.6 else "top left"  # neither lies on the dashed line
    return dict.fromkeys(places, "") | named
