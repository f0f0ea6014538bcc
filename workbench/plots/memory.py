"""A cluster's devices as described (speed, memory, link), and each device's memory over time with its budget."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.cluster import Cluster
from workbench.core.timeline import MemorySample, Timeline
from workbench.plots import style


def cluster(cluster: Cluster) -> go.Figure:
    """Return bars of speed, memory budget and link rate for each device of a cluster."""
    ranks = style.shown_ranks(cluster.world_size)
    devices = [cluster.devices[rank] for rank in ranks]
    memory = style.byte_unit(max(device.memory_bytes for device in devices))
    panels = [
        ("sustained GFLOP/s (fp32)", style.BLUE, [device.flops_per_s / 1e9 for device in devices]),
        (f"memory budget ({memory.name})", style.ORANGE, [device.memory_bytes * memory.factor for device in devices]),
        ("link (Mbit/s)", style.GREEN, [device.link.bytes_per_s * 8e-6 for device in devices]),
    ]
    shares = [device.host_share for device in devices if device.host_share is not None]
    if len(shares) == len(devices):
        panels.insert(0, ("share of a core (emulated)", style.SKY_BLUE, shares))
    figure = make_subplots(
        rows=1, cols=len(panels), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[panel[0] for panel in panels]
    )
    for column, (name, colour, values) in enumerate(panels, start=1):
        figure.add_bar(
            orientation="h",
            y=list(range(len(devices))),
            x=values,
            text=[f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values],
            textposition="auto",
            textangle=0,
            insidetextfont={"color": "white" if colour in (style.BLUE, style.GREEN) else "black"},
            name=name,
            marker={"color": colour},
            showlegend=False,
            customdata=[[device.name, device.model] for device in devices],
            hovertemplate="%{customdata[0]} %{customdata[1]}<br>" + name + ": %{text}<extra></extra>",
            row=1,
            col=column,
        )
        figure.update_xaxes(range=[0, max(values) * 1.12], nticks=5, zeroline=False, row=1, col=column)
    rows = style.rows_for([f"{rank} {device.name}" for rank, device in zip(ranks, devices, strict=True)])
    figure.update_yaxes(range=rows["range"], showgrid=False)
    figure.update_yaxes(col=1, **rows)
    figure.update_annotations(font={"size": 13})
    subtitle = cluster.description or cluster.size_words
    if cluster.world_size > len(ranks):
        subtitle += f"; {len(ranks)} of {cluster.world_size:,} devices shown"
    return style.finish(
        figure,
        title=f"Cluster '{cluster.name}'",
        label="as described, not measured",
        subtitle=subtitle,
        height=170 + (34 if len(devices) <= 8 else 20) * len(devices),
        margin={"t": 110},
        bargap=0.25,
    )


MAX_POINTS = 2_000  # of one device's curve


def memory(timeline: Timeline | None, *, note: str = "") -> go.Figure:
    """Return a panel per device: bytes in use (filled) and the budget (dashed); vermillion above the budget.

    None: a timeline that the report does not have.
    """
    if timeline is None:
        return style.not_kept("Memory", note)
    title = f"Memory: {timeline.title}" if timeline.title else "Memory"
    if not any(timeline.memory):
        return style.empty(title=title, label=timeline.label, why="No memory was recorded in this timeline.", note=note)
    ranks = style.shown_ranks(timeline.world_size)
    columns = 1 if len(ranks) <= 3 else 2 if len(ranks) <= 8 else 4
    rows = -(-len(ranks) // columns)
    unit, clock = (
        style.byte_unit(max(*map(timeline.peak_bytes, range(timeline.world_size)), *timeline.budget_bytes, 1)),
        style.time_unit(timeline.makespan_s),
    )
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_xaxes=True,
        vertical_spacing=min(0.12, 0.28 / rows),
        horizontal_spacing=0.07 if columns < 4 else 0.04,
        subplot_titles=[_heading(timeline, rank) for rank in ranks],
    )
    for index, rank in enumerate(ranks):
        row, column = index // columns + 1, index % columns + 1
        budget = timeline.budget_bytes[rank] if timeline.budget_bytes else 0
        peak = timeline.peak_bytes(rank)
        over = bool(budget) and peak > budget
        samples = _thinned(timeline.memory[rank])
        figure.add_scatter(
            x=[sample.time_s * clock.factor for sample in samples] + [timeline.makespan_s * clock.factor],
            y=[sample.nbytes * unit.factor for sample in samples] + [samples[-1].nbytes * unit.factor if samples else 0],
            mode="lines",
            line={"shape": "hv", "color": style.VERMILLION if over else style.BLUE, "width": 1.5},
            fill="tozeroy",
            fillcolor="rgba(213,94,0,0.25)" if over else "rgba(86,180,233,0.35)",
            name=timeline.device_names[rank],
            hovertemplate=f"%{{y:.3g}} {unit.name} at %{{x:.4g}} {clock.name}<extra>{timeline.device_names[rank]}</extra>",
            showlegend=False,
            row=row,
            col=column,
        )
        if budget:
            figure.add_scatter(
                x=[0, timeline.makespan_s * clock.factor],
                y=[budget * unit.factor] * 2,
                mode="lines",
                line={"dash": "dash", "color": style.BLACK, "width": 1.5},
                name="budget",
                hovertemplate=f"budget %{{y:.4g}} {unit.name}<extra></extra>",
                showlegend=False,
                row=row,
                col=column,
            )
        figure.update_yaxes(range=[0, max(peak, budget, 1) * unit.factor * 1.12], nticks=4, row=row, col=column)
    figure.update_xaxes(zeroline=False, range=[0, timeline.makespan_s * clock.factor])
    figure.update_yaxes(zeroline=False)
    for column in range(1, columns + 1):
        figure.update_xaxes(title=f"time ({clock.name})", row=rows, col=column)
    figure.update_yaxes(title=unit.name, col=1)
    figure.update_annotations(font={"size": 12.5 if columns < 4 else 10.5})
    lines = f"bytes of the job in use, in {unit.name}"
    if timeline.budget_bytes:
        lines += "; dashed: the device's budget"
    if timeline.world_size > len(ranks):
        lines += f"; {len(ranks)} of {timeline.world_size:,} devices shown"
    row_pixels = 170 if columns < 4 else 115
    return style.finish(
        figure, title=title, label=timeline.label, subtitle=lines, note=note, height=170 + row_pixels * rows, margin={"t": 115}
    )


def _heading(timeline: Timeline, rank: int) -> str:
    peak = timeline.peak_bytes(rank)
    if not timeline.budget_bytes:
        return f"{timeline.device_names[rank]}: peak {style.byte_unit(peak).text(peak)}"
    budget = timeline.budget_bytes[rank]
    heading = f"{timeline.device_names[rank]}: peak {style.byte_unit(peak).text(peak)} of {style.byte_unit(budget).text(budget)}"
    return f"<b>{heading}: too much</b>" if peak > budget else heading


def _thinned(samples: tuple[MemorySample, ...]) -> list[MemorySample]:
    """Keep the highest sample of each run of neighbours, so that no peak is lost."""
    step = -(-len(samples) // MAX_POINTS)
    if step <= 1:
        return list(samples)
    return [max(samples[at : at + step], key=lambda sample: sample.nbytes) for at in range(0, len(samples), step)]
