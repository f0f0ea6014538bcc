"""The benchmark of the executor: its programs can run, and a point compares what was measured with the same program's simulation."""

from __future__ import annotations

import pytest

from workbench.bench.executor import LAYERS, SECONDS, STEPS, _cluster, _point, programs
from workbench.core.program import unrolled
from workbench.schedules import check
from workbench.simulator import simulate


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_program_can_run(size: int) -> None:
    found = programs(_cluster(size))
    assert len(found) == 8
    for program, num_steps in found.values():
        check(unrolled(program, num_steps).schedule)
    streams = {op.stream for op in found["two streams"][0].schedule.ops[0]}
    assert streams == {"compute", "compute1"}
    assert any(op.kind == "ALLREDUCE" for op in found["hybrid"][0].schedule.ops[-1])


def test_a_pipeline_that_does_not_drain_is_faster_than_its_steps_one_by_one() -> None:
    program, num_steps = programs(_cluster(4))["not draining"]
    one, several = (max(span.end_s for span in simulate(unrolled(program, steps)).spans) for steps in (1, num_steps))
    assert num_steps == STEPS and several < STEPS * one
    assert several - one == pytest.approx((STEPS - 1) * 8 * SECONDS["F"])


def test_a_point_is_measured_over_simulated() -> None:
    program, _ = programs(_cluster(2))["two streams"]
    simulated_s = LAYERS * (SECONDS["ATTN"] + SECONDS["MLP"] + SECONDS["MLPB"] + SECONDS["ATTNB"])
    rounds = [[(10.0, 10.0 + ratio * simulated_s, 0.001, 0.1) for ratio in ratios] for ratios in ((1.0, 1.2, 1.0), (1.1, 1.1, 1.3))]
    point = _point("two streams", 2, program, 1, rounds)
    assert point["simulated_ms"] == pytest.approx(1e3 * simulated_s)
    assert (point["ratio"], point["least"], point["p95"]) == pytest.approx((1.2, 1.1, 1.3))
    assert point["late"] == pytest.approx(0.01)
