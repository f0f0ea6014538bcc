"""An epoch's seconds from a few simulated steps, to compare many plans fast."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from workbench.methods.training.handlers import StepShape

SIMULATED_SHAPES = 9
"""Shapes that are simulated of those that differ in their tokens alone, the smallest and the largest included."""

_ESTIMATES: ContextVar[bool] = ContextVar("estimates", default=False)


@contextmanager
def estimated_steps() -> Iterator[None]:
    """Inside the context, an epoch's seconds come from a few simulated steps: the others follow from their tokens."""
    token = _ESTIMATES.set(True)
    try:
        yield
    finally:
        _ESTIMATES.reset(token)


Points = dict[tuple[int, int | None, bool], list[tuple[int, float]]]
"""By kind of shape (samples, lowest trained layer, whether it begins with an empty pipeline): tokens and seconds."""


def estimated(
    shapes: Iterable[StepShape], seconds: Callable[[StepShape], float], points: Points
) -> Callable[[StepShape], float]:
    """Return the seconds of an epoch's shapes: as simulated, and inside `estimated_steps` of most linearly in their
    padded tokens between simulated ones.

    points: those of earlier epochs of the phase, to which this one's are added.
    """
    if not _ESTIMATES.get():
        return seconds
    alike: dict[tuple[int, int | None, bool], set[StepShape]] = {}
    for shape in shapes:
        if _kind(shape) not in points:
            alike.setdefault(_kind(shape), set()).add(shape)
    points |= {kind: _simulated(sorted(group, key=_tokens), seconds) for kind, group in alike.items()}
    return lambda shape: _interpolated(_tokens(shape), points[_kind(shape)])


def _kind(shape: StepShape) -> tuple[int, int | None, bool]:
    return shape.samples, shape.lowest_trained, shape.continues is None


def _tokens(shape: StepShape) -> int:
    return sum(size * length for size, length in zip(shape.sizes, shape.lengths, strict=True))


def _simulated(ordered: Sequence[StepShape], seconds: Callable[[StepShape], float]) -> list[tuple[int, float]]:
    last, most = len(ordered) - 1, min(len(ordered), SIMULATED_SHAPES)
    places = sorted({round(place * last / max(1, most - 1)) for place in range(most)})
    return [(_tokens(ordered[place]), seconds(ordered[place])) for place in places]


def _interpolated(tokens: int, points: Sequence[tuple[int, float]]) -> float:
    after = bisect_left(points, tokens, key=lambda point: point[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (tokens - left) / (right - left)
