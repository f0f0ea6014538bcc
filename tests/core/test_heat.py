"""How devices get hot: the rule of heat, and the curve of a measurement."""

from __future__ import annotations

import pytest

from workbench.core.errors import ConfigError
from workbench.core.heat import Heat, Level, Levels, curve_of


def curve(*levels: tuple[float, float]) -> Levels:
    return tuple(Level(heat_s=heat_s, speed=speed) for heat_s, speed in levels)


HOT = curve((0, 1.0), (10, 0.8), (30, 0.5))


@pytest.mark.parametrize(
    ("passed", "heat_s", "speed"),
    [
        ([(5, 5)], 5, 1.0),
        ([(10, 10)], 10, 0.8),
        ([(40, 40)], 40, 0.5),
        ([(20, 20), (35, 0)], 5, 1.0),  # a second of waiting takes back a second of computing
        ([(5, 5), (100, 0), (112, 12)], 12, 0.8),  # and no more than there is
        ([(10, 10), (20, 5), (30, 5), (40, 5)], 10, 0.8),  # half busy: it stays as it is
        ([(10, 10), (20, 4), (30, 4)], 6, 1.0),
        ([(10, 10), (12, 9)], 12, 0.8),  # processors that compute at the same time heat it once
        ([(10, 10), (4, 0)], 10, 0.8),  # a late message is of the past
        ([(1000, 0), (1005, 5)], 5, 1.0),  # the first call begins the time
    ],
)
def test_heat_follows_computing_and_waiting(passed: list[tuple[float, float]], heat_s: float, speed: float) -> None:
    heat = Heat(HOT)
    for now_s, busy_s in passed:
        heat.advance(now_s, busy_s)
    assert (heat.heat_s, heat.speed) == (heat_s, speed)


def test_a_device_without_a_curve_keeps_its_speed() -> None:
    heat = Heat()
    heat.advance(1e6, 1e6)
    assert heat.speed == 1.0


def test_a_measurement_becomes_a_curve_of_few_levels_that_only_falls() -> None:
    cold = [(number * 10.0, 100.0 - number % 2) for number in range(12)]  # noise of a hundredth
    hot = [(120.0, 84.0), (130.0, 79.0), (140.0, 81.0), (150.0, 60.0), (160.0, 66.0)]
    assert curve_of(cold + hot) == curve((0, 1.0), (120, 0.85), (130, 0.8), (150, 0.6))
    assert curve_of([(3.0, 5.0)]) == curve((0, 1.0))
    with pytest.raises(ConfigError, match="No sample was taken"):
        curve_of([])
