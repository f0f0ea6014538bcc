"""Learning without a backward pass: loss and score over the steps, and the bytes that a step sends (P-RGE, sections 2 and 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import BLUE, DARK_GREY, GREEN, LEGEND_BELOW, SKY_BLUE, VERMILLION, byte_unit, finish

DASHES = ("dot", "dash", "dashdot")
MEAN_OF = 15  # steps: one batch is few samples


def learning(
    losses: Sequence[tuple[int, float]],
    scores: Sequence[tuple[int, float]],
    *,
    baselines: Mapping[str, float] | None = None,
    engine: Sequence[tuple[int, float]] = (),
    label: str,
    metric: str = "accuracy",
    title: str = "Learning by forward passes",
    subtitle: str = "",
) -> go.Figure:
    """Return each step's loss with its running mean, and the validation score on an axis of its own.

    losses, scores: (step, value).  baselines: scores to compare with, by name.  engine: losses of the same training where an
    inference engine goes on with it.
    """
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    faint = {"color": SKY_BLUE, "width": 1}
    figure.add_scatter(x=_first(losses), y=_second(losses), name="loss of a step", mode="lines", line=faint)
    figure.add_scatter(x=_first(losses), y=running_mean(_second(losses)), name="its mean", mode="lines", line={"color": BLUE, "width": 2.5})
    if engine:
        line = {"color": VERMILLION, "width": 2.5}
        figure.add_scatter(x=_first(engine), y=_second(engine), name="loss in the engine", mode="lines", line=line)
    marker = {"symbol": "square", "size": 9, "color": GREEN}
    figure.add_scatter(
        x=_first(scores),
        y=_second(scores),
        name=f"validation {metric}",
        mode="lines+markers",
        line={"color": GREEN},
        marker=marker,
        secondary_y=True,
    )
    for index, (name, value) in enumerate((baselines or {}).items()):
        line = {"color": DARK_GREY, "width": 1.5, "dash": DASHES[index % len(DASHES)]}
        last = max([1, *_first(losses), *_first(engine)])
        figure.add_scatter(
            x=[0, last], y=[value, value], mode="lines", name=f"{name} {value:.2f}", line=line, hoverinfo="skip", secondary_y=True
        )
    shown = _second(losses) + _second(engine)
    figure.update_xaxes(title="steps", rangemode="tozero", zeroline=False)
    figure.update_yaxes(title="loss", range=[0, 1.08 * max(shown, default=1.0)], zeroline=False, secondary_y=False)
    figure.update_yaxes(title=metric, range=[0, 1], showgrid=False, zeroline=False, tickmode="auto", nticks=6, secondary_y=True)
    return finish(figure, title=title, label=label, subtitle=subtitle, height=450, margin={"b": 100, "r": 70}, legend=LEGEND_BELOW)


def running_mean(values: Sequence[float], size: int = MEAN_OF) -> list[float]:
    """Return the mean of each value and up to size - 1 before it."""
    return [sum(values[max(0, at + 1 - size) : at + 1]) / min(size, at + 1) for at in range(len(values))]


def traffic(
    nbytes: Mapping[str, float], *, label: str = "counted", title: str = "What a device receives for a step", subtitle: str = ""
) -> go.Figure:
    """Return a bar for each way to train together, on a logarithmic axis.  nbytes: above 0."""
    names, sizes = list(nbytes), list(nbytes.values())
    figure = go.Figure(
        go.Bar(
            x=sizes,
            y=names,
            orientation="h",
            marker={"color": [BLUE, VERMILLION, DARK_GREY, GREEN, SKY_BLUE][: len(names)]},
            text=[f" {byte_unit(size).text(size)}" for size in sizes],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:,.0f} bytes<extra></extra>",
        )
    )
    # Room on the right for the longest bar's text.
    figure.update_xaxes(
        type="log", title="bytes", dtick=1, exponentformat="power", zeroline=False, range=[0, len(str(int(max(sizes, default=1)))) + 1]
    )
    figure.update_yaxes(autorange="reversed")
    return finish(figure, title=title, label=label, subtitle=subtitle, height=170 + 48 * len(names))


def _first(points: Sequence[tuple[int, float]]) -> list[int]:
    return [step for step, _ in points]


def _second(points: Sequence[tuple[int, float]]) -> list[float]:
    return [value for _, value in points]
