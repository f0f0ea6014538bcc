"""A cluster's devices as described, each device's memory over time; a plan's placement and its memory by purpose (PAC+,
Fig. 10a, 17b).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.timeline import MemorySample, Timeline
from workbench.core.units import size_words
from workbench.plots import style
from workbench.plots.breakdown import stacked_bars


def cluster(cluster: Cluster) -> go.Figure:
    """Return bars of speed, memory budget and link rate for each device of a cluster."""
    ranks = style.evenly_spaced(cluster.world_size)
    devices = [cluster.devices[rank] for rank in ranks]
    memory = style.byte_unit(max(device.memory_bytes for device in devices))
    panels = [
        ("sustained GFLOP/s (fp32)", style.BLUE, [device.flops_per_s / 1e9 for device in devices]),
        (f"memory budget ({memory.name})", style.ORANGE, [device.memory_bytes * memory.factor for device in devices]),
        ("link (Mbit/s)", style.GREEN, [device.link.mbit_per_s for device in devices]),
    ]
    shares = [device.host_share for device in devices if device.host_share is not None]
    if len(shares) == len(devices):
        panels.insert(0, ("share of a core (emulated)", style.SKY_BLUE, shares))
    figure = make_subplots(
        rows=1,
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[panel[0] for panel in panels],
    )
    for column, (name, colour, values) in enumerate(panels, start=1):
        texts = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
        hovers = [
            f"{device.name} {device.model}<br>{name}: {text}" for device, text in zip(devices, texts, strict=True)
        ]
        style.panel_of_bars(figure, values, texts, [colour] * len(values), hovers, name=name, row=1, col=column)
    rows = style.rows_for([f"{rank} {device.name}" for rank, device in zip(ranks, devices, strict=True)])
    figure.update_yaxes(range=rows["range"], showgrid=False)
    figure.update_yaxes(col=1, **rows)
    figure.update_annotations(font={"size": 13})
    subtitle = (cluster.description or cluster.in_words) + style.more_devices(cluster.world_size, len(ranks))
    return style.finish(
        figure,
        title=f"Cluster '{cluster.name}'",
        label="as described, not measured",
        subtitle=subtitle,
        height=170 + (34 if len(devices) <= 8 else 20) * len(devices),
        margin={"t": 110},
    )


BUDGET_IN_SIGHT = 2
"""A budget up to so many times the highest peak is drawn."""
MAX_POINTS = 2_000  # of one device's curve


def memory(timeline: Timeline | None, *, note: str = "") -> go.Figure:
    """Return a panel per device: the bytes of values (filled), the memory in use at the end of the epoch (dotted), if
    it was measured, and the budget (dashed); vermillion above the budget.

    None: a timeline that the report does not have.
    """
    if timeline is None:
        return style.not_recorded("Memory", note)
    title = f"Memory: {timeline.title}" if timeline.title else "Memory"
    if not any(timeline.memory):
        return style.empty(title=title, label=timeline.label, why="No memory was recorded in this timeline.", note=note)
    ranks = style.evenly_spaced(timeline.world_size)
    columns = 1 if len(ranks) <= 3 else 2 if len(ranks) <= 8 else 4
    rows = -(-len(ranks) // columns)
    highest = max(*map(timeline.peak_bytes, range(timeline.world_size)), *timeline.in_use_bytes, 1)
    # All panels have one range, so that devices compare.  It follows the bytes in use: a budget far above them would
    # press every curve flat, and the panel's heading names it anyway.
    top = 1.12 * max([highest, *(budget for budget in timeline.budget_bytes if budget <= BUDGET_IN_SIGHT * highest)])
    unit = style.byte_unit(top)
    clock = style.time_unit(timeline.makespan_s)
    end = timeline.makespan_s * clock.factor
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
        panel = {"mode": "lines", "showlegend": False, "row": row, "col": column}
        figure.add_scatter(
            x=[sample.time_s * clock.factor for sample in samples] + [end],
            y=[sample.nbytes * unit.factor for sample in samples]
            + [samples[-1].nbytes * unit.factor if samples else 0],
            line={"shape": "hv", "color": style.VERMILLION if over else style.BLUE, "width": 1.5},
            fill="tozeroy",
            fillcolor="rgba(213,94,0,0.25)" if over else "rgba(86,180,233,0.35)",
            name=timeline.device_names[rank],
            hovertemplate=f"%{{y:.3g}} {unit.name} at %{{x:.4g}} "
            f"{clock.name}<extra>{timeline.device_names[rank]}</extra>",
            **panel,
        )
        in_use = timeline.in_use_bytes[rank] if timeline.in_use_bytes else 0
        for name, words, level, dash, colour in (
            ("in use", "in use at the end of the epoch", in_use, "dot", style.DARK_GREY),
            ("budget", "budget", budget, "dash", style.BLACK),
        ):
            if 0 < level <= top:
                line = {"dash": dash, "color": colour, "width": 1.5}
                hover = f"{words} %{{y:.4g}} {unit.name}<extra></extra>"
                heights = [level * unit.factor] * 2
                figure.add_scatter(x=[0, end], y=heights, line=line, name=name, hovertemplate=hover, **panel)
        figure.update_yaxes(range=[0, top * unit.factor], nticks=4, row=row, col=column)
    figure.update_xaxes(range=[0, end])
    for column in range(1, columns + 1):
        figure.update_xaxes(title=f"time ({clock.name})", row=rows, col=column)
    figure.update_yaxes(title=unit.name, col=1)
    figure.update_annotations(font={"size": 12.5 if columns < 4 else 10.5})
    lines = f"filled: bytes of values (weights, activations, gradients), in {unit.name}"
    if any(timeline.in_use_bytes):
        lines += "; dotted: memory in use at the epoch's end, with buffers and what is kept for later"
    if any(budget <= top for budget in timeline.budget_bytes):
        lines += "; dashed: the device's budget"
    lines += style.more_devices(timeline.world_size, len(ranks))
    row_pixels = 170 if columns < 4 else 115
    return style.finish(
        figure,
        title=title,
        label=timeline.label,
        subtitle=lines,
        note=note,
        height=170 + row_pixels * rows,
        margin={"t": 115},
    )


def _heading(timeline: Timeline, rank: int) -> str:
    peak, in_use = timeline.peak_bytes(rank), timeline.in_use_bytes[rank] if timeline.in_use_bytes else 0
    heading = f"{timeline.device_names[rank]}: peak {size_words(peak)}"
    if in_use:
        heading += f" of values, {size_words(in_use)} in use,"
    if not timeline.budget_bytes:
        return heading
    budget = timeline.budget_bytes[rank]
    heading += f" of {size_words(budget)}"
    return f"<b>{heading}: too much</b>" if peak > budget else heading


def _thinned(samples: tuple[MemorySample, ...]) -> list[MemorySample]:
    """Keep the highest sample of each run of neighbours, so that no peak is lost."""
    step = -(-len(samples) // MAX_POINTS)
    if step <= 1:
        return list(samples)
    return [
        max(samples[start : start + step], key=lambda sample: sample.nbytes) for start in range(0, len(samples), step)
    ]


ROW_PIXELS = 34


def placement(plan: Plan, cluster: Cluster) -> go.Figure:
    """Return a row for each device with its layers, coloured by stage; inside: its samples of a micro-batch."""
    figure = go.Figure()
    for index, (stage, colour) in enumerate(zip(plan.stages, cycle(style.CYCLE), strict=False)):
        figure.add_bar(
            name=f"stage {index}",
            orientation="h",
            base=[stage.start] * len(stage.shares),
            x=[stage.num_layers] * len(stage.shares),
            y=[share.rank for share in stage.shares],
            width=0.72,
            text=[f"{share.samples} of {plan.micro_batch_size}" for share in stage.shares],
            **style.INSIDE,
            textfont={"color": style.text_on(colour)},
            marker={"color": colour, "line": {"width": 1, "color": "white"}},
            hovertext=[
                f"{cluster.devices[share.rank].name}: layers {stage.start} to {stage.stop - 1}, "
                f"{share.samples} of {plan.micro_batch_size} samples of a micro-batch"
                for share in stage.shares
            ],
            showlegend=True,
        )
    idle = [rank for rank in range(cluster.world_size) if plan.stage_of(rank) is None]
    for rank in idle:
        figure.add_annotation(
            x=0, y=rank, text=" holds nothing", showarrow=False, xanchor="left", font={"color": style.DARK_GREY}
        )
    for stage in plan.stages[1:]:
        figure.add_vline(x=stage.start, line=style.DOTTED)
    figure.update_xaxes(title="layers", range=[0, plan.num_layers], dtick=max(1, plan.num_layers // 12))
    figure.update_yaxes(showgrid=False, **style.rows_for(_names(cluster)))
    return style.finish(
        figure,
        title=plan.where().capitalize(),
        label="",
        subtitle="inside a bar: the device's samples of each micro-batch",
        height=185 + ROW_PIXELS * cluster.world_size,
        barmode="overlay",
        bargap=0,
    )


def needs(
    need_bytes: Mapping[int, Mapping[str, int]],
    cluster: Cluster,
    *,
    title: str = "What each device needs in the first epoch",
) -> go.Figure:
    """Return each device's planned bytes by purpose and its budget; the subtitle names a device over its budget.

    need_bytes: rank -> purpose -> bytes, the same purposes for every rank; those that need nothing are left out.
    """
    total = {rank: sum(parts.values()) for rank, parts in need_bytes.items()}
    unit = style.byte_unit(max([device.memory_bytes for device in cluster.devices] + list(total.values())))
    ranks, names = sorted(need_bytes), _names(cluster)
    purposes = [name for name in need_bytes[ranks[0]] if any(need_bytes[rank][name] for rank in ranks)]
    parts = {name: [need_bytes[rank][name] * unit.factor for rank in ranks] for name in purposes}
    over = [rank for rank in ranks if total[rank] > cluster.devices[rank].memory_bytes]
    marks = []
    for is_over, colour, name in ((False, "black", "budget"), (True, style.VERMILLION, "budget, exceeded")):
        shown = [rank for rank in range(cluster.world_size) if (rank in over) is is_over]
        budgets = [cluster.devices[rank].memory_bytes for rank in shown]
        mark = {"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour}}
        x, y = [nbytes * unit.factor for nbytes in budgets], [names[rank] for rank in shown]
        marks += [
            go.Scatter(
                name=name, mode="markers", x=x, y=y, marker=mark, hovertext=[unit.text(budget) for budget in budgets]
            )
        ] * bool(shown)
    over_budget = ", ".join(f"{cluster.devices[rank].name} needs {size_words(total[rank])}" for rank in over)
    verdict = f"Out of memory: {over_budget}" if over else "every device is within its budget"
    words = {"title": title, "label": "planned", "subtitle": verdict, "x_title": f"memory ({unit.name})"}
    figure = stacked_bars([names[rank] for rank in ranks], parts, marks=marks, **words)
    # An idle device, of which only the budget is drawn, keeps its place.
    return figure.update_yaxes(categoryorder="array", categoryarray=[*map(style.only_our_tags, names)])


def _names(cluster: Cluster) -> list[str]:
    return [f"{rank} {device.name}" for rank, device in enumerate(cluster.devices)]
