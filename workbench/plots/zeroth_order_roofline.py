"""A roofline with forward passes: limited by reading weights below the ridge, by arithmetic above (P-RGE, sections 3.1-3.2).

The roofline: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from workbench.plots.style import BLACK, CYCLE, DARK_GREY, GREEN, SYMBOLS, finish


class Pass(NamedTuple):
    """One forward pass.  parts: P copies in one batch.  flops: of all of them.  weight_bytes: read once for all of them."""

    parts: int
    flops: float
    weight_bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Return FLOPs for each byte of weights."""
        return self.flops / self.weight_bytes

    @property
    def flops_per_s(self) -> float:
        """Return the achieved rate, in FLOP/s."""
        return self.flops / self.seconds


def roofline(
    found: Mapping[str, Sequence[Pass]], *, flops_per_s: float, bytes_per_s: float, label: str, title: str = "Roofline", subtitle: str = ""
) -> go.Figure:
    """Return the machine's roof and the rates that passes reach under it, with the number of parts next to each.

    flops_per_s: of arithmetic; bytes_per_s: of reading weights.  found: passes by name, at least one.
    """
    ridge = flops_per_s / bytes_per_s
    passes = [one for several in found.values() for one in several]
    low = min([ridge, *(one.intensity for one in passes)]) / 2.5
    high = max([ridge, *(one.intensity for one in passes)]) * 2.5
    rate = 1e-12 if flops_per_s >= 2e12 else 1e-9
    figure = go.Figure()
    roof = [(at, min(flops_per_s, at * bytes_per_s) * rate) for at in (low, ridge, high)]
    x, y = zip(*roof, strict=True)
    figure.add_scatter(name="the roof", mode="lines", x=x, y=y, line={"color": BLACK, "width": 3}, hoverinfo="skip")
    for index, (name, several) in enumerate(found.items()):
        colour = CYCLE[index % len(CYCLE)]
        figure.add_scatter(
            name=name,
            mode="lines+markers+text",
            x=[one.intensity for one in several],
            y=[one.flops_per_s * rate for one in several],
            text=[f"{one.parts}" for one in several],
            textposition="bottom center",
            line={"color": colour, "width": 1.5, "dash": "dot"},
            marker={"size": 10, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": colour},
            customdata=[[one.parts, one.seconds * 1e3] for one in several],
            hovertemplate=f"{name}: %{{customdata[0]}} parts, %{{customdata[1]:.3g}} ms<extra></extra>",
        )
    figure.add_vline(x=ridge, line={"color": GREEN, "width": 1.5, "dash": "dash"})
    unit = "TFLOP/s" if rate == 1e-12 else "GFLOP/s"
    sides = (
        (f"bound by reading weights: {_short(bytes_per_s / 1e9)} GB/s", 0.0, "left"),
        (f"bound by arithmetic: {_short(flops_per_s * rate)} {unit}", 1.0, "right"),
    )
    for said, at, anchor in sides:
        figure.add_annotation(
            text=said, x=at, xref="paper", xanchor=anchor, y=1.0, yref="paper", yanchor="bottom", showarrow=False,
            font={"size": 12, "color": DARK_GREY},
        )  # fmt: skip
    figure.update_xaxes(
        title="FLOPs for each byte of weights that is read", type="log", zeroline=False, range=[math.log10(low), math.log10(high)]
    )
    figure.update_yaxes(title=unit, type="log", zeroline=False, exponentformat="none", dtick="D2")
    said = "; ".join(filter(None, [subtitle, "numbers: parts in the pass; green: the ridge"]))
    return finish(figure, title=title, label=label, subtitle=said, height=490, margin={"t": 105}, below=95)


def _short(value: float) -> str:
    """Return a number as text: whole, or to three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
