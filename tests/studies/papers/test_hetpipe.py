"""HetPipe's planner: allocations, memory of stashed versions and servers, and predicted waves against simulated
ones."""

from dataclasses import replace

import pytest

from tests.clusters import cluster_of, with_devices
from tests.planners.builders import SEQUENCE_LENGTH, env_b, equal, layer, profile_of, unequal
from tests.simulated import simulated
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.profile import Profile
from workbench.core.virtual_workers import VirtualWorkers
from workbench.planners import Problem
from workbench.schedules import check, insert_transfers
from workbench.schedules import hetpipe as hetpipe_schedule
from workbench_studies.papers.pac_plus.hetpipe import allocations, hetpipe, needs, virtual_worker_costs, wave_seconds

JOB = {"batch_size": 8, "micro_batches": 4, "sequence_length": SEQUENCE_LENGTH}


def two_makes(num_layers: int = 6) -> tuple[Profile, Cluster]:
    """Return two slow devices and two that are three times faster, for full fine-tuning."""
    rows = [[layer(3.0 / speed, 6.0 / speed) for _ in range(num_layers)] for speed in (1, 1, 3, 3)]
    names = ("slow0", "slow1", "fast0", "fast1")
    return profile_of(rows), cluster_of(names, name="two makes", model=[name[:-1] for name in names])


def full(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return the profile with its backward pass through the backbone, and a gradient as large as the output."""
    rows = tuple(
        tuple(
            replace(
                one,
                times={"B" if kind == "SB" else kind: grid for kind, grid in one.times.items()},
                gradient_bytes=one.output_bytes,
            )
            for one in row
        )
        for row in profile.layers
    )
    return replace(profile, layers=rows), cluster


def groups(workers: VirtualWorkers) -> set[frozenset[int]]:
    return {frozenset(rank for stage in plan.stages for rank in stage.ranks) for plan in workers.pipelines}


def waves(profile, cluster, workers, num_waves):
    schedule = check(insert_transfers(hetpipe_schedule(workers, num_waves, world_size=cluster.world_size)))
    costs = virtual_worker_costs(profile, cluster, workers, sequence_length=SEQUENCE_LENGTH)
    return simulated(schedule, costs)


def predicted_wave_s(workers):
    return sum(workers.predicted_s.values())


def wave_s(profile, cluster, workers):
    """Return the simulated seconds of a further wave."""
    return (waves(profile, cluster, workers, 9).makespan_s - waves(profile, cluster, workers, 3).makespan_s) / 6


def test_allocations_are_those_of_the_paper():
    profile, cluster = two_makes()
    result = allocations(profile, cluster, SEQUENCE_LENGTH)
    assert {((0, 1), (2, 3)), ((0, 2), (1, 3))} <= set(result)  # of one make, and of every make
    assert {len(one) for one in result} == {1, 2, 3, 4}
    best = hetpipe(Problem(profile, cluster, **JOB))
    assert tuple(sorted(map(tuple, map(sorted, groups(best))))) in result
    assert max(map(len, groups(best))) < 4  # more than one virtual worker, where they fit


def test_every_pipeline_is_balanced_and_uses_its_devices():
    profile, cluster = two_makes(8)
    result = hetpipe(Problem(profile, cluster, **JOB))
    assert result.in_flight in (1, 2)
    assert groups(result) == {frozenset({0, 2}), frozenset({1, 3})}
    for plan in result.pipelines:
        assert sorted(plan.partition()) == sorted("[2, 6]")
        assert {stage.num_layers: stage.ranks[0] >= 2 for stage in plan.stages} == {2: False, 6: True}
        assert (plan.micro_batch_size, plan.num_micro_batches) == (2, result.in_flight)


def test_a_predicted_wave_is_near_the_simulated_one():
    """In the long run, within a quarter: it leaves out how transfers and computing wait for each other."""
    ratios = []
    for seed in range(12):
        profile, cluster = full(*unequal(seed, num_layers=8, world_size=3 + seed % 3, tight=False))
        plan = hetpipe(Problem(profile, cluster, **JOB))
        assert plan.predicted_s == wave_seconds(profile, cluster, plan, sequence_length=SEQUENCE_LENGTH)
        ratios.append(wave_s(profile, cluster, plan) / predicted_wave_s(plan))
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1, abs=0.15)
    assert min(ratios) > 0.75
    assert max(ratios) < 1.5


def test_simulated_memory_stays_within_what_was_planned_for():
    """Versions in flight, pushes, global weights: the need that the planner checks is never exceeded."""
    planned = set()
    for seed in range(16):
        profile, cluster = full(*unequal(seed, num_layers=6, world_size=4, tight=True))
        cluster = with_devices(cluster, memory_bytes=lambda one: 2 * one.memory_bytes)
        try:
            plan = hetpipe(Problem(profile, cluster, **JOB))
        except PlanError:
            continue
        for rank, need in needs(profile, plan, sequence_length=SEQUENCE_LENGTH).items():
            assert need.total_bytes <= cluster.devices[rank].memory_bytes
            assert waves(profile, cluster, plan, 5).peak_bytes(rank) <= need.total_bytes
        planned.add(len(plan.pipelines))
    assert planned >= {1, 2}


def test_where_two_do_not_fit_one_pipeline_is_left():
    profile, cluster = equal(6, 2)
    assert len(hetpipe(Problem(profile, cluster, **JOB)).pipelines) == 2
    tight = with_devices(cluster, memory_bytes=6000)
    alone = hetpipe(Problem(profile, tight, **JOB))
    assert alone.grouping() == "[2]"
    assert alone.predicted_s["synchronization"] == 0


def test_slow_links_make_synchronization_dear():
    profile, cluster = env_b()
    slow = cluster.with_links(lambda link: replace(link, bytes_per_s=10.0))
    assert hetpipe(Problem(profile, slow, **JOB)).predicted_s["synchronization"] > 10
