"""Predicted against measured step times, and where the time of each device goes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.report import Report
from workbench.core.timeline import Span, Timeline
from workbench.plots.style import (
    BLACK,
    BLUE,
    COLOURS,
    DARK_GREY,
    LEGEND_RANK,
    ORANGE,
    busy_note,
    class_of,
    empty,
    finish,
    median,
    shown_ranks,
    time_unit,
)

BAND = 0.10  # the deviation that the shaded band allows
MAX_NAMED_POINTS = 14


class Point(NamedTuple):
    """One plan of a sweep or one step: the simulated and the measured seconds."""

    name: str
    group: str
    predicted_s: float
    measured_s: float

    @property
    def deviation(self) -> float:
        """Return |predicted - measured| / measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def points(report: Report) -> list[Point]:
    """Return the sweep's plans that were measured; without any, the steps that were."""
    swept = [Point(point.name, "plan", point.predicted_s, point.measured_s) for point in report.sweep if point.measured_s]
    if swept:
        return swept
    return [
        Point(
            f"epoch {step.epoch}, step {step.step}",
            "step from the cache" if step.cached else "step through the backbone",
            step.predicted_s,
            step.measured_s,
        )
        for step in report.steps
        if step.predicted_s and step.measured_s
    ]


def predicted_against_measured(report: Report) -> go.Figure:
    """Return measured over predicted step times, with y = x and a band of 10 % to both sides."""
    title = "Predicted against measured step time"
    note = busy_note(report)
    found = points(report)
    if not found:
        return empty(title=title, label=report.label, why="Nothing was measured: run with --mode execute to compare.", note=note)
    longest = max(max(point.predicted_s, point.measured_s) for point in found)
    shortest = min(min(point.predicted_s, point.measured_s) for point in found)
    unit = time_unit(longest)
    logarithmic = longest > 20 * shortest
    low, high = (shortest * unit.factor / 1.3 if logarithmic else 0.85 * shortest * unit.factor), longest * unit.factor * (1.3 if logarithmic else 1.12)
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=[low, high, high, low],
            y=[low * (1 + BAND), high * (1 + BAND), high * (1 - BAND), low * (1 - BAND)],
            fill="toself",
            fillcolor="rgba(153,153,153,0.22)",
            line={"width": 0},
            mode="lines",
            name=f"within {BAND:.0%}",
            hoverinfo="skip",
        )
    )
    figure.add_trace(
        go.Scatter(x=[low, high], y=[low, high], mode="lines", line={"color": DARK_GREY, "dash": "dash"}, name="equal", hoverinfo="skip")
    )
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in found:
        groups[point.group].append(point)
    named = len(found) <= MAX_NAMED_POINTS
    for (group, members), colour, symbol in zip(groups.items(), (BLUE, ORANGE), ("circle", "diamond"), strict=False):
        members = sorted(members, key=lambda point: point.predicted_s)
        figure.add_trace(
            go.Scatter(
                x=[point.predicted_s * unit.factor for point in members],
                y=[point.measured_s * unit.factor for point in members],
                mode="markers+text" if named else "markers",
                text=[point.name for point in members],
                # Neighbours on the diagonal: to the left above and to the right below do not cover each other.
                textposition=["middle left" if index % 2 else "middle right" for index in range(len(members))],
                textfont={"size": 11},
                marker={"size": 11 if named else 7, "color": colour, "symbol": symbol, "line": {"width": 1, "color": "white"}},
                name=group,
                customdata=[[point.deviation] for point in members],
                hovertemplate=(
                    f"<b>%{{text}}</b><br>predicted %{{x:.4g}} {unit.name}, measured %{{y:.4g}} {unit.name}"
                    "<br>deviation %{customdata[0]:.1%}<extra></extra>"
                ),
            )
        )
    axis = {"type": "log", "range": [math.log10(low), math.log10(high)]} if logarithmic else {"range": [low, high]}
    figure.update_xaxes(title=f"predicted, simulated ({unit.name})", zeroline=False, **axis)
    figure.update_yaxes(title=f"measured, {report.label} ({unit.name})", zeroline=False, **axis)
    figure.update_layout(legend={"x": 0.01, "y": 0.99, "xanchor": "left", "yanchor": "top", "bgcolor": "rgba(255,255,255,0.8)"})
    within = sum(point.deviation <= BAND for point in found)
    kind = "plans" if report.sweep and found[0].group == "plan" else "steps"
    return finish(
        figure,
        title=f"{title}: median deviation {median([point.deviation for point in found]):.1%}",
        label=f"simulated against {report.label}",
        subtitle=f"{within} of {len(found)} {kind} within {BAND:.0%}",
        note=note,
        height=620,
    )


def time_by_class(timeline: Timeline) -> list[dict[str, float]]:
    """Return for each rank the seconds of each class of operation; they add up to the makespan.

    A moment with compute counts as that compute, a moment with only transfers as 'waiting for data' (what the
    network was not hidden behind), the rest as idle.
    """
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.end_s > span.start_s:
            spans[span.rank].append(span)
    return [_classes_of_rank(spans[rank], timeline.makespan_s) for rank in range(timeline.world_size)]


def _classes_of_rank(spans: list[Span], makespan_s: float) -> dict[str, float]:
    moments = sorted(
        [(span.start_s, 1, index) for index, span in enumerate(spans)] + [(span.end_s, 0, index) for index, span in enumerate(spans)]
    )
    seconds: dict[str, float] = defaultdict(float)
    computing: dict[int, None] = {}
    moving: set[int] = set()
    at = 0.0
    for time_s, begins, index in moments:
        if time_s > at:
            name = class_of(spans[next(iter(computing))].op) if computing else "waiting for data" if moving else "idle"
            seconds[name] += time_s - at
            at = time_s
        if spans[index].op.is_communication:
            (moving.add if begins else moving.discard)(index)
        elif begins:
            computing[index] = None
        else:
            del computing[index]
    if makespan_s > at:
        seconds["idle"] += makespan_s - at
    return dict(seconds)


def breakdown(timelines: Mapping[str, Timeline], *, note: str = "") -> go.Figure:
    """Return stacked bars per device, one panel per timeline: what the time from first to last operation went to."""
    title = "Where each device's time goes"
    drawn = {name: timeline for name, timeline in timelines.items() if timeline.spans}
    if not drawn:
        return empty(title=title, label="", why="There is no timeline.", note=note)
    labels = sorted({timeline.label for timeline in drawn.values()})
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    most = max(len(shown_ranks(timeline.world_size)) for timeline in drawn.values())
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[f"{name} ({timeline.label})" if len(labels) > 1 else name for name, timeline in drawn.items()],
        horizontal_spacing=0.13,
        vertical_spacing=0.32 / rows,
    )
    in_legend: set[str] = set()
    for index, timeline in enumerate(drawn.values()):
        row, column = index // columns + 1, index % columns + 1
        ranks = shown_ranks(timeline.world_size)
        unit = time_unit(timeline.makespan_s)
        seconds = time_by_class(timeline)
        for name, colour in COLOURS.items():
            if any(seconds[rank].get(name) for rank in ranks):
                figure.add_trace(
                    go.Bar(
                        orientation="h",
                        y=list(range(len(ranks))),
                        x=[seconds[rank].get(name, 0.0) * unit.factor for rank in ranks],
                        name=name,
                        legendgroup=name,
                        showlegend=name not in in_legend,
                        legendrank=LEGEND_RANK[name],
                        marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
                        customdata=[[timeline.device_names[rank], seconds[rank].get(name, 0.0) / timeline.makespan_s] for rank in ranks],
                        hovertemplate=f"%{{customdata[0]}}: {name} %{{x:.4g}} {unit.name} (%{{customdata[1]:.0%}})<extra></extra>",
                    ),
                    row=row,
                    col=column,
                )
                in_legend.add(name)
        figure.update_xaxes(title=f"time ({unit.name})", range=[0, timeline.makespan_s * unit.factor], zeroline=False, row=row, col=column)
        figure.update_yaxes(
            tickvals=list(range(len(ranks))),
            ticktext=[f"{rank} {timeline.device_names[rank]} " for rank in ranks],
            range=[len(ranks) - 0.5, -0.5],
            tickfont={"size": 12 if len(ranks) <= 16 else 9},
            row=row,
            col=column,
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.25 if most <= 16 else 0.12,
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    figure.update_annotations(font={"size": 13, "color": BLACK})
    lane = 34 if most <= 8 else 18 if most <= 32 else 12
    finish(
        figure,
        title=title,
        label=" and ".join(reversed(labels)),
        subtitle="a transfer that runs while the device computes costs it nothing and is not shown",
        note=note,
        height=190 + rows * (90 + lane * most),
    )
    figure.update_layout(margin={"t": 120, "b": 100})
    return figure
