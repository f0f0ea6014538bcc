import itertools
import math
import random
from dataclasses import replace

import pytest

from workbench.planners import balance
from workbench.planners.balance import StageTimes
from workbench.planners.memory import rank_need

from .builders import SEQUENCE_LENGTH, problem_of, rough, unequal


def stage(times, group, live):
    """Return T of one group (see StageTimes.of_groups): (L, L) seconds of layers [x, y) at [x, y - 1]."""
    return times.of_groups(times.groups(group, len(group))[0][-1:], live)[:, 0]


def dispatch(costs, samples):
    """Return H(samples, group) of Eq. 4 and each device's samples, from costs[device][i] of i samples."""
    tables = [list(costs[0][: samples + 1])]
    for row in costs[1:]:
        tables.append(balance._with_device(tables[-1], row))
    return tables[-1][samples], balance._divided(tables, costs)


def test_the_dispatch_is_the_best_of_all_divisions():
    draw = random.Random(1)
    for _ in range(200):
        samples, count = draw.randint(1, 6), draw.randint(1, 4)
        costs = [[0.0] + [draw.choice((math.inf, draw.uniform(0, 9))) for _ in range(samples)] for _ in range(count)]
        best = min(
            max(costs[d][n] for d, n in enumerate(division))
            for division in itertools.product(range(samples + 1), repeat=count)
            if sum(division) == samples
        )
        value, shares = dispatch(costs, samples)
        assert value == best
        if math.isfinite(best):
            assert sum(shares) == samples
            assert max(costs[d][n] for d, n in enumerate(shares)) == best
        else:
            assert not any(shares)


@pytest.mark.parametrize("make", [unequal, rough])
@pytest.mark.parametrize("tight", [False, True])
def test_the_vectorised_table_equals_the_plain_one(make, tight):
    for seed in range(12):
        profile, cluster = make(seed, num_layers=4, world_size=3, tight=tight)
        profile = replace(profile, most_copied_bytes=600 * (seed % 2))  # of up to two layers
        times = StageTimes(problem_of(profile, cluster, 16, 4))
        for group in ((0,), (1, 2), (2, 0, 1)):
            for live in (1, 2, 3):
                table = stage(times, group, live)
                for start, stop in itertools.combinations(range(5), 2):
                    costs = []
                    for rank in group:
                        row = [0.0]
                        for n in range(1, 5):
                            need = rank_need(
                                profile, rank, start, stop, samples=n, sequence_length=SEQUENCE_LENGTH, in_flight=live
                            )
                            seconds = sum(
                                layer.forward_s(n, SEQUENCE_LENGTH) + layer.backward_s(n, SEQUENCE_LENGTH)
                                for layer in profile.layers[rank][start:stop]
                            )
                            row.append(math.inf if need.total_bytes > cluster.devices[rank].memory_bytes else seconds)
                        costs.append(row)
                    value, shares = dispatch(costs, 4)
                    assert table[start, stop - 1] == pytest.approx(value)
                    assert times.shares(start, stop, group, live) == shares


@pytest.mark.parametrize("columns_at_once", [4, 4096])
def test_the_tables_of_all_groups_of_an_order_equal_those_of_each_group(columns_at_once, monkeypatch):
    monkeypatch.setattr(balance, "COLUMNS_AT_ONCE", columns_at_once)
    profile, cluster = rough(3, num_layers=4, world_size=5, tight=True)
    problem = problem_of(profile, cluster, 16, 4)
    times = StageTimes(problem)
    for order, widest in (((3, 0, 4, 1, 2), 3), ((3, 0, 1, 4, 2), 5)):  # the second knows some groups of the first
        for first, rows in enumerate(times.groups(order, widest)):
            groups = [order[first:end] for end in range(first + 1, min(first + widest, 5) + 1)]
            assert len(rows) == len(groups)
            for live in (1, 2, 3):
                table = times.of_groups(rows, live)
                for place, group in enumerate(groups):
                    assert (table[:, place] == stage(StageTimes(problem), group, live)).all()
