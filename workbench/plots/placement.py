"""The placement of a plan: which device has which layers, and each device's memory by purpose (PAC+, Fig. 10a, Fig. 17b)."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.plots import style

ROW_PIXELS = 34


def placement(plan: Plan, cluster: Cluster) -> go.Figure:
    """Return a row for each device with its layers, coloured by stage; inside: its samples of a micro-batch."""
    figure = go.Figure()
    for index, stage in enumerate(plan.stages):
        figure.add_bar(
            name=f"stage {index}",
            orientation="h",
            base=[stage.start] * len(stage.shares),
            x=[stage.num_layers] * len(stage.shares),
            y=[share.rank for share in stage.shares],
            width=0.72,
            text=[f"{share.samples} of {plan.micro_batch_size}" for share in stage.shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "white" if style.CYCLE[index % len(style.CYCLE)] not in (style.ORANGE, style.SKY_BLUE) else "black"},
            marker={"color": style.CYCLE[index % len(style.CYCLE)], "line": {"width": 1, "color": "white"}},
            hovertext=[
                f"{cluster.devices[share.rank].name}: layers {stage.start} to {stage.stop - 1}, "
                f"{share.samples} of {plan.micro_batch_size} samples of a micro-batch"
                for share in stage.shares
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=True,
        )
    idle = [rank for rank in range(cluster.world_size) if plan.stage_of(rank) is None]
    for rank in idle:
        figure.add_annotation(x=0, y=rank, text=" holds nothing", showarrow=False, xanchor="left", font={"color": style.DARK_GREY})
    for stage in plan.stages[1:]:
        figure.add_vline(x=stage.start, line={"color": style.DARK_GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(title="layers", range=[0, plan.num_layers], zeroline=False, dtick=max(1, plan.num_layers // 12))
    _rows(figure, cluster)
    return style.finish(
        figure,
        title=plan.where().capitalize(),
        label="",
        subtitle="inside a bar: the device's samples of each micro-batch",
        height=185 + ROW_PIXELS * cluster.world_size,
        below=95,
        barmode="overlay",
        bargap=0,
    )


def needs(
    needed: Mapping[int, Mapping[str, int]], cluster: Cluster, *, title: str = "What each device needs in the first epoch"
) -> go.Figure:
    """Return each device's planned bytes by purpose and its budget; the subtitle names a device over its budget.

    needed: rank -> purpose -> bytes, the same purposes for every rank.
    """
    total = {rank: sum(parts.values()) for rank, parts in needed.items()}
    unit = style.byte_unit(max([device.memory_bytes for device in cluster.devices] + list(total.values())))
    ranks = sorted(needed)
    figure = go.Figure()
    for name, colour in zip(needed[ranks[0]], (style.BLUE, style.SKY_BLUE, style.ORANGE, style.GREY), strict=False):
        sizes = [needed[rank][name] for rank in ranks]
        figure.add_bar(
            name=name,
            orientation="h",
            x=[nbytes * unit.factor for nbytes in sizes],
            y=ranks,
            width=0.6,
            marker={"color": colour},
            hovertext=[
                f"{cluster.devices[rank].name}: {name} {style.byte_unit(size).text(size)}" for rank, size in zip(ranks, sizes, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    over = [rank for rank in ranks if total[rank] > cluster.devices[rank].memory_bytes]
    for is_over, colour, name in ((False, "black", "budget"), (True, style.VERMILLION, "budget, exceeded")):
        shown = [rank for rank in range(cluster.world_size) if (rank in over) is is_over]
        if shown:
            figure.add_scatter(
                name=name,
                mode="markers",
                x=[cluster.devices[rank].memory_bytes * unit.factor for rank in shown],
                y=shown,
                marker={"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour}},
                hovertext=[
                    f"{cluster.devices[rank].name}: {style.byte_unit(b := cluster.devices[rank].memory_bytes).text(b)}" for rank in shown
                ],
                hovertemplate="%{hovertext}<extra>budget</extra>",
            )
    figure.update_xaxes(title=f"memory ({unit.name})", rangemode="tozero", zeroline=False, gridcolor=style.LIGHT_GREY)
    _rows(figure, cluster)
    names = ", ".join(f"{cluster.devices[rank].name} needs {style.byte_unit(n := total[rank]).text(n)}" for rank in over)
    return style.finish(
        figure,
        title=title,
        label="planned",
        subtitle=f"Out of memory: {names}" if over else "every device is within its budget",
        height=185 + ROW_PIXELS * cluster.world_size,
        below=95,
        barmode="stack",
        bargap=0,
    )


def _rows(figure: go.Figure, cluster: Cluster) -> None:
    figure.update_yaxes(
        showgrid=False, zeroline=False, **style.rows_for([f"{rank} {one.name}" for rank, one in enumerate(cluster.devices)])
    )
