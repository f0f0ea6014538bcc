"""Bars of where each device's time goes: compute by class, waiting for data, idle; and stacked bars of other shares.

For example how many samples of each label a device has, before a run whose data stay on the devices.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.timeline import Span, Timeline
from workbench.core.units import three_figures
from workbench.plots import style

PART_COLOURS = (style.BLUE, style.ORANGE, style.SKY_BLUE, style.GREEN, style.PURPLE, style.GREY)


def stacked_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    x_title: str,
    marks: Sequence[go.Scatter] = (),
    **words: Any,
) -> go.Figure:
    """Return one stacked bar for each name; parts[part][i] belongs to names[i].

    marks: drawn over the bars, also in further rows.  words: title, label, subtitle, see style.finish.
    """
    figure = go.Figure()
    for (part, values), next_colour in zip(parts.items(), cycle(PART_COLOURS), strict=False):
        colour = style.COLOURS[part] if part in style.RESTING else next_colour
        figure.add_bar(
            name=part,
            orientation="h",
            x=list(values),
            y=list(names),
            text=[three_figures(value) if value else "" for value in values],
            **style.INSIDE,
            textfont={"color": style.text_on(colour)},
            marker={"color": colour},
            hovertemplate=f"%{{y}}: {part} %{{x:.4g}}<extra></extra>",
            showlegend=True,
        )
    figure.add_traces(marks)
    num_rows = len({*names, *(name for mark in marks for name in mark.y)})
    figure.update_xaxes(title=x_title, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticksuffix=" ")
    look: dict[str, Any] = {"barmode": "stack", "bargap": 0.3, "uniformtext": {"minsize": 9, "mode": "hide"}}
    return style.finish(figure, height=185 + 38 * num_rows, **look, **words)


def time_by_class(timeline: Timeline) -> list[dict[str, float]]:
    """Return for each rank the seconds of each class of operation; they add up to the makespan.

    A moment with compute counts as that compute.  A moment with only transfers counts as 'waiting for data', the
    network time that no compute hides.  The rest is idle.
    """
    makespan_s = timeline.makespan_s
    return [
        _classes_of_rank([span for span in spans if span.end_s > span.start_s], makespan_s)
        for spans in timeline.by_rank()
    ]


def _classes_of_rank(spans: list[Span], makespan_s: float) -> dict[str, float]:
    moments = sorted(
        [(span.start_s, 1, index) for index, span in enumerate(spans)]
        + [(span.end_s, 0, index) for index, span in enumerate(spans)]
    )
    seconds: dict[str, float] = defaultdict(float)
    computing: dict[int, None] = {}
    moving: set[int] = set()
    covered_s = 0.0
    for time_s, begins, index in moments:
        if time_s > covered_s:
            name = (
                style.class_of(spans[next(iter(computing))].op)
                if computing
                else "waiting for data"
                if moving
                else "idle"
            )
            seconds[name] += time_s - covered_s
            covered_s = time_s
        if spans[index].op.is_communication:
            (moving.add if begins else moving.discard)(index)
        elif begins:
            computing[index] = None
        else:
            del computing[index]
    if makespan_s > covered_s:
        seconds["idle"] += makespan_s - covered_s
    return dict(seconds)


def step_name(name: str) -> str:
    """Return the step that a timeline's name is about: 'first epoch' of 'first epoch, measured'."""
    return name.rpartition(", ")[0] or name


def breakdown(timelines: Mapping[str, Timeline], *, note: str = "") -> go.Figure:
    """Return stacked bars per device, one panel per timeline: how the time from first to last operation is divided."""
    title = "Where each device's time goes"
    drawn = {name: timeline for name, timeline in timelines.items() if timeline.spans}
    if not drawn:
        return style.empty(title=title, label="", why="There is no timeline.", note=note)
    labels = sorted({timeline.label for timeline in drawn.values()})
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    most = max(len(style.evenly_spaced(timeline.world_size)) for timeline in drawn.values())
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[f"{name} ({timeline.label})" if len(labels) > 1 else name for name, timeline in drawn.items()],
        horizontal_spacing=0.13,
        vertical_spacing=0.32 / rows,
    )
    in_legend: set[str] = set()
    # The predicted and the measured panel of a step have one range, so that their bars can be compared.
    longest_s: dict[str, float] = defaultdict(float)
    for name, timeline in drawn.items():
        longest_s[step_name(name)] = max(longest_s[step_name(name)], timeline.makespan_s)
    for index, (panel, timeline) in enumerate(drawn.items()):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        ranks, end_s = style.evenly_spaced(timeline.world_size), longest_s[step_name(panel)]
        unit, mark = style.time_unit(end_s), style.mark_of(note) if timeline.source != "simulated" else ""
        seconds = time_by_class(timeline)
        for name, colour in style.COLOURS.items():
            if any(seconds[rank].get(name) for rank in ranks):
                figure.add_bar(
                    orientation="h",
                    y=list(range(len(ranks))),
                    x=[seconds[rank].get(name, 0.0) * unit.factor for rank in ranks],
                    name=name,
                    legendgroup=name,
                    showlegend=name not in in_legend,
                    legendrank=style.LEGEND_RANK[name],
                    marker={
                        "color": colour,
                        "line": {"width": 0.5, "color": "white"},
                        "pattern": style.PATTERNS.get(name),
                    },
                    customdata=[
                        [timeline.device_names[rank], seconds[rank].get(name, 0.0) / timeline.makespan_s]
                        for rank in ranks
                    ],
                    hovertemplate=f"%{{customdata[0]}}: {name} %{{x:.4g}} {unit.name}{mark} "
                    f"(%{{customdata[1]:.0%}})<extra></extra>",
                    **place,
                )
                in_legend.add(name)
        figure.update_xaxes(title=f"time ({unit.name}){mark}", range=[0, end_s * unit.factor], **place)
        figure.update_yaxes(
            **style.rows_for([f"{rank} {timeline.device_names[rank]}" for rank in ranks]),
            tickfont={"size": 12 if len(ranks) <= 16 else 9},
            **place,
        )
    figure.update_annotations(font={"size": 13, "color": style.BLACK})
    lane = 34 if most <= 8 else 18 if most <= 32 else 12
    return style.finish(
        figure,
        title=title,
        label=" and ".join(reversed(labels)),
        subtitle="a transfer that runs while the device computes costs it nothing and is not shown",
        note=note,
        height=190 + rows * (90 + lane * most),
        margin={"t": 120},
        barmode="stack",
        bargap=0.25 if most <= 16 else 0.12,
    )


NUM_RANGES = 5  # ranges of the labels if they are numbers, not classes
OTHERS = "others"


def device_samples(
    shares: Sequence[Sequence[int]],
    labels: Sequence[int | float | str],
    names: Sequence[str],
    *,
    class_names: Sequence[str] = (),
    rule: str = "",
) -> go.Figure:
    """Return a bar for each device: its samples by label.

    shares: one sequence of indices into labels for each device, as tasks.batching.split_samples returns them.
    labels: classes, numbers (shown in five ranges of equal width), or names such as topics.  names: the devices'.
    class_names: the classes' names; none: labels are numbers.  Labels beyond the five most frequent are one part,
    'others'.
    """
    named = (
        _ranges(labels)
        if isinstance(labels[0], float)
        else [str(class_names[int(label)] if class_names else label) for label in labels]
    )
    order = (
        list(dict.fromkeys(named))
        if isinstance(labels[0], str)
        else [name for _, name in sorted(set(zip(labels, named, strict=True)))]
    )
    counts = Counter(named)
    if len(counts) > len(PART_COLOURS):
        named_parts = {name for name, _ in counts.most_common(len(PART_COLOURS) - 1)}
        named = [name if name in named_parts else OTHERS for name in named]
        order = [name for name in order if name in named_parts] + [OTHERS]
    by_device = [Counter(named[index] for index in share) for share in shares]
    parts = {name: [count_of[name] for count_of in by_device] for name in dict.fromkeys(order)}
    title = f"Where the {sum(map(len, shares)):,} training samples lie"
    return stacked_bars(
        [f"{name} ({len(share):,})" for name, share in zip(names, shares, strict=True)],
        parts,
        title=title,
        label="",
        x_title="samples",
        subtitle=f"split by {rule}" if rule else "",
    )


def _ranges(numbers: Sequence[int | float | str]) -> list[str]:
    values = [float(number) for number in numbers]
    low, width = min(values), (max(values) - min(values)) / NUM_RANGES or 1.0
    range_names = []
    for value in values:
        bin_index = min(int((value - low) / width), NUM_RANGES - 1)
        range_names.append(f"{low + bin_index * width:.3g} to {low + (bin_index + 1) * width:.3g}")
    return range_names
