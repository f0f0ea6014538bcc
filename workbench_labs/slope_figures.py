"""Figures of the lab 'Slopes': descents, errors of estimates, slopes and epsilon (P-RGE, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.plots.predicted import lines
from workbench_labs.bowl import Bowl, Estimate, descents
from workbench_labs.plots.zeroth_order import gradient_error
from workbench_labs.plots.zeroth_order import slopes as draw_slopes
from workbench_labs.seed_training import SeedTraining
from workbench_labs.slope_study import SlopeStudy, plane_error


def descents_figure(estimate: Estimate, queries: Sequence[int], *, passes: int, repeats: int) -> go.Figure:
    """Return the height over the number of forward passes, for each number of queries: medians of some descents."""
    curves = descents(Bowl(), queries, passes=passes, repeats=repeats, estimate=estimate)
    return lines(
        curves,
        title="The same number of forward passes",
        label="computed",
        x_title="forward passes",
        y_title="loss (1 is the bottom)",
        subtitle=f"medians of {repeats} walks; the step length is chosen for each number of queries",
    )


def error_figure(study: SlopeStudy) -> go.Figure:
    """Return a model's squared errors over the number of queries, next to planes of fewer dimensions."""
    counts = [1, 2, 4, 8, 16]
    return gradient_error([plane_error(2, counts), plane_error(200, counts), study.error], label="computed, measured")


def slopes_figure(studies: Mapping[float, SlopeStudy], model: str) -> go.Figure:
    """Return measured over exact slopes.  studies: by epsilon."""
    slopes = {f"ε = {epsilon:g}": study.slopes for epsilon, study in studies.items()}
    queries = len(next(iter(slopes.values())))
    return draw_slopes(slopes, label="measured", subtitle=f"{queries} queries of {model}, one batch")


def epsilon_figure(curves: Mapping[str, Sequence[SlopeStudy]]) -> go.Figure:
    """Return how far slopes are off, over epsilon.  curves: by the dtype in which a model computes."""
    return lines(
        {name: [(study.epsilon, study.deviation) for study in studies] for name, studies in curves.items()},
        title="How far slopes are off",
        label="measured",
        x_title="ε",
        y_title="root mean square, of the slopes'",
        subtitle="left: rounding; right: the loss bends between the two points",
        logarithmic="xy",
    )


def training_figure(trained: SeedTraining, model: str) -> go.Figure:
    """Return the loss over the steps of a training by a student's functions."""
    return lines(
        {"mean loss of a step's passes": trained.losses},
        title="Your functions train a language model",
        label="measured in this process",
        x_title="steps",
        y_title="loss",
        subtitle=f"{model}, {len(trained.last):,} trained values, one batch again and again",
    )
