"""A served stream over time: throughput, each device's processor, and the portal's findings and actions (Galaxy+, Fig.
16).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.report import busy_note
from workbench.methods.galaxy_plus.serving.records import ServingEvent, ServingReport
from workbench.plots import style

PALE_RED = "#F6DFD6"
MAX_STEPS = 80  # of a curve over time
MIN_REQUESTS = 3  # minimum in a step of the throughput curve
MAX_NAMED_EVENTS = 14
CHARACTER_PIXELS, AXIS_PIXELS = 6.5, 950  # approximate widths of a fault's name and of the time axis
THROUGHPUT_COLOURS = style.BLACK, style.VERMILLION, style.BLUE, style.GREEN
SHOWN_EVENTS = style.OPERATIONS["events"]
"""The portal's findings and actions.  Injected faults are shaded instead; probes, plans and loads are in the hover of
later events."""


def serving(reports: ServingReport | Mapping[str, ServingReport], *, title: str = "A stream of requests") -> go.Figure:
    """Return throughput over time, the processor use of each device for every report, and the events below.

    reports: one, or several of the same stream by name, such as with and without re-scheduling; injected faults are
    shaded.
    """
    named = {"": reports} if isinstance(reports, ServingReport) else dict(reports)
    shown = {name: report for name, report in named.items() if report.requests}
    label = " and ".join(dict.fromkeys(report.label for report in named.values()))
    note = next(filter(None, map(busy_note, named.values())), "")
    if not shown:
        return style.empty(title=title, label=label, why="No request was answered.", note=note)
    first = next(iter(shown.values()))
    end_s, step_s = max(report.end_s for report in shown.values()), step_of(shown.values())
    panels = [f"processors{', ' * bool(name)}{name}" for name in shown]
    heights = [170.0, *(110.0 for _ in shown), 20.0 + 52.0 * len(shown)]
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=34 / sum(heights),
        subplot_titles=[f"answers per second{style.mark_of(note)}", *panels, "what the portal found and did"],
    )
    for annotation in figure.layout.annotations:
        annotation.update(x=0, xanchor="left", font={"size": 12.5, "color": style.BLACK})
    for index, (name, report) in enumerate(shown.items()):
        _throughput(figure, name, report, index, step_s)
        _processors(figure, report, 2 + index, step_s, in_legend=index == 0)
    _events(figure, shown, row=len(heights))
    _faults(figure, first, end_s, rows=len(heights))
    figure.update_xaxes(range=[-0.005 * end_s, end_s])
    figure.update_xaxes(title="time (s)", row=len(heights), col=1)
    return style.finish(
        figure,
        title=title,
        label=label,
        subtitle=_summary(shown),
        note=note,
        height=round(sum(heights)) + 34 * len(heights) + 200,
        margin={"t": 78 + 16 * (len(shown) + bool(note))},
    )


def step_of(reports: Iterable[ServingReport]) -> float:
    """Return the seconds of a step of the curves: short, but with some requests in each step."""
    listed = list(reports)
    usual = median([median([request.service_s for request in report.requests]) for report in listed])
    return max(max(report.end_s for report in listed) / MAX_STEPS, MIN_REQUESTS * usual)


def _throughput(figure: go.Figure, name: str, report: ServingReport, index: int, step_s: float) -> None:
    points = report.throughput(step_s)
    figure.add_scatter(
        name=f"answers per second{', ' * bool(name)}{name}",
        mode="lines",
        x=[time_s for time_s, _ in points],
        y=[rate for _, rate in points],
        line={
            "color": THROUGHPUT_COLOURS[index % len(THROUGHPUT_COLOURS)],
            "width": 2.2,
            "dash": ("solid", "dash", "dot", "dashdot")[index % len(THROUGHPUT_COLOURS)],
        },
        hovertemplate="%{y:.3g} answers per second at %{x:.1f} s<extra></extra>",
        legendrank=1,
        row=1,
        col=1,
    )
    figure.update_yaxes(rangemode="tozero", row=1, col=1)


def _processors(figure: go.Figure, report: ServingReport, row: int, step_s: float, *, in_legend: bool) -> None:
    last = report.cluster.world_size - 1
    for rank, device in enumerate(report.cluster.devices):
        points = report.utilisation(rank, step_s)
        figure.add_scatter(
            name=device.name,
            legendgroup=device.name,
            showlegend=in_legend,
            legendrank=2,
            mode="lines",
            x=[time_s for time_s, _ in points],
            y=[100 * share for _, share in points],
            # Devices that do the same have one line on the other: the lower ones are wider, so that all are seen.
            line={
                "color": style.CYCLE[rank % len(style.CYCLE)],
                "width": 1.6 + min(3.0, 8.0 / max(1, last)) * (last - rank),
            },
            hovertemplate=f"{device.name}: %{{y:.0f}} % busy at %{{x:.1f}} s<extra></extra>",
            row=row,
            col=1,
        )
    figure.update_yaxes(range=[0, 105], tickvals=[0, 50, 100], ticktext=["0 %", "50 %", "100 %"], row=row, col=1)


def _events(figure: go.Figure, reports: Mapping[str, ServingReport], *, row: int) -> None:
    for kind, look in SHOWN_EVENTS.items():
        events = [
            (place + look["below"], report, event)
            for place, report in enumerate(reports.values())
            for event in report.events_of(kind)
            if not (kind == "switched" and event.plan_before < 0)  # the first plan
        ]
        if not events:
            continue
        named = sum(len(report.events_of(*SHOWN_EVENTS)) for report in reports.values()) <= MAX_NAMED_EVENTS
        figure.add_scatter(
            name=kind,
            legendrank=3,
            mode="markers+text" if named and kind in ("straggler", "lost", "recovered") else "markers",
            x=[event.time_s for _, _, event in events],
            y=[place for place, _, _ in events],
            text=[_device(report, event) for _, report, event in events],
            textposition="middle left",
            textfont={"size": 10.5},
            marker={
                "size": 11,
                "color": getattr(style, look["colour"]),
                "symbol": look["symbol"],
                "line": {"width": 1, "color": "white"},
            },
            hovertext=[_words(report, event) for _, report, event in events],
            row=row,
            col=1,
        )
    figure.update_yaxes(
        tickvals=list(range(len(reports))),
        ticktext=[f"{name} " for name in reports],
        range=[len(reports) - 0.3, -0.6],
        showgrid=False,
        row=row,
        col=1,
    )


def _faults(figure: go.Figure, report: ServingReport, end_s: float, *, rows: int) -> None:
    """Shade the time of each injected fault in every panel; write its name in the first panel if there is room."""
    shapes, names, free_from_s = [], [], 0.0
    for fault in sorted(report.faults, key=lambda fault: fault.start):
        if fault.start >= end_s:
            break
        stop = end_s if fault.end is None else min(fault.end, end_s)
        look = {
            "fillcolor": style.LIGHT_GREY if fault.kind == "slow" else PALE_RED,
            "opacity": 0.55,
            "layer": "below",
            "line": {"width": 0},
        }
        for number in ("", *range(2, rows + 1)):
            where = {"xref": f"x{number}", "yref": f"y{number} domain", "x0": fault.start, "x1": stop, "y0": 0, "y1": 1}
            shapes.append({"type": "rect", **look, **where})
        if fault.start >= free_from_s:
            name = report.cluster.devices[fault.rank].name
            did = {"slow": f"{fault.factor:g} times slower", "kill": "killed", "freeze": "frozen"}[fault.kind]
            text = f" {name} {did}"
            place = {
                "x": fault.start,
                "xref": "x",
                "y": 0.0,
                "yref": "y domain",
                "xanchor": "left",
                "yanchor": "bottom",
            }
            names.append({"text": text, "showarrow": False, "font": {"size": 11}, **place})
            free_from_s = fault.start + len(text) * CHARACTER_PIXELS / AXIS_PIXELS * end_s
    figure.update_layout(shapes=shapes, annotations=[*figure.layout.annotations, *names])


def _device(report: ServingReport, event: ServingEvent) -> str:
    return report.cluster.devices[event.rank].name if event.rank >= 0 else ""


def _words(report: ServingReport, event: ServingEvent) -> str:
    words = f"{event.time_s:.2f} s: <b>{event.kind}</b> {_device(report, event)}"
    if event.kind == "straggler":
        words += f", {event.value:.2g} times slower"
    if event.plan_after >= 0 and event.kind in ("switched", "excluded", "readmitted"):
        devices = ", ".join(report.cluster.devices[rank].name for rank in report.plans[event.plan_after].ranks)
        words += f"<br>plan {event.plan_after}: {devices}"
    return f"{words}<br>{event.detail}" if event.detail else words


def _summary(reports: Mapping[str, ServingReport]) -> str:
    parts = []
    unit = style.time_unit(max(report.percentile_s(0.95) for report in reports.values()))
    for name, report in reports.items():
        lost = f", {report.num_lost} lost" if report.num_lost else ", none lost"
        half, most = (f"{unit.text(report.percentile_s(share))}{report.mark}" for share in (0.5, 0.95))
        parts.append(
            f"{name}{': ' * bool(name)}{len(report.requests):,} answers{lost}; half within {half}, 95 % within {most}"
        )
    return "<br>".join(parts)
