"""What the adviser saves: an epoch from a few simulated steps, and data, tokens and shapes computed once."""

from __future__ import annotations

import random

import pytest

from workbench.core.once import once, shared_results
from workbench.methods.training.estimates import SIMULATED_SHAPES, Points, estimated, estimated_steps
from workbench.methods.training.handlers import StepShape


def seconds(shape: StepShape) -> float:
    """Parts wait for the longest, so the seconds do not follow from the tokens alone."""
    return 0.01 + 1e-4 * sum(map(int.__mul__, shape.sizes, shape.lengths)) + 1e-3 * max(shape.lengths)


def test_an_epochs_seconds_follow_from_a_few_simulated_steps() -> None:
    draw = random.Random(0)
    shapes = [StepShape(sizes=(8,) * 4, lengths=tuple(8 * draw.randint(2, 8) for _ in range(4))) for _ in range(200)]
    shapes.append(StepShape(sizes=(8, 3), lengths=(16, 8)))  # the epoch's last step
    simulated: list[StepShape] = []

    def simulate(shape: StepShape) -> float:
        simulated.append(shape)
        return seconds(shape)

    points: Points = {}
    with estimated_steps():
        estimated(shapes, simulate, points)
        result = estimated(shapes[::-1], simulate, points)  # the next epoch
    assert sum(map(result, shapes)) == pytest.approx(sum(map(seconds, shapes)), rel=0.02)
    assert len(simulated) <= SIMULATED_SHAPES + 1 and shapes[-1] in simulated
    assert estimated(shapes, seconds, {}) is seconds


def test_what_compared_jobs_share_is_computed_once_while_they_are_compared() -> None:
    calls: list[object] = []

    @once
    def load(name: str, *, words: object = ()) -> list[object]:
        calls.append(name)
        return [name, words]

    label_words = {"good": 1}
    with shared_results():
        assert load("a") is load("a") and load("a", words=("x",)) == ["a", ("x",)]
        assert load("a", words=label_words) is load("a", words=label_words)
        assert load("a", words=dict(label_words)) is not load("a", words=label_words)
    assert len(calls) == 4
    load("a")
    load("a")
    assert len(calls) == 6
