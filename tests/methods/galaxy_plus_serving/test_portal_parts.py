from __future__ import annotations

import math
from dataclasses import MISSING, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.plans import inference_plan
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.schedule import Op
from workbench.methods.galaxy_plus.serving.log import Busy, Samples, ServingLog
from workbench.methods.galaxy_plus.serving.messages import Loaded, Served, ServiceBegun, ServiceJob, UnderWay
from workbench.methods.galaxy_plus.serving.policy import ServingPolicy
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings
from workbench.methods.galaxy_plus.serving.reporting_pacer import ReportingPacer
from workbench.methods.galaxy_plus.serving.rescheduler import Rescheduler, compare, means
from workbench.methods.galaxy_plus.serving.simulation import bytes_to_read
from workbench.methods.galaxy_plus.serving.worker import ServingWorker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.models.sharding import model_layout, shard_spec
from workbench.runtime.commands import StepDone
from workbench.runtime.context import RankContext
from workbench_studies.bench.serving import SOAK_MODEL, soak_cluster
from workbench_studies.random_faults import random_faults

EXPECTED = {0: {0: 0.4, 1: 0.2}, 1: {0: 0.1, 1: 0.3}, 2: {0: 0.2, 1: 0.2}}


def times(**factors: float) -> dict[int, dict[int, float]]:
    """What devices report that are `factors` times slower than expected: d1=3.0."""
    return {
        rank: {block: seconds * factors.get(f"d{rank}", 1.0) for block, seconds in own.items()}
        for rank, own in EXPECTED.items()
    }


def test_devices_are_compared_in_the_same_block_by_what_is_expected_of_each() -> None:
    assert compare(times(), EXPECTED) == pytest.approx(dict.fromkeys(EXPECTED, 1.0))
    result = compare(times(d1=3.0), EXPECTED)
    assert result[1] == pytest.approx(3.0) and result[0] < 1.5 and result[2] < 1.5
    # What slows all of them down alike, or is a common error of the costs, makes no straggler.
    assert compare(times(d0=4.0, d1=4.0, d2=4.0), EXPECTED) == pytest.approx(dict.fromkeys(EXPECTED, 1.0))
    # Of two, too, the slow one is found; one alone is compared with nobody.
    pair = {rank: times(d0=2.0)[rank] for rank in (0, 1)}
    assert compare(pair, EXPECTED) == pytest.approx({0: 2.0, 1: 0.5})
    assert compare({0: times(d0=9.0)[0]}, EXPECTED) == {0: 1.0}
    # One slow block of two is not most of them; blocks of which nothing is expected say nothing.
    once = times()
    once[2][1] *= 10
    assert compare(once, EXPECTED)[2] < 1.5
    assert compare({**times(), 2: {0: 0.2, 1: 0.2, 7: 99.0}}, EXPECTED)[2] == pytest.approx(1.0)


def test_the_state_of_a_service_prints_as_data(make_world: type) -> None:
    world, settings, log = make_world(), ReschedulingSettings(), ServingLog()
    rescheduler = Rescheduler(settings, 4, world.plan, world.times, log)
    parts: Any = dict.fromkeys(
        field.name for field in fields(ServingPolicy) if field.default is field.default_factory is MISSING
    )
    policy = ServingPolicy(
        **parts | {"cluster": world.cluster, "settings": settings, "log": log, "rescheduler": rescheduler}
    )
    rescheduler.switched(0.0, 0)
    every = tuple(f"d{rank}" for rank in range(4))
    assert (policy.state.serving, policy.state.wanted, policy.state.slower) == (every, every, {})
    for _ in range(3):
        measured = world.times(log.plans[0], {1: 4.0}).blocks
        rescheduler.report(1.0, 0, measured)
    assert (policy.state.serving, policy.state.wanted, policy.state.left_out) == (every, ("d0", "d2", "d3"), ("d1",))
    assert policy.state.slower == {"d1": pytest.approx(4.0)}
    rescheduler.lost(1.0, 2)
    assert (policy.state.serving, policy.state.lost) == ((), ("d2",))
    assert str(policy) == f"ServingPolicy({policy.state})"


def test_reports_of_parts_of_requests_are_put_together() -> None:
    assert means([{0: 1.0, 1: 2.0}, {0: 3.0}]) == {0: 2.0, 1: 2.0}


def test_pacer_reports_whole_blocks_in_the_middle_and_the_rest_at_the_end() -> None:
    now_s = 0.0
    messages: list[dict[int, float]] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def compute(stage: int, duration_s: float, host_s: float = 0.0) -> None:
        pacer.run(partial(lambda op, reads: sleep(host_s), Op(kind="UP", stage=stage), ()), duration_s)

    pacer = ReportingPacer(2.0, every_s=0.03, tell=messages.append, clock=lambda: now_s, sleep=sleep)
    for block in range(8):
        compute(block, 0.004)
        compute(block, 0.004)
    pacer.run(lambda: None, 0.004)  # what is no operation belongs to no block
    assert messages and max(block for report in messages for block in report) < 6, (
        "of the last two blocks tiles may still come"
    )
    pacer.tell()
    seconds = {block: [report[block] for report in messages if block in report] for block in range(8)}
    assert seconds == {block: [pytest.approx(2 * 0.004 / 0.5)] for block in range(8)}  # each once, and whole
    # An injected slow-down shows in what is reported; by what a busy host is late does not.
    pacer.factor = 4.0
    compute(0, 0.004, host_s=0.05)
    compute(0, 0.004)  # makes up for a little of it
    pacer.tell()
    assert messages[-1] == {0: pytest.approx(2 * 0.016)}
    compute(1, 0.004)
    pacer.forget()
    pacer.tell()
    assert 1 not in messages[-1]
    # A real device's time is what it took.
    real = ReportingPacer(0.0, every_s=1.0, tell=messages.append, clock=lambda: now_s, sleep=sleep)
    real.run(partial(lambda op, reads: sleep(0.05), Op(kind="UP", stage=3), ()), 0.0)
    real.tell()
    assert messages[-1] == {3: pytest.approx(0.05)}


def test_faults_begin_and_end_once_and_in_order() -> None:
    faults = [
        Fault(kind="slow", rank=0, start=1.0, end=3.0, factor=2.0),
        Fault(kind="slow", rank=0, start=2.0, factor=3.0),
    ]
    schedule = FaultSchedule(faults)
    assert schedule.next_s == 1.0 and schedule.due(0.5) == []
    assert schedule.due(1.0) == [(faults[0], True)] and schedule.factor(0) == 2.0
    assert schedule.due(2.5) == [(faults[1], True)] and schedule.factor(0) == 6.0 and schedule.factor(1) == 1.0
    assert schedule.due(9.0) == [(faults[0], False)] and schedule.factor(0) == 3.0
    assert schedule.next_s == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_random_faults_leave_half_of_the_devices_up(seed: int) -> None:
    faults = random_faults(4, 600.0, every=8.0, seed=seed)
    assert faults == random_faults(4, 600.0, every=8.0, seed=seed)
    assert {fault.kind for fault in faults} == {"slow", "kill", "freeze"} and {fault.rank for fault in faults} == {
        0,
        1,
        2,
        3,
    }
    for fault in faults:
        assert fault.end is not None and fault.end <= 600.0
        others = [other for other in faults if other is not fault and other.rank == fault.rank]
        assert all(other.start > fault.end or (other.end or 0.0) < fault.start for other in others)
        down = [other for other in faults if other.kind != "slow" and other.start <= fault.start < (other.end or 0.0)]
        assert len(down) <= 2


def test_samples_keep_every_busy_second() -> None:
    samples = Samples(2)
    samples.busy[0].append(Busy(0.5, 2.5, 1.0))
    samples.busy[0].append(Busy(2.6, 2.9, 0.3))
    samples.loads[1].append((1.0, 0.75))
    samples.loads[1].append((2.5, 0.0))
    samples.slowness[1].append((1.2, 4.0))
    result = samples.over(1.0, 2.9)
    busy = {sample.start_s: sample.busy_s for sample in result if sample.rank == 0}
    assert busy == {0.0: pytest.approx(0.25), 1.0: pytest.approx(0.5), 2.0: pytest.approx(0.55)}
    second = [sample for sample in result if sample.rank == 1]
    assert [sample.load for sample in second] == [0.0, pytest.approx(0.75), pytest.approx(0.375)]
    assert [sample.slowness for sample in second] == [0.0, 4.0, 0.0]
    assert second[1].utilisation == pytest.approx(0.75) and second[0].utilisation == 0.0


def test_only_what_is_missing_is_read(make_world: type) -> None:
    world = make_world()
    base = {"columns": (10, 10, 10), "shares": (1.0, 1.0, 1.0)}
    old = inference_plan(units=(10, 10, 10), schemes=(1, 1), **base)
    assert bytes_to_read(None, old, world.profile, 1) == 2 * (10 * 20_000 + 10 * 10_000)
    assert bytes_to_read(old, old, world.profile, 1) == 0
    more = inference_plan(units=(5, 15, 10), schemes=(1, 2), **base)
    assert bytes_to_read(old, more, world.profile, 0) == 20 * 10_000  # the second layer's feed-forward network whole
    assert bytes_to_read(old, more, world.profile, 1) == 2 * 5 * 20_000 + 20 * 10_000
    assert bytes_to_read(more, old, world.profile, 1) == 0
    reference = inference_plan("pipeline", method="local", ranks=(1,), layers=(2,))
    assert bytes_to_read(old, reference, world.profile, 1) == 2 * 20 * (20_000 + 10_000)


def test_equal_plans_are_one_in_the_log() -> None:
    log = ServingLog()
    results = [
        inference_plan(units=units, columns=(1, 1), shares=(1.0, 1.0), schemes=(1,), predicted_s=s)
        for units, s in (((2, 2), 0.1), ((2, 2), 0.2), ((3, 1), 0.1))
    ]
    assert [log.plan(plan) for plan in results] == [0, 0, 1]


def test_a_device_that_returns_with_its_slices_has_loaded_them() -> None:
    """It reads nothing then, and says so; what it says again when it begins to serve is no second event."""
    cluster, layout, messages = soak_cluster(), model_layout(SOAK_MODEL), []
    plan = inference_plan("pipeline", method="local", ranks=(1,), layers=(layout.num_layers,))
    channel: Any = SimpleNamespace(send=messages.append)
    context = RankContext(
        rank=1, world_size=4, device=cluster.devices[1], cluster=cluster, fidelity="real", channel=channel
    )
    specs = {1: shard_spec(plan, 0, layout.stacks)}
    steps: Any = {
        "index": 0,
        "members": (1,),
        "requests": (),
        "arrivals_s": (),
        "first_step": 0,
        "last_step": 1,
        "begin_s": None,
        "timeout_s": 1.0,
    }
    job = ServiceJob(plan=plan, specs=specs, cluster=cluster, **steps)
    with ServingWorker(context, SessionSetup(model=SOAK_MODEL, cluster=cluster)) as worker:
        for _ in range(2):
            worker.prepare(job, 0)
    first, again = messages
    assert first.read_bytes > 0 and again == Loaded(0, 0.0, 0)

    parts: Any = dict.fromkeys(
        field.name for field in fields(ServingPolicy) if field.default is field.default_factory is MISSING
    )
    log, rescheduler = ServingLog(plans=[plan]), SimpleNamespace(current=-1, wanted=0)
    rescheduler.switched = lambda now_s, index: setattr(rescheduler, "current", index)
    policy = ServingPolicy(
        **parts | {"fleet": SimpleNamespace(now_s=lambda: 2.0), "log": log, "rescheduler": rescheduler}
    )
    for event in (again, again, ServiceBegun(0, 1.0), again):
        policy.heard(SimpleNamespace(job=job), 1, event)  # type: ignore[arg-type]
    assert [(event.kind, event.plan_after, event.detail) for event in log.events] == [("loaded", 0, "0 bytes")]


@pytest.mark.parametrize("is_under_way", [True, False], ids=["in service", "idle"])
def test_a_request_is_repeated_if_its_only_device_is_lost_while_it_serves_it(is_under_way: bool) -> None:
    """No other device can tell of the attempt.  What comes before the next attempt is service, not queueing."""
    parts: Any = dict.fromkeys(
        field.name for field in fields(ServingPolicy) if field.default is field.default_factory is MISSING
    )
    parts |= {"samples": Samples(1), "requests": (SimpleNamespace(length=8),), "answers": [torch.ones(2)]}
    log, rescheduler = ServingLog(arrivals_s=(0.5, 7.0)), SimpleNamespace(current=0)
    policy = ServingPolicy(
        **parts | {"fleet": SimpleNamespace(now_s=lambda: 12.0), "log": log, "rescheduler": rescheduler}
    )
    policy.answered = lambda request: None
    generation: Any = SimpleNamespace(job=SimpleNamespace(index=0, specs={}))
    policy.heard(generation, 0, ServiceBegun(0, 10.0))
    if is_under_way:
        policy.heard(generation, 0, UnderWay(0, 11.0))
    policy.ended(generation, {}, frozenset({0}))
    for number in (0, 1):
        since_s = 16.0 + 2 * number
        policy.heard(generation, 0, UnderWay(number, since_s))
        done = Served(np.ones(2, dtype=np.float32), since_s, since_s + 1.0, since_s, since_s + 1.0, 1.0, 0.25, 1.0)
        policy.stepped(generation, 0, StepDone(number, 0.0, done))
    policy.ended(generation, {}, frozenset({0}))  # idle again: nothing is repeated
    assert (policy.late_s, policy.paced_s) == ({0: 0.5}, {0: 2.0})
    results = [(request.start_s, request.queueing_s, request.end_s, request.attempts) for request in log.requests]
    assert results == [(1.0, 0.5, 7.0, 2) if is_under_way else (6.0, 5.5, 7.0, 1), (8.0, 1.0, 9.0, 1)]
    assert [(event.kind, event.value) for event in log.events] == [("repeated", 0.0)] * is_under_way
