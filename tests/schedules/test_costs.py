"""Prices of plans' schedules: against the planner's closed forms, byte for byte and second for second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedule_plans import plan_of, workers_of

from tests.clusters import cluster_of, with_devices
from tests.profiles import grid
from tests.simulated import simulated
from workbench.core.cluster import Cluster
from workbench.core.costs import TableCosts
from workbench.core.plan import Plan
from workbench.core.profile import Bytes, LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.schedule import Op, Value
from workbench.schedules import backpropagation, hetpipe, hybrid_1f1b, insert_transfers, plan_costs
from workbench.simulator import simulate
from workbench_studies.papers.pac_plus.hetpipe import virtual_worker_costs

LENGTH = 4


def layer(number: int, *, side: bool) -> LayerProfile:
    """Return a layer of 0.1 s a sample and a fixed 1 s (backward twice that); its bytes tell which layer it is."""
    forward, backward = (grid(1.1 * factor, 1.2 * factor, length=LENGTH) for factor in (1.0, 2.0))
    return LayerProfile(
        name=f"layer {number}",
        times={"F": forward, ("SB" if side else "B"): backward, "STEP": grid(0.5)},
        frozen_bytes=1000,
        trainable_bytes=10 + number,
        output_bytes=Bytes(100 + number, 7),
        gradient_bytes=Bytes(20 + number, 5),
        context_bytes=Bytes(30, 3),
        tap_bytes=Bytes(4, 2),
    )


def made(plan: Plan, world_size: int, *, side: bool) -> tuple[Profile, Cluster]:
    layers = tuple(layer(number, side=side) for number in range(plan.num_layers))
    cluster = cluster_of(world_size, bytes_per_s=1000.0, latency_s=0.25)
    return Profile(model="toy", method="test", source="analytic", layers=(layers,) * world_size), cluster


def costs_of(plan: Plan, world_size: int, sizes: Sequence[int], *, side: bool = True) -> TableCosts:
    profile, cluster = made(plan, world_size, side=side)
    return plan_costs(profile, cluster, plan, sizes=sizes, lengths=(LENGTH,) * len(sizes))


def test_activations_on_the_disk_are_written_and_read_once() -> None:
    """All but those of the last layer, whose backward pass comes next."""
    plan = plan_of((2,), layers=(3,))
    seconds = {}
    for activations in ("memory", "recompute", "disk"):
        own = replace(plan, stages=tuple(replace(stage, activations=activations) for stage in plan.stages))
        profile, cluster = made(own, 1, side=False)
        cluster = with_devices(cluster, storage_bytes_per_s=3e3, storage_write_bytes_per_s=1e3)
        costs = plan_costs(profile, cluster, own, sizes=(2,), lengths=(LENGTH,))
        program = Program.on(cluster, insert_transfers(backpropagation(own, (2,))), costs)
        seconds[activations] = simulate(program).makespan_s
    layer_bytes = 2 * (LENGTH * 30 + 3)
    disk_s = 2 * layer_bytes * (1 / 1e3 + 1 / 3e3)
    assert seconds["disk"] - seconds["memory"] == pytest.approx(disk_s, rel=1e-6)
    assert seconds["recompute"] - seconds["memory"] == pytest.approx(2 * 1.2)


def test_operations_of_a_group() -> None:
    plan = plan_of((3, 1), (4,), layers=(2, 3))
    costs = costs_of(plan, 3, (4, 4, 2))
    assert costs.seconds(0, Op("F", 0, 0)) == pytest.approx(2 * 1.3)
    assert costs.seconds(1, Op("F", 0, 0)) == pytest.approx(2 * 1.1)
    assert costs.seconds(2, Op("SB", 1, 1)) == pytest.approx(3 * 2 * 1.4)
    assert costs.seconds(2, Op("SB", 1, 2)) == pytest.approx(3 * 2 * 1.2)
    assert costs.seconds(2, Op("STEP", 1)) == pytest.approx(3 * 0.5)
    # A ring of two: two steps of half the 21 bytes, rounded up, over links whose latencies add.
    assert costs.seconds(0, Op("ALLREDUCE", 0, writes=(Value("gsum", 0, -1, 0),), ranks=(0, 1))) == pytest.approx(
        2 * (0.5 + 11 / 1000)
    )
    assert costs.spec(Value("gsum", 0, -1, 1)).nbytes == 10 + 11
    assert [costs.resident_bytes(rank) for rank in range(3)] == [2000 + 4 * 21, 2000 + 4 * 21, 3000 + 4 * 39]


def test_a_rank_that_the_plan_leaves_idle_costs_nothing() -> None:
    costs = costs_of(plan_of((1,), (1,)), 3, (1,))
    assert costs.resident_bytes(2) == 0
    assert costs.resident_bytes(0) == 1000 + 4 * 10


def test_messages_are_what_the_layer_in_front_of_the_boundary_hands_on() -> None:
    """Layer 1 ends stage 0; its output holds the side network's, whose gradient comes back."""
    plan = plan_of((3, 1), (4,), layers=(2, 3))
    costs = costs_of(plan, 3, (4, 4))
    output, gradient = [3 * (LENGTH * 101 + 7), LENGTH * 101 + 7], [3 * (LENGTH * 21 + 5), LENGTH * 21 + 5]
    for piece in (0, 1):
        assert costs.spec(Value("act", 0, 0, piece)).nbytes == output[piece] - gradient[piece]
        assert (
            costs.spec(Value("side", 0, 0, piece)).nbytes
            == costs.spec(Value("sgrad", 1, 0, piece)).nbytes
            == gradient[piece]
        )
    full = costs_of(plan, 3, (4, 4), side=False)
    assert full.spec(Value("act", 0, 1, 0)).nbytes == output[0]
    assert full.spec(Value("grad", 1, 1, 0)).nbytes == gradient[0]
    assert costs.spec(Value("tap", 0, 0, 0)).nbytes == 2 * 3 * (LENGTH * 4 + 2)
    assert costs.spec(Value("ctx", 1, 0, 2)).nbytes == 3 * 4 * (LENGTH * 30 + 3)
    assert costs.spec(Value("tokens", -1, 0)).nbytes == costs.spec(Value("loss", 1, 0, 2)).nbytes == 0


@pytest.mark.parametrize("side", [True, False])
def test_one_device_takes_the_sum_of_its_operations(side) -> None:
    plan = plan_of((2,), layers=(3,))
    profile, cluster = made(plan, 1, side=side)
    schedule = insert_transfers((hybrid_1f1b if side else backpropagation)(plan, (2, 2, 2)))
    timeline = simulated(schedule, plan_costs(profile, cluster, plan, sizes=(2, 2, 2), lengths=(LENGTH,) * 3))
    assert timeline.makespan_s == pytest.approx(3 * 3 * (1.2 + 2.4) + 3 * 0.5)
    tap = 2 * 3 * (LENGTH * 4 + 2) if side else 0
    assert timeline.peak_bytes(0) == 3000 + 4 * 33 + 2 * 3 * (LENGTH * 30 + 3) + tap


def test_gradients_of_shared_parameters_cross_from_stage_to_stage() -> None:
    plan = plan_of((2,), (2,), layers=(1, 2))
    profile, cluster = made(plan, 2, side=False)
    schedule = insert_transfers(backpropagation(plan, (2, 2), shared=((0, 1),)))
    without = insert_transfers(backpropagation(plan, (2, 2)))
    sizes, lengths = (2, 2), (LENGTH, LENGTH)
    costs = plan_costs(profile, cluster, plan, sizes=sizes, lengths=lengths, shared_bytes=(700,))
    spans = [simulated(one, costs) for one in (schedule, without)]
    assert sum(spans[0].bytes_sent(rank) - spans[1].bytes_sent(rank) for rank in range(2)) == 2 * 700
    # Stage 1's STEP of two layers ends the step now, after stage 0's last gradient has come, instead of stage 0's of
    # one.
    assert spans[0].makespan_s - spans[1].makespan_s == pytest.approx(0.5 + 0.7 + 0.5)


def test_virtual_workers_keep_versions_and_move_shards() -> None:
    workers = workers_of((3, 1), (2, 2), in_flight=2)
    profile, cluster = made(workers.pipelines[0], 5, side=False)
    costs = virtual_worker_costs(profile, cluster, workers, sequence_length=LENGTH)
    # Stages: 0 (layers 0-2), 1 (3), 2 (0-1), 3 (2-3).  Shards: 0-1, 2, 3.
    assert costs.spec(Value("weight", 0, -1, 1)).nbytes == 10 + 11 + 12
    assert [costs.spec(Value("push", shard, 0, 0)).nbytes for shard in range(3)] == [21, 12, 13]
    assert costs.spec(Value("act", 2, 1)).nbytes == 2 * (LENGTH * 101 + 7)
    assert costs.spec(Value("grad", 3, 1)).nbytes == 2 * (LENGTH * 21 + 5)
    assert costs.spec(Value("ctx", 3, 1)).nbytes == 2 * 2 * (LENGTH * 30 + 3)
    assert costs.resident_bytes(0) == 3000 + 3 * 33
    assert costs.resident_bytes(4) == 0
    assert costs.seconds(0, Op("F", 0, 0)) == pytest.approx(3 * 1.2)
    assert costs.seconds(0, Op("STEP", 0, 0)) == costs.seconds(0, Op("PULL", 0, 0)) == pytest.approx(1.5)
    assert costs.seconds(3, Op("MERGE", 1, 0)) == pytest.approx(0.5)
    assert costs.seconds(0, Op("PUSH", 0, 0)) == 0
    schedule = insert_transfers(hetpipe(workers, 3, world_size=5))
    timeline = simulated(schedule, costs)
    sent = sum(
        span.nbytes for span in timeline.spans if span.op.kind == "SEND" and span.op.reads[0].name in ("push", "global")
    )
    assert sent == 3 * 2 * (21 + 12 + 13)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (Op("SEND", reads=(Value("big"),), ranks=(0, 2)), 0.5 + 3.0 + 0.125),
        (Op("ALLREDUCE", writes=(Value("big"),), ranks=(0, 1, 2)), 4 * (0.5 + 1.0 + 0.125)),
        (Op("ALLGATHER", writes=(Value("big"),), ranks=(0, 1, 2)), 2 * (0.5 + 1.0 + 0.125)),
        (Op("BROADCAST", writes=(Value("big"),), ranks=(0, 1, 2)), 2 * (0.5 + 3.0 + 0.125)),
        (Op("RECV", writes=(Value("big"),), ranks=(0, 2)), 0.0),
        (Op("F"), 7.0),
    ],
)
def test_what_the_table_leaves_out_takes_the_time_of_the_links(op: Op, seconds: float) -> None:
    """3,000 bytes at 1,000 a second; each message has a latency of 0.5 s and an overhead of 0.125 s."""
    _, cluster = made(plan_of((1,)), 3, side=False)
    costs = TableCosts(seconds_by_kind={"F": 7.0}, bytes_by_name={"big": 3000}, cluster=cluster, message_s=0.125)
    assert costs.seconds(0, op) == pytest.approx(seconds)
    alone = replace(costs, cluster=None)
    assert alone.seconds(0, op) == (7.0 if op.kind == "F" else 0.0)
    assert replace(costs, seconds_by_kind={op.kind: 9.0}).seconds(0, op) == 9.0
