"""RingAda's rounds: who computes what, what waits for what, and the arithmetic of unfreezing by micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.clusters import with_devices
from tests.plans import staged_plan
from tests.simulated import program_of
from workbench.core import Cluster, Link, Plan
from workbench.core.costs import TableCosts
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import Op, Schedule, Value
from workbench.core.timeline import Timeline
from workbench.methods.ringada.costs import layers_of
from workbench.methods.ringada.estimate import RingEstimate
from workbench.methods.ringada.planner import Segment, plan_ring, plan_segments
from workbench.methods.ringada.schedule import Iteration, ring_round, terminator
from workbench.planners import Problem
from workbench.simulator import simulate
from workbench.simulator.steps import SAMPLES, equal_blocks

KINDS = ("P", "F", "B")


def ring(*layers: int) -> Plan:
    return staged_plan(*((count, {rank: 1}) for rank, count in enumerate(layers)), method="ringada")


def simulated(
    plan: Plan,
    iterations: Sequence[Iteration],
    *,
    in_flight: int = 8,
    cached: Sequence[int] = (),
    cluster: Cluster | None = None,
    message_bytes: int = 0,
) -> tuple[Schedule, Timeline]:
    """Return a round whose mini-batches take one second for each layer and direction; everything else is free.

    cluster: whose links or air hidden states and gradients of message_bytes cross; None: free links.
    """
    of_micro_batch = [iteration for iteration in iterations for _ in range(iteration.num_micro_batches)]

    def seconds(rank: int, op: Op) -> float:
        if op.kind not in KINDS:
            return 0.0
        one = of_micro_batch[op.microbatch]
        return len(layers_of(plan, op, one.first_unfrozen)) / one.num_micro_batches

    schedule = ring_round(plan, iterations, seconds, in_flight=in_flight, cached=cached)
    nbytes = dict.fromkeys(("emb", "act", "grad"), message_bytes)
    costs = TableCosts(seconds_by_kind=dict.fromkeys(KINDS, seconds), bytes_by_name=nbytes, cluster=cluster)
    if cluster is not None:
        return schedule, simulate(Program.on(cluster, schedule, costs), memory=False)
    return schedule, simulate(program_of(schedule, costs), memory=False)


def op_of(schedule: Schedule, kind: str, microbatch: int, stage: int = -1) -> tuple[int, Op]:
    return next(
        (rank, op)
        for rank, ops in enumerate(schedule.ops)
        for op in ops
        if (op.kind, op.stage, op.microbatch) == (kind, stage, microbatch)
    )


def test_figure_2() -> None:
    """4 : 5 : 2 : 3 blocks, depth 3: forward u1 -> u2 -> u3 -> u4 -> u1, backward u1 -> u4; then u2 begins."""
    plan = ring(4, 5, 2, 3)
    assert [terminator(plan, 14 - depth) for depth in (1, 3, 4, 5, 6, 14)] == [3, 3, 2, 2, 1, 0]
    schedule, _ = simulated(plan, [Iteration(0, 11, 1), Iteration(1, 11, 1)])
    crossing = [
        (op.ranks, op.reads[0].name) for ops in schedule.ops for op in ops if op.kind == "SEND" and op.microbatch == 0
    ]
    around = {((0, 1), "act"), ((1, 2), "act"), ((2, 3), "act"), ((3, 0), "act")}
    assert set(crossing) == around | {((0, 3), "grad"), ((0, 1), "head")}
    assert [op.kind for op in schedule.ops[1] if op.kind in ("F", "B", "STEP")] == []
    assert op_of(schedule, "H", 1)[0] == 1


def test_a_forward_pass_waits_for_the_update_where_layers_are_trained_and_only_there() -> None:
    schedule, timeline = simulated(ring(3, 3, 3, 3), [Iteration(0, 8, 1)] * 4)
    for ops in schedule.ops:
        for op in ops:
            weights = [value for value in op.reads if value.name == "weight"]
            assert weights == (
                [Value("weight", op.stage, op.microbatch - 1)] if op.kind == "F" and op.microbatch else []
            )
    spans = {(span.op.kind, span.op.stage, span.op.microbatch): span for span in timeline.spans}
    assert spans["P", 0, 1].start_s == 3.0  # at once, long before the first mini-batch's backward pass
    assert spans["F", 2, 1].start_s == spans["STEP", 2, 0].end_s


def test_cached_micro_batches_begin_at_the_terminator() -> None:
    """The second mini-batch's; the devices below have nothing to do for it, and a frozen layer's output crosses no
    link."""
    schedule, _ = simulated(ring(3, 3, 3, 3), [Iteration(0, 7, 2), Iteration(1, 7, 2)], cached=(2, 3))
    assert op_of(schedule, "LOAD", 2, 2)[1].writes == op_of(schedule, "F", 2, 2)[1].reads[:1] == (Value("mid", 2, 2),)
    below = {op.kind for rank in (0, 1) for op in schedule.ops[rank] if op.microbatch in (2, 3)}
    assert below == {"H", "SEND", "RECV"}
    sent = {
        (op.ranks, op.reads[0].name) for ops in schedule.ops for op in ops if op.kind == "SEND" and op.microbatch == 2
    }
    assert sent == {((2, 3), "act"), ((3, 1), "act"), ((1, 3), "grad"), ((3, 2), "grad")}


def test_a_mini_batch_is_let_in_when_another_has_left() -> None:
    _, timeline = simulated(ring(3, 3, 3, 3), [Iteration(0, 11, 1)] * 4, in_flight=2)
    spans = {(span.op.kind, span.op.microbatch): span for span in timeline.spans if span.op.kind in ("E", "HSTEP")}
    assert spans["E", 2].start_s >= spans["HSTEP", 0].end_s > spans["E", 1].start_s


@pytest.mark.parametrize(("iterations", "in_flight"), [([], 1), ([Iteration(0, 1, 1)], 0)])
def test_what_makes_no_round_is_refused(iterations: list[Iteration], in_flight: int) -> None:
    with pytest.raises(ScheduleError, match="in flight"):
        ring_round(ring(1, 1), iterations, lambda rank, op: 0.0, in_flight=in_flight)


BEST = {
    1: "1443 2442 1263 1164 1155 1146 1137 1128 1119 1119 1119 1119",
    4: "1443 2442 4422 3432 5322 4422 6222 3432 4332 4332 4332 4422",
    8: "1443 2442 4422 4422 4422 5322 5322 5322 5232 4332 4332 3333",
}
"""By micro-batches, the fastest blocks of four equal devices with 1, 2, ... 12 of 12 layers unfrozen; found by trying
all 165."""


@pytest.mark.parametrize(
    ("micro_batches", "average", "all_unfrozen"), [(1, 16.9, 24.3), (4, 7.8, 10.0), (8, 6.7, 8.25)]
)
def test_what_the_rule_costs(micro_batches: int, average: float, all_unfrozen: float) -> None:
    """Layer times of a mini-batch over a layer every 40 of 700 steps, and with all adapters unfrozen (PipeAdapter
    without stale weights).

    The figures are those of an independent event simulation; ours are up to 2.1 % below, never above.
    """
    results = []
    for depth, blocks in enumerate(BEST[micro_batches].split(), start=1):
        timeline = simulated(ring(*map(int, blocks)), [Iteration(0, 12 - depth, micro_batches)] * 40)[1]
        results.append(timeline.makespan_s / 40)
    mean = (40 * sum(results[:-1]) + 260 * results[-1]) / 700
    assert 0.978 * average <= mean <= average
    assert 0.978 * all_unfrozen <= results[-1] <= all_unfrozen


@pytest.mark.parametrize(
    ("micro_batches", "cached", "once", "following"),
    [(1, True, 16.46, 16.46), (8, True, 6.65, 5.86), (8, False, 6.82, 6.57)],
)
def test_what_plans_that_follow_the_unfreezing_save(
    micro_batches: int, cached: bool, once: float, following: float
) -> None:
    """As above, by the planner's own assignments.  With 8 micro-batches and the cache, arithmetic promises 5.9; one
    device takes 24."""
    profile, cluster = equal_blocks(12, 4)
    free = profile.layers[0][0].times["F"].scaled(0.0)
    profile = replace(
        profile,
        layers=tuple(tuple(replace(one, times={**one.times, "LOAD": free}) for one in row) for row in profile.layers),
    )
    depths = dict.fromkeys(range(1, 12), 40) | {12: 260}

    def counted(depths: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        return ({}, depths) if cached else (depths, {})

    problem = Problem(profile, cluster, batch_size=SAMPLES, micro_batches=micro_batches, sequence_length=1)
    priced = RingEstimate(problem, depths=counted(depths)[0], cached=counted(depths)[1])
    plan = plan_ring(priced)
    segments = [Segment(40 * (depth - 1), priced.counts(*counted({depth: count}))) for depth, count in depths.items()]
    again = plan_segments(plan, priced, segments, lambda former, stages, first: 0.0)
    for one, expected in ((plan, once), (again, following)):
        total_s = 0.0
        for depth, count in depths.items():
            blocks = ring(*(stage.num_layers for stage in one.at(40 * (depth - 1)).stages))
            iterations = [Iteration(0, 12 - depth, micro_batches)] * 40
            total_s += (
                count * simulated(blocks, iterations, cached=range(cached * 40 * micro_batches))[1].makespan_s / 40
            )
        assert total_s / 700 == pytest.approx(expected, abs=0.01)
        assert one.total_s == pytest.approx(expected, rel=0.02)  # what the planner prices is what is simulated


def test_on_slow_air_the_trained_layers_are_on_fewer_devices_and_the_cut_is_near_the_best_of_all() -> None:
    """Three equal devices, six layers of which the upper four are trained: against every cut, simulated."""
    profile, free = equal_blocks(6, 3)
    rows = tuple(
        tuple(replace(one, output_bytes=replace(one.output_bytes, per_sample=1000)) for one in row)
        for row in profile.layers
    )
    profile, nbytes = replace(profile, layers=rows), 1000 * SAMPLES // 4
    trained_on = {}
    for message_s in (0.001, 0.25, 0.5, 1.0):
        link = Link(bytes_per_s=2 * nbytes / message_s)  # a message between two stations takes the air twice
        cluster = replace(with_devices(free, link=link), medium="wifi")
        results = {}
        for blocks in ((a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)):
            iterations = [Iteration(number % 3, 2, 4) for number in range(12)]
            _, timeline = simulated(ring(*blocks), iterations, cluster=cluster, message_bytes=nbytes)
            results[blocks] = timeline.makespan_s
        problem = Problem(profile, cluster, batch_size=SAMPLES, micro_batches=4, sequence_length=1)
        plan = plan_ring(RingEstimate(problem, depths={4: 12}))
        chosen = tuple(stage.num_layers for stage in plan.stages)
        assert results[chosen] <= 1.07 * min(results.values()), (chosen, results)
        trained_on[message_s] = sum(stage.stop > 2 for stage in plan.stages)
    assert trained_on[1.0] == 1 and results[chosen] == min(results.values())
    assert trained_on[0.001] == 3
