from dataclasses import replace

import pytest
from galaxy_plus_builders import check_inference, inference_needs, instance, sequence, shape, unequal

from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.planners import algorithm_1

STACK = shape(10, 8, unit_width=16)
UNIT, COLUMN = 10 * STACK.unit_bytes, 10 * STACK.column_bytes


def test_workload_follows_the_capacity_and_scheme_2_fills_the_memory():
    total_bytes = 10 * (STACK.attention_bytes + STACK.feed_forward_bytes)
    profile, cluster = instance(
        [4e9, 2e9, 1e9, 1e9], (STACK,), memory_bytes=[total_bytes, total_bytes, total_bytes, int(0.6 * total_bytes)]
    )
    plan = algorithm_1(sequence(profile, cluster, length=40, is_printed=True))
    assert plan.units == (4, 2, 1, 1)
    assert plan.columns == (256, 128, 64, 64)
    assert plan.tokens(40) == (20, 10, 5, 5)
    # The last device holds 1/8 of everything and 7/8 of a network more for each scheme-2 layer, below 0.6 of the model.
    free = 0.6 * total_bytes - UNIT - 64 * COLUMN
    assert plan.configuration[1] == int(free / (448 * STACK.column_bytes))
    assert plan.schemes == (2,) * plan.configuration[1] + (1,) * plan.configuration[0]
    worse = replace(plan, schemes=(2,) * (plan.configuration[1] + 1) + (1,) * (plan.configuration[0] - 1))
    with pytest.raises(PlanError, match="'d3'"):
        check_inference(worse, profile, cluster, is_printed=True)


def test_vit_huge_on_four_boards_of_1_5_gb_gives_the_papers_10_and_22():
    stack = replace(shape(32, 16, unit_width=80), layer_bytes=0)
    profile, cluster = instance([1e9] * 4, (stack,), memory_bytes=1_500_000_000)
    assert algorithm_1(sequence(profile, cluster, length=197, is_printed=True)).configuration == (10, 22)


def test_columns_move_before_heads_and_by_capacity():
    each = UNIT + 64 * COLUMN  # an eighth of the model
    profile, cluster = instance([4e9, 2e9, 1e9, 1e9], (STACK,), memory_bytes=[3 * each, 4 * each, 2 * each, 2 * each])
    plan = algorithm_1(sequence(profile, cluster, length=40))
    assert plan.units == (4, 2, 1, 1)
    assert sum(plan.columns) == 512
    given = 256 - plan.columns[0]
    assert given == -(-(4 * each + profile.stacks[0].layer_bytes * 10 - 3 * each) // COLUMN)
    assert [now - before for now, before in zip(plan.columns[1:], (128, 64, 64), strict=True)] == pytest.approx(
        [given / 2, given / 4, given / 4], abs=1
    )
    assert plan.configuration == (10, 0)  # `else` in line 36
    assert plan.notes


def test_heads_move_when_columns_are_not_enough():
    each = UNIT + 64 * COLUMN
    budgets = [int(2.5 * UNIT), 20 * each, 20 * each, 20 * each]
    profile, cluster = instance([4e9, 2e9, 1e9, 1e9], (STACK,), memory_bytes=budgets)
    plan = algorithm_1(sequence(profile, cluster, length=40, is_printed=True))
    assert plan.columns[0] == 0
    assert plan.units[0] == 2
    assert sum(plan.units) == 8


def test_it_fails_where_the_printed_algorithm_does():
    profile, cluster = instance([1e9] * 3, (STACK,), memory_bytes=UNIT)
    with pytest.raises(PlanError, match="are missing"):
        algorithm_1(sequence(profile, cluster, length=40))


def test_every_plan_fits_and_partitions_the_whole():
    made = 0
    for seed in range(120):
        profile, cluster, length = unequal(seed)
        try:
            plan = algorithm_1(sequence(profile, cluster, length=length))
        except PlanError:
            continue
        made += 1
        stack = profile.stacks[0]
        assert (sum(plan.units), sum(plan.columns), sum(plan.tokens(length))) == (
            stack.num_units,
            stack.columns,
            length,
        )
        check_inference(plan, profile, cluster)
        if not plan.notes and plan.configuration[0]:
            more = replace(
                plan, schemes=(2, *plan.schemes[: plan.configuration[1]], *plan.schemes[plan.configuration[1] + 1 :])
            )
            needs = inference_needs(more, profile)
            assert any(need.total_bytes > cluster.devices[rank].memory_bytes for rank, need in needs.items())
    assert made > 60
