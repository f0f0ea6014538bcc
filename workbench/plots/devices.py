"""A small overview of a cluster: speed, memory and link of each device, as described."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.cluster import Cluster
from workbench.plots.style import BLUE, GREEN, ORANGE, byte_unit, finish, shown_ranks


def cluster(cluster: Cluster) -> go.Figure:
    """Return bars of speed, memory budget and link rate for each device of a cluster."""
    ranks = shown_ranks(cluster.world_size)
    devices = [cluster.devices[rank] for rank in ranks]
    shares = all(device.host_share is not None for device in devices)
    memory = byte_unit(max(device.memory_bytes for device in devices))
    panels: list[tuple[str, list[float], list[str], str]] = [
        (
            (
                "share of one core of the host",
                [device.host_share or 0.0 for device in devices],
                [f"{device.host_share:g}" for device in devices],
                BLUE,
            )
            if shares
            else (
                "sustained GFLOP/s (fp32)",
                [device.flops_per_s / 1e9 for device in devices],
                [f"{device.flops_per_s / 1e9:.3g}" for device in devices],
                BLUE,
            )
        ),
        (
            f"memory budget ({memory.name})",
            [device.memory_bytes * memory.factor for device in devices],
            [f"{device.memory_bytes * memory.factor:.3g}" for device in devices],
            ORANGE,
        ),
        (
            "link (Mbit/s)",
            [device.link.bytes_per_s * 8e-6 for device in devices],
            [f"{device.link.bytes_per_s * 8e-6:.4g}" for device in devices],
            GREEN,
        ),
    ]
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[panel[0] for panel in panels])
    for column, (name, values, texts, colour) in enumerate(panels, start=1):
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=list(range(len(devices))),
                x=values,
                text=texts,
                textposition="auto",
                textangle=0,
                insidetextfont={"color": "black" if colour == ORANGE else "white"},
                name=name,
                marker={"color": colour},
                showlegend=False,
                customdata=[[device.name, device.model] for device in devices],
                hovertemplate="%{customdata[0]} %{customdata[1]}<br>" + name + ": %{text}<extra></extra>",
            ),
            row=1,
            col=column,
        )
        figure.update_xaxes(range=[0, max(values) * 1.12], nticks=5, zeroline=False, row=1, col=column)
    figure.update_yaxes(range=[len(devices) - 0.5, -0.5], showgrid=False)
    figure.update_yaxes(
        tickvals=list(range(len(devices))),
        ticktext=[f"{rank} {device.name} " for rank, device in zip(ranks, devices, strict=True)],
        col=1,
    )
    figure.update_annotations(font={"size": 13})
    figure.update_layout(bargap=0.25)
    subtitle = cluster.description or f"{cluster.world_size} devices"
    if cluster.world_size > len(ranks):
        subtitle += f"; {len(ranks)} of {cluster.world_size:,} devices shown"
    what = "to be emulated on this machine" if shares else "as described, not measured"
    finish(
        figure,
        title=f"Cluster '{cluster.name}'",
        label=what,
        subtitle=subtitle,
        height=170 + (34 if len(devices) <= 8 else 20) * len(devices),
    )
    figure.update_layout(margin_t=110)
    return figure
