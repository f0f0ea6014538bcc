from dataclasses import replace

import pytest
from galaxy_plus_builders import check_inference, instance, sequence, shape

from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS, algorithm_1, plan
from workbench.methods.galaxy_plus.prices import replan
from workbench_studies.papers.galaxy_plus.printed_times import price_plan

STACK = shape(6, 12, unit_width=16)


def made():
    profile, cluster = instance([4e10, 4e10, 2e10, 1e10], (STACK,), memory_bytes=8_000_000)
    return profile, cluster, plan(sequence(profile, cluster, length=48))


def test_a_lost_device_does_not_occur_and_nothing_is_renumbered():
    profile, cluster, old = made()
    problem = sequence(profile, cluster, length=48)
    new = replan(old, problem, excluded=[1, 3])
    assert set(new.ranks) == {0, 2}
    assert (new.method, new.length, new.overlap) == ("galaxy_plus", 48, True)
    check_inference(new, profile, cluster)
    gone = replan(old, problem, excluded=[old.ranks[0]])
    assert old.ranks[0] not in gone.ranks
    assert set(replan(new, problem).ranks) == set(old.ranks)  # both are back


def test_the_portal_stays_first():
    profile, cluster, old = made()
    problem = sequence(profile, cluster, length=48)
    for portal in (0, 2):
        first = replace(
            old, ranks=(portal, *[rank for rank in (0, 1, 2, 3) if rank != portal][: old.num_positions - 1])
        )
        assert replan(first, problem, excluded=[1]).ranks[0] == portal
    assert replan(old, problem, excluded=[3]).ranks[0] == old.ranks[0]


def test_a_slow_device_gets_less_or_nothing():
    profile, cluster, old = made()
    seen = profile.slowed(1, 4.0)
    new = replan(old, sequence(seen, cluster, length=48))
    share = new.units[new.position_of(1)] if new.position_of(1) is not None else 0
    assert share < old.units[old.position_of(1)]
    assert price_plan(new, seen, cluster).layers_s < price_plan(old, seen, cluster).layers_s
    assert (
        price_plan(new, seen, cluster).layers_s
        <= price_plan(algorithm_1(sequence(seen, cluster, length=48)), seen, cluster).layers_s
    )


@pytest.mark.parametrize("name", INFERENCE_SYSTEMS)
def test_every_system_is_planned_anew_by_its_own_planner(name):
    profile, cluster = instance([4e10, 4e10, 2e10, 1e10], (STACK,))
    problem = sequence(profile, cluster, length=48)
    new = replan(INFERENCE_SYSTEMS[name](problem), problem, excluded=[0])
    assert new.method == name
    assert 0 not in new.ranks


def test_what_is_left_may_be_too_little():
    profile, cluster, old = made()
    problem = sequence(profile, cluster, length=48)
    with pytest.raises(PlanError, match="missing in all"):
        replan(old, problem, excluded=[0, 1, 2])
    with pytest.raises(PlanError, match="no other device"):
        replan(old, problem, excluded=[0, 1, 2, 3])
