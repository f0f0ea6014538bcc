"""A small overview of a cluster: speed, memory and link of each device, as described."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.cluster import Cluster
from workbench.plots.style import BLUE, GREEN, ORANGE, SKY_BLUE, byte_unit, finish, rows_for, shown_ranks


def cluster(cluster: Cluster) -> go.Figure:
    """Return bars of speed, memory budget and link rate for each device of a cluster."""
    ranks = shown_ranks(cluster.world_size)
    devices = [cluster.devices[rank] for rank in ranks]
    memory = byte_unit(max(device.memory_bytes for device in devices))
    panels = [
        ("sustained GFLOP/s (fp32)", BLUE, [device.flops_per_s / 1e9 for device in devices]),
        (f"memory budget ({memory.name})", ORANGE, [device.memory_bytes * memory.factor for device in devices]),
        ("link (Mbit/s)", GREEN, [device.link.bytes_per_s * 8e-6 for device in devices]),
    ]
    shares = [device.host_share for device in devices if device.host_share is not None]
    if len(shares) == len(devices):
        panels.insert(0, ("share of a core (emulated)", SKY_BLUE, shares))
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
            insidetextfont={"color": "white" if colour in (BLUE, GREEN) else "black"},
            name=name,
            marker={"color": colour},
            showlegend=False,
            customdata=[[device.name, device.model] for device in devices],
            hovertemplate="%{customdata[0]} %{customdata[1]}<br>" + name + ": %{text}<extra></extra>",
            row=1,
            col=column,
        )
        figure.update_xaxes(range=[0, max(values) * 1.12], nticks=5, zeroline=False, row=1, col=column)
    rows = rows_for([f"{rank} {device.name}" for rank, device in zip(ranks, devices, strict=True)])
    figure.update_yaxes(range=rows["range"], showgrid=False)
    figure.update_yaxes(col=1, **rows)
    figure.update_annotations(font={"size": 13})
    subtitle = cluster.description or cluster.size_words
    if cluster.world_size > len(ranks):
        subtitle += f"; {len(ranks)} of {cluster.world_size:,} devices shown"
    return finish(
        figure,
        title=f"Cluster '{cluster.name}'",
        label="as described, not measured",
        subtitle=subtitle,
        height=170 + (34 if len(devices) <= 8 else 20) * len(devices),
        margin={"t": 110},
        bargap=0.25,
    )
