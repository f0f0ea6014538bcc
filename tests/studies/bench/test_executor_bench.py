"""The benchmark of the executor: its programs can run, and a point compares what was measured with the same program's
simulation."""

from __future__ import annotations

import pytest

from workbench.core.program import chained
from workbench.schedules import check
from workbench.simulator import simulate
from workbench_studies.bench.executor import _point
from workbench_studies.bench.executor_programs import (
    CROSSING,
    LARGE_GRADIENT,
    LATENCIES_MS,
    LAYERS,
    MICRO_BATCHES,
    SECONDS,
    SELECTED,
    SIZES,
    STEPS,
    TILES,
    Case,
    Network,
    cases,
)


@pytest.mark.parametrize("network", ["switch", "wifi"])
def test_every_program_can_run(network: Network) -> None:
    for size in SIZES[network]:
        can_run(cases(size, network), 10)


def can_run(found: dict[str, Case], count: int) -> None:
    assert len(found) == count + 2 * len(LATENCIES_MS)
    for case in found.values():
        check(chained([case.program] * case.num_steps).schedule)
    streams = {op.stream for op in found["two streams"].program.schedule.ops[0]}
    assert streams == {"compute", "compute1"}
    assert any(op.kind == "ALLREDUCE" for op in found["hybrid"].program.schedule.ops[-1])


def test_on_shared_air_all_wait_for_all() -> None:
    """An incast of 8 messages from each of 5 devices takes the air of 40; every device's part of a ring, too."""
    result = cases(6, "wifi")
    message_s = CROSSING.nbytes / 12.5e6
    incast_s = simulate(result["incast"].program, memory=False).makespan_s
    assert incast_s == pytest.approx(2 * SECONDS["F"] + 40 * message_s, rel=0.01)
    assert cases(2)["1F1B"].program.air is None and result["incast"].program.air is not None


def test_unequal_stations_take_longer_and_some_of_them_talk_directly() -> None:
    """Of an incast: 8 messages of each of three stations, the slow one's as long as its own rate says."""
    for size in (2, 4):
        for name, case in cases(size, "unequal").items():
            check(case.program.schedule)
            equal = cases(size, "wifi")[name]
            assert name in SELECTED and simulate(case.program).makespan_s > simulate(equal.program).makespan_s
    case = cases(4, "unequal")["incast"]
    assert case.cluster.link(2, 3).bytes_per_s == case.cluster.link(3, 2).bytes_per_s == 150 * 125_000
    air_s = 8 * CROSSING.nbytes * sum(1 / case.cluster.link(rank, 0).bytes_per_s for rank in (1, 2, 3))
    assert simulate(case.program).makespan_s == pytest.approx(2 * SECONDS["F"] + air_s, rel=0.01)


def test_on_slow_wires_bytes_decide() -> None:
    """Of four devices each sends 6/4 of a gradient in an all-reduce, at 2.5 MB/s."""
    case = cases(4, "slow")["all-reduce"]
    check(case.program.schedule)
    bytes_s = MICRO_BATCHES * 6 / 4 * LARGE_GRADIENT.nbytes / 2.5e6
    assert simulate(case.program).makespan_s == pytest.approx(bytes_s, rel=0.02)


@pytest.mark.parametrize("latency_ms", LATENCIES_MS)
def test_programs_of_small_messages_mostly_wait_for_latency(latency_ms: int) -> None:
    result = cases(2)
    ring, chain = (result[f"{name}, {latency_ms} ms"] for name in ("ring of many tiles", "forward-only chain"))
    seconds = [max(span.end_s for span in simulate(case.program).spans) for case in (ring, chain)]
    assert seconds[0] >= TILES * latency_ms / 1e3, "each device passes its tiles on one after the other"
    assert seconds[1] == pytest.approx((MICRO_BATCHES + 1) * SECONDS["F"] + latency_ms / 1e3, abs=2e-4)
    assert all(case.cluster.link(0, 1).latency_s == pytest.approx(latency_ms / 1e3) for case in (ring, chain))


def test_a_pipeline_that_does_not_drain_is_faster_than_its_steps_one_by_one() -> None:
    case = cases(4)["not draining"]
    one, several = (
        max(span.end_s for span in simulate(chained([case.program] * steps)).spans) for steps in (1, case.num_steps)
    )
    assert case.num_steps == STEPS and several < STEPS * one
    assert several - one == pytest.approx((STEPS - 1) * 8 * SECONDS["F"])


def test_a_point_is_measured_over_simulated() -> None:
    simulated_s = LAYERS * (SECONDS["ATTN"] + SECONDS["MLP"] + SECONDS["MLPB"] + SECONDS["ATTNB"])
    rounds = [
        [(10.0, 10.0 + ratio * simulated_s, 0.001, 0.1) for ratio in ratios]
        for ratios in ((1.0, 1.2, 1.0), (1.1, 1.1, 1.3))
    ]
    point = _point("two streams", cases(2)["two streams"], rounds)
    assert point["simulated_ms"] == pytest.approx(1e3 * simulated_s)
    assert (point["ratio"], point["least"], point["p95"]) == pytest.approx((1.2, 1.1, 1.3))
    assert point["late"] == pytest.approx(0.02)  # of both devices
