import math
import random

import numpy as np
import pytest
from galaxy_plus_builders import shape, unequal

from workbench.planners.galaxy_plus.cuts import best_columns, best_units, cuts, water_level
from workbench.planners.galaxy_plus.memory import HELD
from workbench.planners.galaxy_plus.tables import Tables


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


def every_cut(total, count):
    """All ways to give so many units to so many devices."""
    if count == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in every_cut(total - first, count - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_heads_and_columns_together_are_as_fast_as_the_best_of_all(seed):
    """Memory is short in most of them; a threshold may round to one column more or less for a device."""
    profile, cluster, length = unequal(seed, world_size=2 + seed % 3, stack=shape(4, 6, unit_width=16))
    tables = Tables(profile, cluster, (length,), HELD, (length,))
    ranks, draw = tuple(range(cluster.world_size)), random.Random(seed)
    room, second = tables.room(ranks), (draw.randint(0, 3),)
    holds = tuple(draw.random() < 0.7 for _ in ranks)

    def seconds(units):
        columns = best_columns(tables, ranks, units, holds, room, second)
        return math.inf if columns is None else tables.units_s(ranks, units) + tables.columns_s(ranks, columns, second)

    best = min(seconds(units) for units in every_cut(tables.num_units, len(ranks)))
    found = cuts(tables, ranks, holds, room, [second])
    if not found:
        assert best == math.inf
        return
    column_s = max(tables.columns_s(ranks, (2,) * len(ranks), second) - tables.columns_s(ranks, (1,) * len(ranks), second), 0.0)
    assert seconds(found[second].units()) <= best * (1 + 1e-6) + column_s
