"""Device orders: which are distinct, what Algorithm 1 reaches in each, and what the fixed one loses."""

import itertools
import random
from dataclasses import replace

import pytest

from workbench.core.cluster import Link
from workbench.core.errors import PlanError
from workbench.planners import Problem, candidates
from workbench.planners.orders import count_orders, device_types, distinct_orders, search_orders, sorted_orders

from .builders import SEQUENCE_LENGTH, closed_form, env_b, equal

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
    small = replace(
        cluster, devices=(*cluster.devices[:2], replace(cluster.devices[2], memory_bytes=7), cluster.devices[3])
    )
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

    result = search_orders(range(7), evaluate, [tuple(range(7)), tuple(reversed(range(7)))], max_orders=1000)
    assert count_orders(range(7)) == 5040
    assert len(evaluated) == len(set(evaluated)) == len(result) < 1000
    best = min(result, key=result.__getitem__)
    for i, j in itertools.combinations(range(7), 2):
        swapped = list(best)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert evaluate(tuple(swapped)) >= result[best]
    few = search_orders(range(7), evaluate, [tuple(range(7))], max_orders=30)
    assert len(few) == 30
    assert len(search_orders((0, 0, 2, 2), lambda order: order[0], [], max_orders=6)) == count_orders((0, 0, 2, 2)) == 6


def test_another_order_may_be_better_than_the_fixed_one():
    profile, cluster = env_b(memory_bytes=(9000, 9000, 18000, 18000))
    given, every = (
        candidates(Problem(profile, cluster, **JOB), order=order, objective="bottleneck")[0]
        for order in (range(4), "all")
    )
    given_s, every_s = (closed_form(profile, cluster, made.stages, 4).bottleneck_s for made in (given, every))
    assert given_s > 1.05 * every_s
    for order in itertools.permutations(range(4)):
        other = candidates(Problem(profile, cluster, **JOB), order=order, objective="bottleneck")[0]
        cost = closed_form(profile, cluster, other.stages, 4)
        assert cost.bottleneck_s >= every_s * (1 - 1e-9)


def test_where_nothing_fits_in_the_fixed_order_another_may_hold_the_model():
    """Where memory is scarce the fixed order may lose everything: here 2 orders of 24 hold the model at all."""
    profile, cluster = env_b(memory_bytes=(7000, 7000, 3300, 8000))
    with pytest.raises(PlanError):
        candidates(Problem(profile, cluster, **JOB), order=range(4))
    assert candidates(Problem(profile, cluster, **JOB), order="all")
    with pytest.raises(PlanError, match="No plan comes nearer"):
        candidates(Problem(profile, env_b(memory_bytes=(2000,) * 4)[1], **JOB), order="all")
