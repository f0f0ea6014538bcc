"""Device orders: which are distinct, what Algorithm 1 reaches in each, and what the fixed one loses."""

import itertools
import random
from dataclasses import replace

import pytest

from workbench.core.cluster import Link
from workbench.core.errors import PlanError
from workbench.planners import Problem, candidates, order_study
from workbench.planners.orders import count_orders, device_types, distinct_orders, search_orders, sorted_orders
from workbench.planners.pricing import price

from .builders import SEQUENCE_LENGTH, env_b, equal, simulated_s, unequal

JOB = {"batch_size": 16, "micro_batches": 4, "sequence_length": SEQUENCE_LENGTH}


@pytest.mark.parametrize("types", [(0,), (0, 0, 0), (0, 1, 0), (0, 1, 2, 1, 0), (0, 1, 2, 3)])
def test_each_distinct_order_comes_once(types):
    orders = list(distinct_orders(types))
    every = {tuple(types[rank] for rank in order) for order in itertools.permutations(range(len(types)))}
    assert len(orders) == len(every) == count_orders(types)
    assert {tuple(types[rank] for rank in order) for order in orders} == every
    assert orders == sorted(orders)
    assert all(sorted(order) == list(range(len(types))) for order in orders)


def test_devices_are_of_a_type_if_speed_memory_and_links_are_equal():
    profile, cluster = equal(2, 4)
    assert device_types(profile, cluster) == (0, 0, 0, 0)
    slow = replace(profile, layers=(*profile.layers[:3], tuple(one.scaled(2) for one in profile.layers[3])))
    assert device_types(slow, cluster) == (0, 0, 0, 3)
    small = replace(cluster, devices=(*cluster.devices[:2], replace(cluster.devices[2], memory_bytes=7), cluster.devices[3]))
    assert device_types(profile, small) == (0, 0, 2, 0)
    assert device_types(profile, replace(cluster, pairs={"d0>d1": Link(bytes_per_s=1.0)})) == (0, 1, 2, 3)


def test_sorted_orders_go_by_speed_and_by_memory():
    profile, cluster = env_b(memory_bytes=(4, 3, 1, 2))
    assert set(sorted_orders(profile, cluster, 1)) == {(2, 3, 0, 1), (1, 0, 3, 2), (0, 1, 3, 2), (2, 3, 1, 0)}


def test_many_orders_are_climbed_and_the_climb_ends_where_no_exchange_helps():
    draw = random.Random(3)
    cost = [[draw.random() for _ in range(7)] for _ in range(7)]
    evaluated = []

    def evaluate(order):
        evaluated.append(order)
        return sum(cost[place][rank] for place, rank in enumerate(order))

    found = search_orders(range(7), evaluate, [tuple(range(7)), tuple(reversed(range(7)))], max_orders=1000)
    assert not found.exhaustive
    assert found.num_orders == 5040
    assert len(evaluated) == len(set(evaluated)) == len(found.value) < 1000
    best = min(found.value, key=found.value.__getitem__)
    for i, j in itertools.combinations(range(7), 2):
        swapped = list(best)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert evaluate(tuple(swapped)) >= found.value[best]
    few = search_orders(range(7), evaluate, [tuple(range(7))], max_orders=30)
    assert len(few.value) == 30
    every = search_orders((0, 0, 2, 2), lambda order: order[0], [], max_orders=6)
    assert every.exhaustive
    assert len(every.value) == every.num_orders == 6


def test_the_study_shows_what_the_fixed_order_loses():
    profile, cluster = env_b(memory_bytes=(9000, 9000, 18000, 18000))
    study = order_study(Problem(profile, cluster, **JOB), keep=24)
    assert study.exhaustive
    assert (study.num_orders, study.looked_at, study.refused) == (24, 24, 0)
    assert len(study.rows) == 24
    assert [row.ratio for row in study.rows] == sorted(row.ratio for row in study.rows)
    assert study.rows[0].ratio == 1
    assert study.fixed is not None
    assert study.fixed.ranks == (0, 1, 2, 3)
    assert study.fixed.ratio > 1.05
    for row in study.rows:
        given = candidates(Problem(profile, cluster, **JOB), order=row.ranks, objective="bottleneck")[0]
        cost = price(profile, cluster, given.stages, num_micro_batches=4, sequence_length=SEQUENCE_LENGTH)
        assert row.step_s == pytest.approx(cost.bottleneck_s)
        assert row.names == tuple(cluster.devices[rank].name for rank in row.ranks)
    every = candidates(Problem(profile, cluster, **JOB), order="all", objective="bottleneck")[0]
    assert every.stages == study.rows[0].plan.stages


def test_the_study_may_be_judged_by_simulation():
    profile, cluster = env_b()
    study = order_study(Problem(profile, cluster, **JOB), price=lambda plan: simulated_s(profile, cluster, plan), keep=5)
    assert 5 <= len(study.rows) <= 6
    for row in study.rows:
        assert row.step_s == simulated_s(profile, cluster, row.plan)
        assert row.ratio == row.step_s / study.rows[0].step_s


def test_orders_in_which_nothing_fits_are_counted():
    """Where memory is scarce the fixed order may lose everything: here 2 orders of 24 hold the model at all."""
    profile, cluster = env_b(memory_bytes=(7000, 7000, 3300, 8000))
    study = order_study(Problem(profile, cluster, **JOB))
    assert (study.refused, len(study.rows), study.fixed) == (22, 2, None)
    with pytest.raises(PlanError):
        candidates(Problem(profile, cluster, **JOB), order=range(4))
    assert candidates(Problem(profile, cluster, **JOB), order="all")
    with pytest.raises(PlanError, match="No plan comes nearer"):
        order_study(Problem(profile, env_b(memory_bytes=(2000,) * 4)[1], **JOB))


def test_seven_unequal_devices_are_searched():
    profile, cluster = unequal(2, num_layers=8, world_size=7, tight=False)
    study = order_study(Problem(profile, cluster, **JOB), max_orders=60)
    assert not study.exhaustive
    assert study.num_orders == 5040
    assert study.looked_at <= 60
    assert study.fixed is not None
    assert study.fixed.ratio >= 1
