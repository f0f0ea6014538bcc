"""The bowl of the lab on zeroth-order gradients: Algorithm 1 in two dimensions, and the widget that walks it."""

from __future__ import annotations

import math
import re

import pytest

from workbench.core.errors import ConfigError
from workbench_labs.bowl import Bowl, BowlLab, Descent, ask, descents, mean_of, probes_of
from workbench_labs.plots.zeroth_order import Probe


def probe(bowl: Bowl, at: tuple[float, float], *, epsilon: float, **settings: int) -> list[Probe]:
    return probes_of(*ask(bowl, at, epsilon=epsilon, **settings), epsilon)


def test_on_a_bowl_every_slope_is_exact_and_their_mean_tends_to_the_gradient() -> None:
    bowl, at = Bowl(stretch=4.0), (1.5, -1.0)
    gradient = bowl.gradient(*at)
    numeric = [(bowl.height(1.5 + 1e-6, -1.0) - bowl.height(1.5 - 1e-6, -1.0)) / 2e-6]
    assert gradient[0] == pytest.approx(numeric[0], rel=1e-6)
    many = probe(bowl, at, queries=4000, epsilon=1.0, seed=3, step=0)
    for one in many[:20]:
        assert one.slope == pytest.approx(sum(z * g for z, g in zip(one.direction, gradient, strict=True)), abs=1e-5)
    assert math.dist(mean_of(many), gradient) < 0.1 * math.hypot(*gradient)
    assert [query.direction for query in probe(bowl, at, queries=2, epsilon=0.1, seed=3, step=0)] == [
        one.direction for one in many[:2]
    ]
    with pytest.raises(ConfigError, match="0 queries"):
        probe(bowl, at, queries=0, epsilon=1.0, seed=0, step=0)
    with pytest.raises(ConfigError, match="float8"):
        Bowl(precision="float8")


def test_few_bits_drown_a_small_epsilon_and_ripples_are_averaged_by_a_large_one() -> None:
    coarse = Bowl(precision="bfloat16")
    assert (
        coarse.loss(2**-2.5, 0.0) == 1.0
        and coarse.loss(4.0, 0.0) == 3.0
        and Bowl().loss(2**-2.5, 0.0) == pytest.approx(1 + 2**-8)
    )
    assert all(query.slope == 0 for query in probe(coarse, (0.4, 0.2), queries=20, epsilon=1e-4, seed=0, step=0))
    rippled, smooth, at = Bowl(ripple=0.1), Bowl(), (2.0, 1.0)

    def missed(epsilon: float) -> float:
        seen, meant = (
            mean_of(probe(one, at, queries=500, epsilon=epsilon, seed=0, step=0)) for one in (rippled, smooth)
        )
        return math.dist(seen, meant)

    assert missed(1.0) < 0.3 * missed(0.001)


def test_walks_go_down_and_are_counted_in_passes() -> None:
    result = descents(Bowl(), (1, 4), passes=80, learning_rate=lambda q: 0.3, repeats=5)
    assert (
        result["q = 1"][-1][0] == result["q = 4"][-1][0] == 80
        and result["q = 1"][1][0] == 2
        and result["q = 4"][1][0] == 8
    )
    for points in result.values():
        assert points[-1][1] < 0.5 * points[0][1]
    walk = Descent(bowl=Bowl(), queries=3)
    way, (x, y) = mean_of(walk.probes), walk.path[0]
    walk.step()
    assert walk.path[1] == (x - 0.3 * way[0], y - 0.3 * way[1])


def test_the_bowl_lab_follows_its_controls() -> None:
    lab = BowlLab(Bowl(), queries=64, seed=1)
    assert (
        "after 0 steps, 0 forward passes" in lab.headline.value
        and int(re.search(r"(\d+)° beside", lab.headline.value)[1]) < 40
    )
    lab.walk(2)
    assert "after 2 steps, 256 forward passes" in lab.headline.value and len(lab.descent.path) == 3
    lab.queries.value, lab.precision.value, lab.epsilon.value = 1, "bfloat16", 0.001
    assert "no slope seen" in lab.headline.value
    lab.precision.value, lab.stretch.value, lab.learning_rate.value = "float32", 16.0, 1.0
    before = lab.descent.probes
    lab._buttons[2].click()
    assert lab.descent.probes != before
    lab.walk(60)
    assert "smaller learning rate" in lab.message.value and math.hypot(*lab.descent.path[-1]) <= 1e3
    lab._buttons[3].click()
    assert len(lab.descent.path) == 1 and lab.message.value == ""
