import itertools
import random
from dataclasses import replace

import pytest

from tests.clusters import cluster_of, with_devices
from tests.plans import staged_plan, stages
from workbench.core.cluster import Link
from workbench.core.costs import collective_s
from workbench.core.plan import Stage
from workbench.core.profile import Bytes
from workbench.core.schedule import ALLREDUCE
from workbench.planners import Problem, closed_form
from workbench.simulator.steps import step_s

from .builders import equal, layer, problem_of, profile_of, unequal


def replay(forward_s, backward_s, send_s, return_s, num_micro_batches):
    """Return the makespan of 1F1B by brute force: each stage runs its list in order, links are free of contention."""
    last = len(forward_s) - 1
    lists = []
    for stage in range(last + 1):
        warm_up = min(last - stage, num_micro_batches)
        order = [("F", m) for m in range(warm_up)]
        for m in range(num_micro_batches):
            if m + warm_up < num_micro_batches:
                order.append(("F", m + warm_up))
            order.append(("B", m))
        lists.append(order)
    done, clocks, at = {}, [0.0] * (last + 1), [0] * (last + 1)
    while any(at[stage] < len(lists[stage]) for stage in range(last + 1)):
        for stage in range(last + 1):
            while at[stage] < len(lists[stage]):
                kind, m = lists[stage][at[stage]]
                if kind == "F":
                    needed, wait = ("F", stage - 1, m), send_s[stage - 1] if stage else 0.0
                else:
                    needed, wait = (("B", stage + 1, m), return_s[stage]) if stage < last else (("F", stage, m), 0.0)
                if stage == 0 and kind == "F":
                    ready = 0.0
                elif needed in done:
                    ready = done[needed] + wait
                else:
                    break
                clocks[stage] = max(clocks[stage], ready) + (forward_s if kind == "F" else backward_s)[stage]
                done[kind, stage, m] = clocks[stage]
                at[stage] += 1
    return max(clocks)


def test_equal_stages_and_free_links_last_m_plus_p_minus_1():
    for p in (1, 2, 4):
        for m in (4, 8):
            cost = closed_form.phase_lengths([1.0] * p, [2.0] * p, [0.0] * (p - 1), [0.0] * (p - 1), [0.0] * p, m)
            assert cost.total_s == pytest.approx((m + p - 1) * 3.0)
            assert cost.bottleneck_s == pytest.approx(cost.total_s)
            assert replay([1.0] * p, [2.0] * p, [0.0] * (p - 1), [0.0] * (p - 1), m) == pytest.approx(cost.total_s)


def test_eq_5_and_6_by_hand():
    cost = closed_form.phase_lengths([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.1, 0.2], [0.3, 0.4], [50.0, 0.0, 7.0], 5)
    assert cost.beginning_s == pytest.approx(1 + 0.1 + 2 + 0.2)
    assert cost.execution_s == pytest.approx(5 * 9)
    assert cost.ending_s == pytest.approx(50 + (2 + 0.3) + (4 + 0.4))
    assert list(cost.parts()) == ["beginning", "execution", "ending"]
    assert sum(cost.parts().values()) == pytest.approx(cost.total_s)


def test_eq_5_misses_a_bottleneck_that_is_not_the_last_stage():
    forward, backward = [4.0, 1.0], [4.0, 1.0]
    cost = closed_form.phase_lengths(forward, backward, [0.0], [0.0], [0.0, 0.0], 8)
    true = replay(forward, backward, [0.0], [0.0], 8)
    assert cost.total_s == pytest.approx(4 + 16 + 4)
    assert cost.slowest_stage == 0
    assert cost.bottleneck_s == pytest.approx(64)
    assert true == pytest.approx(64)


def test_our_correction_is_a_lower_bound_of_1f1b_and_never_below_eq_5_6():
    draw = random.Random(0)
    closer, ratios = 0, []
    for _ in range(300):
        p, m = draw.randint(1, 5), draw.randint(1, 8)
        forward, backward = ([draw.uniform(0.1, 3) for _ in range(p)] for _ in range(2))
        send, back = ([draw.choice((0.0, draw.uniform(0, 1))) for _ in range(p - 1)] for _ in range(2))
        cost = closed_form.phase_lengths(forward, backward, send, back, [0.0] * p, m)
        true = replay(forward, backward, send, back, m)
        assert cost.total_s - 1e-9 <= cost.bottleneck_s <= true + 1e-9
        closer += cost.bottleneck_s > 1.001 * cost.total_s
        ratios.append(true / cost.bottleneck_s)
    assert closer > 60  # the correction matters for unequal stages
    assert sorted(ratios)[150] < 1.05  # and the bound is near: what it leaves out is waiting


def test_a_ring_of_all_reduce_is_paced_by_its_slowest_link():
    cluster = cluster_of(3, bytes_per_s=[1000.0, 1000.0, 100.0], latency_s=0.01)
    assert collective_s(cluster, ALLREDUCE, (0,), 600) == 0
    assert collective_s(cluster, ALLREDUCE, (0, 1), 0) == 0
    assert collective_s(cluster, ALLREDUCE, (0, 1), 600) == pytest.approx(2 * (300 / 1000 + 0.02))
    assert collective_s(cluster, ALLREDUCE, (0, 1, 2), 600) == pytest.approx(4 * (200 / 100 + 0.02))


def test_a_boundary_moves_each_sample_once_and_shares_a_ranks_link():
    pairs = {"d0>d2": Link(bytes_per_s=50.0)}
    cluster = replace(cluster_of(3, bytes_per_s=100.0, latency_s=0.005), pairs=pairs)
    first, second = stages((1, {0: 2, 1: 2}), (1, {2: 4}))

    def boundary_s(stage: Stage, following: Stage, returned: int) -> tuple[float, float]:
        layers = [layer(output_bytes=Bytes(10), gradient_bytes=Bytes(returned)) for _ in range(2)]
        form = closed_form.ClosedForm(Problem(profile_of([layers] * 3), cluster, sequence_length=1))
        return form._boundary(form.number(stage), form.number(following))

    # d0 -> d2 takes 2 x 10 / 50, d1 -> d2 takes 2 x 10 / 100; d2 receives both.
    assert boundary_s(first, second, 10) == pytest.approx((0.4 + 0.2 + 0.01, 0.4 + 0.01))
    assert boundary_s(first, second, 0) == pytest.approx((0.4 + 0.2 + 0.01, 0))
    # Two groups of equal cuts exchange side by side.
    side = stages((1, {0: 4}), (1, {2: 2, 1: 2}))[1]
    assert min(boundary_s(replace(first, shares=first.shares[:1]), side, 10)) > 0


def test_the_bound_of_a_pipeline_is_its_time_once_the_messages_are_known():
    lower = 0
    for seed in range(20):
        profile, cluster = unequal(seed, num_layers=6, world_size=4, tight=False)
        costs = closed_form.ClosedForm(problem_of(profile, cluster))
        numbers = tuple(map(costs.number, stages((1, {0: 4}), (3, {1: 2, 2: 2}), (2, {3: 4}))))
        bound_s, seconds = costs.at_least_s(numbers, 4), costs.phase_times(numbers, 4).bottleneck_s
        assert 0 < bound_s <= seconds == costs(costs.stages(numbers), 4).bottleneck_s == costs.at_least_s(numbers, 4)
        lower += bound_s < seconds
    assert lower > 10


def test_a_stage_takes_as_long_as_its_slowest_rank():
    profile, cluster = equal(3, 2)
    form = closed_form.ClosedForm(problem_of(profile, cluster))
    cost = form(stages((2, {0: 3, 1: 1}), (1, {1: 4})), 2)
    assert cost.execution_s == pytest.approx(2 * 8)
    assert cost.beginning_s == pytest.approx(6, rel=1e-3)
    assert cost.ending_s == pytest.approx(6, rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_on_slow_shared_air_the_messages_together_decide(seed):
    """The closed form knows it, and is close to the simulation of 1F1B."""
    profile, cluster = unequal(seed, num_layers=8, world_size=4, tight=False)
    rows = [[replace(one, times={"F": one.times["F"], "B": one.times["SB"]}) for one in row] for row in profile.layers]
    profile = replace(profile, method="full", layers=tuple(map(tuple, rows)))
    link = Link(bytes_per_s=cluster.devices[0].link.bytes_per_s)
    cluster = replace(with_devices(cluster, link=link), medium="wifi")
    plan = staged_plan(*((2, {rank: 3}) for rank in range(4)), micro_batches=8)

    def phases(factor: float) -> closed_form.PhaseTimes:
        return closed_form.ClosedForm(problem(factor))(plan.stages, 8)

    def problem(factor: float) -> Problem:
        return problem_of(profile, cluster.with_slower_links(factor))

    slow = 2.0
    while phases(slow).bottleneck_s < 1.9 * phases(slow / 2).bottleneck_s:
        slow *= 2
    assert phases(slow).total_s < phases(slow).bottleneck_s
    assert phases(slow).bottleneck_s == pytest.approx(step_s(problem(slow), plan), rel=0.25)


@pytest.mark.parametrize("seed", range(40))
def test_equations_5_to_7_are_the_simulation_where_nothing_waits(seed):
    """One mini-batch through a chain of devices, or all of it on one device.  Eq. 5-7 leave out the optimizer's step
    and latencies."""
    draw = random.Random(seed)
    count, micro_batches = ((1, draw.randint(1, 6)), (draw.randint(2, 5), 1))[seed % 2]
    profile, cluster = unequal(seed, num_layers=6, world_size=count, tight=False)
    rows = [[replace(one, times={"F": one.times["F"], "B": one.times["SB"]}) for one in row] for row in profile.layers]
    profile = replace(profile, method="full", layers=tuple(map(tuple, rows)))
    free = with_devices(cluster, link=lambda one: replace(one.link, latency_s=0.0))
    problem = problem_of(profile, free)
    cuts = [0, *sorted(draw.sample(range(1, 6), count - 1)), 6]
    layers = (stop - start for start, stop in itertools.pairwise(cuts))
    plan = staged_plan(*((n, {rank: 3}) for rank, n in enumerate(layers)), micro_batches=micro_batches)
    phases = closed_form.ClosedForm(problem)(plan.stages, micro_batches)
    assert step_s(problem, plan) == pytest.approx(phases.total_s, rel=1e-12)
    assert phases.bottleneck_s == pytest.approx(phases.total_s, rel=1e-12)
