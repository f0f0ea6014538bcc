import math
import random

import pytest

from workbench.methods.galaxy_plus.planners.search import water_level


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
    lines = [
        (draw.choice((0.0, draw.uniform(0, 1e-2))), draw.choice((0.0, draw.uniform(1e-6, 1e-3)))) for _ in range(count)
    ]
    caps = [draw.choice((0, draw.randint(1, 200), 500)) for _ in range(count)]
    caps[0] = max(1, caps[0])
    total = draw.randint(1, sum(caps))
    parts = water_level(lines, caps, total)
    assert sum(parts) == total
    assert all(0 <= part <= cap for part, cap in zip(parts, caps, strict=True))
    slowest = max(fixed + slope * part for (fixed, slope), part in zip(lines, parts, strict=True) if part)
    assert math.isclose(
        slowest, one_by_one(lambda d, part: lines[d][0] + lines[d][1] * part, caps, total), rel_tol=1e-6, abs_tol=1e-12
    )
