"""The course of a training: loss and metric curves, and the time of each epoch (records count from 0, figures from
1).
"""

from __future__ import annotations

from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.methods import title_of
from workbench.core.report import Report, StepRecord, busy_note, metrics_text
from workbench.core.spread import Spread
from workbench.core.units import three_figures
from workbench.plots.predicted import compared_bars
from workbench.plots.style import (
    BLACK,
    BLUE,
    CYCLE,
    DARK_GREY,
    GREY,
    ORANGE,
    SKY_BLUE,
    empty,
    finish,
    time_unit,
    whole_ticks,
)

SMOOTHING_STEPS = 15  # of the running median over the losses of single steps


def curves(report: Report) -> go.Figure:
    """Return the loss of each step (with a running median) next to the validation metrics of each epoch.

    If layers are unfrozen during the run, the number of trained layers is drawn on a second axis of the loss.
    """
    title = f"Loss and metrics: {title_of(report.job.method)} on {report.job.task}"
    steps = [step for step in report.steps if step.loss is not None]
    epochs = [epoch for epoch in report.epochs if epoch.metrics]
    if not steps and not epochs:
        return empty(
            title=title, label=report.label, why="Nothing was trained: a simulated run has times, but no losses."
        )
    depths = [None if step.lowest_trained is None else report.plan.num_layers - step.lowest_trained for step in steps]
    unfreezes = len({*depths} - {None}) > 1
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.62, 0.38],
        horizontal_spacing=0.13 if unfreezes else 0.09,
        subplot_titles=["training loss per step", "metrics per epoch"],
        specs=[[{"secondary_y": unfreezes}, {}]],
    )
    losses = [step.loss for step in steps if step.loss is not None]
    numbers = list(range(1, len(steps) + 1))
    left: dict[str, Any] = {"x": numbers, "mode": "lines", "row": 1, "col": 1}
    figure.add_scatter(y=losses, name="loss of a step", line={"color": SKY_BLUE, "width": 1}, opacity=0.8, **left)
    half = SMOOTHING_STEPS // 2
    if len(losses) > SMOOTHING_STEPS:
        smooth = [median(losses[max(0, middle - half) : middle + half + 1]) for middle in range(len(losses))]
        figure.add_scatter(
            y=smooth, name=f"median of {SMOOTHING_STEPS} steps", line={"color": BLUE, "width": 2.5}, **left
        )
    if unfreezes:
        line = {"color": GREY, "width": 1.5, "shape": "hv"}
        figure.add_scatter(y=depths, name="trained layers", line=line, secondary_y=True, **left)
        layers = report.plan.num_layers
        axis = {
            "title": "trained layers",
            "range": [0, layers + 0.5],
            "showgrid": False,
            "tick0": 0,
            "dtick": -(-layers // 6),
        }
        figure.update_yaxes(**axis, secondary_y=True, row=1, col=1)
    figure.update_annotations(font={"size": 13})
    _mark_epochs(figure, steps)
    _mark_recoveries(figure, report)
    for index, metric in enumerate(sorted({name for epoch in epochs for name in epoch.metrics})):
        having = [epoch for epoch in epochs if metric in epoch.metrics]
        figure.add_scatter(
            x=[epoch.epoch + 1 for epoch in having],
            y=[epoch.metrics[metric] for epoch in having],
            mode="lines+markers+text",
            text=[f"{epoch.metrics[metric]:.3f}" for epoch in having],
            textposition="top center" if index % 2 == 0 else "bottom center",
            cliponaxis=False,
            name=f"validation {metric}",
            line={"color": CYCLE[(index + 1) % len(CYCLE)], "width": 2},
            marker={"size": 9, "symbol": ("circle", "square", "diamond", "cross")[index % 4]},
            row=1,
            col=2,
        )
    figure.update_xaxes(title="optimizer step", row=1, col=1, **whole_ticks(len(steps)))
    figure.update_xaxes(title="epoch", tickvals=[epoch.epoch + 1 for epoch in epochs], row=1, col=2)
    if epochs:
        first, last = epochs[0].epoch + 1, epochs[-1].epoch + 1
        figure.update_xaxes(range=[first - 0.35, last + 0.35], row=1, col=2)
    tested = metrics_text(report)
    return finish(
        figure,
        title=title,
        label=report.label,
        subtitle=f"test split, epoch chosen on validation: {tested}" if tested else "",
        height=460,
        margin={"t": 105},
    )


def _mark_epochs(figure: go.Figure, steps: list[StepRecord]) -> None:
    """Draw a line where an epoch begins and say whether it runs from the cache."""
    starts = [index for index, step in enumerate(steps) if index == 0 or step.epoch != steps[index - 1].epoch]
    for number, start in enumerate(starts):
        if start:
            figure.add_vline(x=start + 0.5, line={"color": GREY, "width": 1, "dash": "dot"}, row=1, col=1)
        end = starts[number + 1] if number + 1 < len(starts) else len(steps)
        if len(starts) <= 12:
            cached = ", cached" if steps[start].cached and len(starts) <= 5 else ""
            _say(figure, f"epoch {steps[start].epoch + 1}{cached}", (start + end + 1) / 2, 1, yanchor="top")


def _mark_recoveries(figure: go.Figure, report: Report) -> None:
    """Draw a line where a device was lost, left, slowed down or came back, with a label."""
    for number, recovery in enumerate(report.recoveries):
        figure.add_vline(x=recovery.step + 0.5, line={"color": ORANGE, "width": 1.5}, row=1, col=1)
        label = f"{recovery.what}, {three_figures(recovery.seconds)} s"
        _say(figure, label, recovery.step + 0.5, 0.9 - 0.08 * (number % 4), xanchor="left")


def _say(figure: go.Figure, text: str, x: float, y: float, **anchor: str) -> None:
    """Write text at a step; y: share of the panel's height."""
    look = {"font": {"size": 11, "color": DARK_GREY}, "bgcolor": "rgba(255,255,255,0.75)"}
    figure.add_annotation(text=text, x=x, xref="x", y=y, yref="y domain", showarrow=False, **look, **anchor)


def epoch_times(report: Report) -> go.Figure:
    """Return a bar per epoch, with and without the activation cache, next to the simulator's prediction."""
    title = "Time of each epoch"
    note = busy_note(report)
    if not report.epochs:
        return empty(title=title, label=report.label, why="The report holds no epochs.", note=note)
    predicted = _predicted_by_epoch(report) if report.mode == "execute" else {}
    unit = time_unit(max([epoch.seconds for epoch in report.epochs] + list(predicted.values())))
    kinds = {"through the backbone": BLUE, "from the activation cache": ORANGE}
    by_kind = {name: [epoch for epoch in report.epochs if epoch.cached == cached] for cached, name in enumerate(kinds)}
    shown = {name: epochs for name, epochs in by_kind.items() if epochs}
    bars = {
        name: {epoch.epoch + 1: Spread.exactly(epoch.seconds * unit.factor) for epoch in epochs}
        for name, epochs in shown.items()
    }
    words = {"title": title, "label": report.label, "subtitle": _speedup(report), "note": note}
    figure = compared_bars(bars, x_title="epoch", unit=f"time ({unit.name})", **words)
    for bar, (name, epochs) in zip(figure.data, shown.items(), strict=True):
        texts = [f"{unit.text(epoch.seconds)}{report.mark}" for epoch in epochs]
        bar.update(marker_color=kinds[name], width=0.6, text=texts, textposition="outside", cliponaxis=False)
    if predicted:
        figure.add_scatter(
            x=[epoch + 1 for epoch in predicted],
            y=[seconds * unit.factor for seconds in predicted.values()],
            mode="markers",
            name="predicted (simulated)",
            marker={"symbol": "line-ew", "size": 46, "line": {"width": 3, "color": BLACK}},
            hovertemplate=f"epoch %{{x}}: %{{y:.4g}} {unit.name}<extra>predicted (simulated)</extra>",
        )
    figure.update_xaxes(categoryarray=[epoch.epoch + 1 for epoch in report.epochs])
    return figure.update_layout(barmode="overlay")


def _predicted_by_epoch(report: Report) -> dict[int, float]:
    """Return the simulated seconds of each epoch; only epochs whose steps were all predicted."""
    sums: dict[int, float] = {}
    for epoch in report.epochs:
        steps = [step for step in report.steps if step.epoch == epoch.epoch]
        if steps and all(step.predicted_s is not None for step in steps):
            sums[epoch.epoch] = sum(step.predicted_s or 0.0 for step in steps)
    return sums


def _speedup(report: Report) -> str:
    full = [epoch.seconds for epoch in report.epochs if not epoch.cached]
    cached = [epoch.seconds for epoch in report.epochs if epoch.cached]
    if not full or not cached or median(cached) <= 0:
        return "" if cached else "no epoch ran from the activation cache"
    return f"an epoch from the cache is {median(full) / median(cached):.1f} times shorter{report.mark} (medians)"
