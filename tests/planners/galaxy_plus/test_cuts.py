import math
import random

import numpy as np
import pytest

from workbench.planners.galaxy_plus.cuts import best_units, water_level


def one_by_one(seconds, caps, total):
    """Give one after the other to whoever then is least slow: the definition of the fastest slowest device."""
    parts = [0] * len(caps)
    for _ in range(total):
        able = [d for d, part in enumerate(parts) if part < caps[d]]
        parts[min(able, key=lambda d: seconds(d, parts[d] + 1))] += 1
    return max(seconds(d, part) for d, part in enumerate(parts) if part)


@pytest.mark.parametrize("seed", range(40))
def test_columns_are_those_of_giving_one_after_the_other(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 8)
    lines = [(draw.choice((0.0, draw.uniform(0, 1e-2))), draw.choice((0.0, draw.uniform(1e-6, 1e-3)))) for _ in range(count)]
    caps = [draw.choice((0, draw.randint(1, 200), 500)) for _ in range(count)]
    caps[0] = max(1, caps[0])
    total = draw.randint(1, sum(caps))
    parts = water_level(lines, caps, total)
    assert sum(parts) == total
    assert all(0 <= part <= cap for part, cap in zip(parts, caps, strict=True))
    slowest = max(fixed + slope * part for (fixed, slope), part in zip(lines, parts, strict=True) if part)
    assert math.isclose(slowest, one_by_one(lambda d, part: lines[d][0] + lines[d][1] * part, caps, total), rel_tol=1e-6, abs_tol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_units_are_those_of_giving_one_after_the_other(seed):
    draw = random.Random(seed)
    caps = [draw.randint(0, 12) for _ in range(draw.randint(1, 8))]
    times = np.maximum.accumulate(np.array([[draw.uniform(0, 1) * at for at in range(13)] for _ in caps]), axis=1)
    assert best_units(times, caps, sum(caps) + 1) is None
    total = sum(caps) // 2 + 1
    if total > sum(caps):
        return
    units = best_units(times, caps, total)
    assert sum(units) == total
    assert all(unit <= cap for unit, cap in zip(units, caps, strict=True))
    slowest = max(times[d, unit] for d, unit in enumerate(units) if unit)
    assert slowest == one_by_one(lambda d, unit: times[d, unit], caps, total)
