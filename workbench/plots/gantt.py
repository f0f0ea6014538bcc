"""A Gantt chart of any timeline: a lane per device with its compute, sends, receives and idle time."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import plotly.graph_objects as go

from workbench.core.schedule import Ranks
from workbench.core.timeline import Span, Timeline, busy_of
from workbench.core.units import size_words
from workbench.plots import style

MAX_BARS = 16_000  # about as many as a browser draws smoothly
MIN_DEVICES = 4  # draw at least this many devices, and rather a shorter time
CHART_PIXELS = 900  # approximate width of the time axis: decides which labels and gaps are visible

# Centre (from the lane's middle, downwards) and height of the parts of a lane that is one unit high.
COMPUTE, SENDING, RECEIVING, NETWORK = (-0.14, 0.56), (0.24, 0.13), (0.38, 0.13), (0.31, 0.27)


class Bar(NamedTuple):
    """A rectangle of the chart, in seconds and lane units."""

    start_s: float
    end_s: float
    centre: float
    height: float
    label: str
    hover: str


def gantt(timeline: Timeline | None, *, note: str = "") -> go.Figure:
    """Return the Gantt chart of a timeline, simulated or measured.  None: one that the report does not have.

    Compute takes the upper part of a device's lane (several compute streams are stacked), the network the lower part:
    sends above receives, collectives over both.  Grey is idle.  Numbers of micro-batches (of tiles, in single-shot
    inference) are written where they fit.  note: shown in the title, such as busy_note's; its mark then follows the
    times.
    """
    if timeline is None:
        return style.not_recorded("What each device does", note)
    title = timeline.title or "What each device does"
    if not timeline.spans:
        return style.empty(title=title, label=timeline.label, why="Nothing was executed.", note=note)
    ranks, shown, end_s = _shown(timeline)
    unit, mark = style.time_unit(end_s), style.mark_of(note)
    bars = _bars(shown, ranks, unit)
    lane_pixels = next(
        pixels for limit, pixels in ((8, 62), (16, 36), (32, 25), (style.MAX_DEVICES, 15)) if len(ranks) <= limit
    )
    figure = go.Figure(_idle(timeline, ranks, unit))
    for name in style.COLOURS:
        if name in bars:
            figure.add_trace(_trace(name, bars[name], end_s, lane_pixels, unit))
    figure.update_xaxes(title=f"time ({unit.name}){mark}", range=[0, end_s * unit.factor])
    figure.update_yaxes(
        tickvals=[row + COMPUTE[0] for row in range(len(ranks))],
        ticktext=[f"{rank} {timeline.device_names[rank]} " for rank in ranks],
        range=[len(ranks) - 0.5, -0.5],
        showgrid=False,
        tickfont={"size": 12 if len(ranks) <= 32 else 10},
    )
    subtitle = (
        f"{unit.text(timeline.makespan_s)}{mark} in all; idle or waiting (not computing): "
        f"{timeline.bubble_fraction:.0%}{mark}"
    )
    subtitle += style.more_devices(timeline.world_size, len(ranks))
    if end_s < timeline.makespan_s:
        subtitle += f"; the first {unit.text(end_s)} shown"
    if timeline.clock_bound_s:
        subtitle += f"; clocks agree to within {unit.text(timeline.clock_bound_s)}"
    return style.finish(
        figure,
        title=title,
        label=timeline.label,
        subtitle=subtitle,
        note=note,
        height=185 + lane_pixels * len(ranks),
        barmode="overlay",
        bargap=0,
    )


def _shown(timeline: Timeline) -> tuple[tuple[int, ...], list[Span], float]:
    """Return the ranks, spans and seconds that a browser can draw: all, or else fewer devices, or else only the
    beginning.
    """
    limit = style.MAX_DEVICES
    while True:
        ranks = style.evenly_spaced(timeline.world_size, limit)
        chosen = frozenset(ranks)
        spans = sorted((span for span in timeline.spans if span.rank in chosen), key=lambda span: span.start_s)
        if len(spans) <= MAX_BARS:
            return ranks, spans, timeline.makespan_s
        if limit <= MIN_DEVICES:
            return ranks, spans[:MAX_BARS], spans[MAX_BARS].start_s
        limit = max(MIN_DEVICES, min(limit - 1, limit * MAX_BARS // len(spans)))


def _bars(spans: list[Span], ranks: Ranks, unit: style.Unit) -> dict[str, list[Bar]]:
    row_of = {rank: row for row, rank in enumerate(ranks)}
    streams: dict[int, list[str]] = defaultdict(list)
    for span in spans:
        if not span.op.is_communication and span.op.stream not in streams[span.rank]:
            streams[span.rank].append(span.op.stream)
    bars: dict[str, list[Bar]] = defaultdict(list)
    for span in spans:
        name = style.class_of(span.op)
        centre, height = {"send": SENDING, "receive": RECEIVING, "collective": NETWORK}.get(name, COMPUTE)
        if not span.op.is_communication:
            rank_streams = streams[span.rank]
            height /= len(rank_streams)
            centre += (rank_streams.index(span.op.stream) - (len(rank_streams) - 1) / 2) * height
        label = style.number_of(span.op)
        bars[name].append(Bar(span.start_s, span.end_s, row_of[span.rank] + centre, height, label, _hover(span, unit)))
    return bars


def _hover(span: Span, unit: style.Unit) -> str:
    words = f"<b>{span.op.label}</b> {unit.text(span.end_s - span.start_s)}, from {unit.text(span.start_s)}"
    if span.op.ranks:
        words += "<br>" + (" to " if span.op.kind in ("SEND", "RECV") else ", ").join(
            f"rank {rank}" for rank in span.op.ranks
        )
    if span.nbytes:
        words += f"<br>{size_words(span.nbytes)}"
    if span.late_s > 0:
        words += f"<br>{unit.text(span.late_s)} late: the host was busy"
    return words


def _trace(name: str, bars: list[Bar], end_s: float, lane_pixels: int, unit: style.Unit) -> go.Bar:
    def fits(bar: Bar) -> bool:
        wide = (bar.end_s - bar.start_s) / end_s * CHART_PIXELS
        return wide > 7 * len(bar.label) + 3 and bar.height * lane_pixels >= 12

    return go.Bar(
        name=name,
        orientation="h",
        base=[bar.start_s * unit.factor for bar in bars],
        x=[(bar.end_s - bar.start_s) * unit.factor for bar in bars],
        y=[bar.centre for bar in bars],
        width=[bar.height for bar in bars],
        text=[bar.label if fits(bar) else "" for bar in bars],
        constraintext="none",
        **style.INSIDE,
        textfont={"size": 11 if lane_pixels > 30 else 10, "color": style.text_on(style.COLOURS[name])},
        hovertext=[bar.hover for bar in bars],
        hovertemplate="%{hovertext}<extra>" + name + "</extra>",
        legendrank=style.LEGEND_RANK[name],
        marker={"color": style.COLOURS[name], "line": {"width": 0.5 if len(bars) < 2000 else 0, "color": "white"}},
    )


def _idle(timeline: Timeline, ranks: Ranks, unit: style.Unit) -> go.Bar:
    """Return the background of the compute lanes: the time under no bar is idle."""
    spans, makespan_s = timeline.by_rank(), timeline.makespan_s

    def idle_share(rank: int) -> float:
        return 1 - busy_of(spans[rank]) / makespan_s if makespan_s else 0.0

    return go.Bar(
        name="idle",
        orientation="h",
        base=[0.0] * len(ranks),
        x=[makespan_s * unit.factor] * len(ranks),
        y=[row + COMPUTE[0] for row in range(len(ranks))],
        width=[COMPUTE[1]] * len(ranks),
        marker={"color": style.COLOURS["idle"], "line": {"width": 0}},
        hovertext=[f"{timeline.device_names[rank]}: idle or waiting {idle_share(rank):.0%}" for rank in ranks],
        legendrank=style.LEGEND_RANK["idle"],
    )
