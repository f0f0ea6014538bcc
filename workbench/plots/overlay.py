"""Several trainings in one figure: losses, smoothed, and validation metrics over steps, epochs or seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.report import Report
from workbench.core.timeline import INVALID_MARK, label_of
from workbench.plots.predicted import DASHES
from workbench.plots.style import BLACK, CYCLE, SYMBOLS, empty, finish, whole_ticks

Axis = Literal["steps", "epochs", "seconds"]
"""Unit of the horizontal axis of several trainings; seconds are those of the devices' steps."""
TOP_SMOOTHING = 0.98


def overlay(runs: Mapping[str, Sequence[Report]], *, axis: Axis = "steps", smoothing: float = 0.0) -> go.Figure:
    """Return several trainings in one figure: the loss of each step, and the validation metric of each epoch.

    runs: by name, the reports whose mean is drawn, such as those of several seeds.  smoothing: the share of the loss
    before that a step's smoothed loss keeps, from 0 to TOP_SMOOTHING; the losses themselves stay visible, pale.
    The lowest loss has a circle, and the epoch that was chosen on the validation split a star.
    """
    every = [report for reports in runs.values() for report in reports]
    labels = dict.fromkeys(label_of(report.source, report.fidelity) for report in every)
    lost = any(not report.valid for report in every) and axis == "seconds"
    words = {
        "title": "Loss and metric of each training",
        "label": "; ".join(labels),
        "note": f"{INVALID_MARK} Host too busy in some of these runs: their seconds mean little." if lost else "",
    }
    drawn = {name: _Course.of(reports, axis) for name, reports in runs.items()}
    metric = _common_metric([course.metrics for course in drawn.values()])
    if not any(course.losses for course in drawn.values()) and not metric:
        return empty(why="None of these runs has losses: nothing was trained, or only simulated.", **words)
    panels = ["training loss", f"validation {metric}"] if metric else ["training loss"]
    widths = [0.6, 0.4][: len(panels)] if metric else [1.0]
    figure = make_subplots(
        rows=1, cols=len(panels), column_widths=widths, horizontal_spacing=0.09, subplot_titles=panels
    )
    for index, (name, course) in enumerate(drawn.items()):
        colour, dash = CYCLE[index % len(CYCLE)], DASHES[index // len(CYCLE) % len(DASHES)]
        mark = {"color": colour, "size": 11, "line": {"width": 1.5, "color": BLACK}}
        panel = {"name": name, "legendgroup": name, "row": 1, "col": 1}
        if course.losses:
            smooth = smoothed(course.losses, smoothing)
            if smoothing:
                line = {"color": colour, "width": 1}
                pale = {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip"}
                figure.add_scatter(x=course.positions, y=course.losses, mode="lines", line=line, **pale, **panel)
            line = {"color": colour, "width": 2, "dash": dash}
            figure.add_scatter(x=course.positions, y=smooth, mode="lines", line=line, showlegend=True, **panel)
            lowest = min(range(len(smooth)), key=smooth.__getitem__)
            circle = {**mark, "symbol": "circle-open"}
            minimum = {"x": [course.positions[lowest]], "y": [smooth[lowest]], "marker": circle}
            figure.add_scatter(mode="markers", showlegend=False, **minimum, **panel)
        if values := course.metrics.get(metric):
            panel["col"] = 2
            line, marker = {"color": colour, "width": 2, "dash": dash}, {"size": 7, "symbol": SYMBOLS[index % 7]}
            look = {"line": line, "marker": marker, "showlegend": not course.losses}
            ends = [course.ends[epoch] for epoch in values]
            figure.add_scatter(x=ends, y=list(values.values()), mode="lines+markers", **look, **panel)
            if course.chosen in values:
                best = {"x": [course.ends[course.chosen]], "y": [values[course.chosen]]}
                star = {**mark, "symbol": "star", "size": 15}
                figure.add_scatter(mode="markers", marker=star, showlegend=False, **best, **panel)
    titles = {"steps": "optimizer step", "epochs": "epoch", "seconds": "time of the steps (s)"}
    figure.update_xaxes(title=titles[axis])
    if axis != "seconds":
        last = max((place for course in drawn.values() for place in course.ends.values()), default=0.0)
        figure.update_xaxes(**whole_ticks(round(last)))
    figure.update_annotations(font={"size": 13})
    notes = ["circle: the lowest loss", "star: the epoch that was chosen"][: len(panels)]
    if smoothing:
        notes.append(f"pale: before smoothing by {smoothing:g}")
    if any(len(reports) > 1 for reports in runs.values()):
        notes.insert(0, "means over runs")
    return finish(figure, subtitle="; ".join(notes), height=440, margin={"t": 110}, **words)


class _Course(NamedTuple):
    """The mean course of some trainings.  positions: where each loss stands on the axis.  ends: where each epoch ends.

    metrics: each epoch's metrics, by name.  chosen: the epoch that was chosen, counted from 0.
    """

    positions: list[float]
    losses: list[float]
    ends: dict[int, float]
    metrics: dict[str, dict[int, float]]
    chosen: int

    @classmethod
    def of(cls, reports: Sequence[Report], axis: Axis) -> _Course:
        first = reports[0]
        count = Counter(step.epoch for step in first.steps)
        positions, elapsed_s, ends = [], 0.0, {}
        for number, step in enumerate(first.steps, 1):
            elapsed_s += step.seconds or 0.0
            done = step.epoch + (step.step + 1) / count[step.epoch]
            ends[step.epoch] = at_end = {"steps": number, "epochs": done, "seconds": elapsed_s}[axis]
            positions.append(at_end)
        columns = [[step.loss for step in report.steps] for report in reports]
        losses = [[loss for loss in column if loss is not None] for column in zip(*columns, strict=False)]
        points = [
            (place, mean(column))
            for place, column in zip(positions, losses, strict=False)
            if len(column) == len(columns)
        ]
        metrics: dict[str, dict[int, float]] = {}
        for epoch in first.epochs:
            others = [other for report in reports for other in report.epochs if other.epoch == epoch.epoch]
            for name in epoch.metrics if epoch.epoch in ends else ():
                if all(name in other.metrics for other in others):
                    metrics.setdefault(name, {})[epoch.epoch] = mean(other.metrics[name] for other in others)
        chosen = first.chosen_epoch - 1 if len(reports) == 1 else -1
        return cls([place for place, _ in points], [loss for _, loss in points], ends, metrics, chosen)


def _common_metric(metrics_by_run: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric that most of the trainings have; accuracy rather than another; '' if there is none."""
    names = [name for metrics in metrics_by_run for name in metrics]
    return max(names, key=lambda name: (names.count(name), name == "accuracy", name), default="")


def smoothed(values: Sequence[float], share: float) -> list[float]:
    """Return the exponential means of a series, without the pull of a start at 0.  share: as overlay's smoothing."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = share * total + (1 - share) * value, share * weight + 1 - share
        means.append(total / weight)
    return means
