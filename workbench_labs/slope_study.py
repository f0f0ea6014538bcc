"""How wrong slopes and estimated gradients are: on planes, and of a language model (P-RGE, section 2)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order import CausalModel, PrecisionWarning, Prge, PromptLike, ZerothOrderConfig
from workbench.widgets.tables import Table
from workbench_labs.bowl import Estimate
from workbench_labs.plots.zeroth_order import GradientError

AT_ONCE = 4
"""Queries of a model in one pass; this affects only the time, and the error is what we measure."""


def plane_error(dimension: int, queries: Sequence[int], *, repeats: int = 100) -> GradientError:
    """Return the squared error of estimates on a plane, whose slope along z is z times its gradient: means of `repeats`
    estimates.
    """
    generator = torch.Generator().manual_seed(0)
    exact = torch.nn.functional.normalize(torch.randn(dimension, generator=generator), dim=0)
    points = []
    for count in queries:
        errors = []
        for _ in range(repeats):
            noise = torch.randn(count, dimension, generator=generator)
            errors.append(float((noise.T @ (noise @ exact) / count - exact).square().sum()))
        points.append((count, sum(errors) / repeats))
    return GradientError(f"d = {dimension:,}", dimension, tuple(points))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlopeStudy:
    """Queries of one batch.  slopes: the exact and the measured slope of each.  length: length of the exact gradient.
    error: the error by the number of queries.
    """

    epsilon: float
    length: float
    slopes: tuple[tuple[float, float], ...]
    error: GradientError

    @property
    def deviation(self) -> float:
        """Return the difference of measured from exact slopes, as a share of the exact ones (root mean squares)."""
        missed = sum((measured - exact) ** 2 for exact, measured in self.slopes)
        return (missed / max(sum(exact**2 for exact, _ in self.slopes), 1e-30)) ** 0.5


def exact_gradient(model: CausalModel, batch: PromptLike) -> Tensor:
    """Return (d,) float32: the gradient of the batch's loss with respect to the trained weights, by a backward pass."""
    with torch.enable_grad():
        loss = model.part_losses(batch).sum()
        pieces = torch.autograd.grad(loss, list(model.trainables.parameters.values()))
    return torch.cat([piece.reshape(-1).float() for piece in pieces])


def study_slopes(
    model: CausalModel, batch: PromptLike, *, queries: int, epsilon: float, exact: Tensor | None = None
) -> SlopeStudy:
    """Measure the slopes of a number of queries of a batch's loss and compare with the exact gradient; theta does not
    change.

    exact: the gradient if it is already known, such as a float32 model's for a model that computes in fewer bits.
    """
    gradient = exact_gradient(model, batch) if exact is None else exact
    estimator = Prge(model, ZerothOrderConfig(queries=queries, epsilon=epsilon))
    measured: list[float] = []
    for first in range(0, queries, AT_ONCE):
        losses = estimator.losses(batch, 0, range(first, min(first + AT_ONCE, queries))).double().view(-1, 2)
        measured += ((losses[:, 0] - losses[:, 1]) / (2 * epsilon)).tolist()
    noise = torch.stack([model.trainables.noise(query_seed(0, 0, query)) for query in range(queries)])
    along = noise @ gradient
    slopes = torch.tensor(measured)
    # Squared errors of means are computed from inner products, so no estimate is ever built, let alone all of them.
    products = slopes[:, None] * slopes * (noise @ noise.T)
    crossed, squared = slopes * along, float(gradient.square().sum())
    points, count = [], 1
    while count <= queries:
        groups = [slice(first, first + count) for first in range(0, queries - count + 1, count)]
        errors = [
            float(products[group, group].sum()) / count**2 - 2 * float(crossed[group].sum()) / count + squared
            for group in groups
        ]
        points.append((count, sum(errors) / len(errors) / max(squared, 1e-30)))
        count *= 2
    dimension = model.trainables.num_values
    return SlopeStudy(
        epsilon=epsilon,
        length=squared**0.5,
        slopes=tuple(zip(along.tolist(), measured, strict=True)),
        error=GradientError(f"the model, d = {dimension:,}", dimension, tuple(points)),
    )


def epsilon_curve(
    model: CausalModel, batch: PromptLike, epsilons: Sequence[float], *, queries: int, exact: Tensor | None = None
) -> list[SlopeStudy]:
    """Return the same queries with each epsilon: if it is too large, the loss is curved; too small, rounding hides the
    differences.
    """
    gradient = exact_gradient(model, batch) if exact is None else exact
    return [study_slopes(model, batch, queries=queries, epsilon=epsilon, exact=gradient) for epsilon in epsilons]


def mean_angle(estimate: Estimate, dimension: int, queries: int, *, repeats: int = 20) -> float:
    """Return the mean angle (degrees) between estimates of a plane's gradient and the gradient itself."""
    generator, angles = torch.Generator().manual_seed(0), []
    for _ in range(repeats):
        gradient = torch.randn(dimension, generator=generator, dtype=torch.float64)
        noise = torch.randn(queries, dimension, generator=generator, dtype=torch.float64)
        losses = [[1 + 0.01 * slope, 1 - 0.01 * slope] for slope in (noise @ gradient).tolist()]
        estimated = torch.tensor(
            [float(value) for value in estimate(losses, noise.tolist(), 0.01)], dtype=torch.float64
        )
        angles.append(math.degrees(math.acos(float(torch.cosine_similarity(estimated, gradient, dim=0).clamp(-1, 1)))))
    return sum(angles) / len(angles)


def angles_table(estimate: Estimate, dimensions: Sequence[int]) -> Table:
    """Return the mean angle for each number of dimensions, with one query and with 16."""
    queries = (1, 16)
    rows = [
        (f"{dimension:,}", *(f"{mean_angle(estimate, dimension, count):.1f}°" for count in queries))
        for dimension in dimensions
    ]
    columns = ("dimensions d", *(f"q = {count}" for count in queries))
    return Table(columns, rows, title="Angle between estimate and gradient, mean of 20 estimates (computed)")


def curves(
    models: Mapping[str, CausalModel], batch: PromptLike, epsilons: Sequence[float], exact: Tensor
) -> dict[str, list[SlopeStudy]]:
    """Return each model's epsilon curve, with four queries.  models: by name.  exact: see `study_slopes`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # what it warns of is what the curve shows
        return {name: epsilon_curve(model, batch, epsilons, queries=4, exact=exact) for name, model in models.items()}
