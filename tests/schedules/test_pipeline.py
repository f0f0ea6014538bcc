"""GPipe and 1F1B: closed forms of time, contexts in flight, and data parallelism inside a stage."""

from __future__ import annotations

import pytest
from schedule_plans import equal_plan, labels, peaks, plan_of, recomputing, timed

from workbench.core.schedule import Op
from workbench.schedules import backpropagation, check, gpipe_order, insert_transfers

SHAPES = [(1, 1), (1, 4), (2, 2), (3, 5), (4, 4), (4, 16), (8, 8)]


@pytest.mark.parametrize(("num_stages", "m"), [*SHAPES, (4, 2), (5, 1)])
def test_contexts_in_flight(num_stages: int, m: int) -> None:
    """GPipe keeps all m contexts; 1F1B at most min(p - rank, m), and with free links exactly that."""
    plan, sizes = equal_plan(num_stages), (1,) * m
    assert (
        peaks(insert_transfers(backpropagation(plan, sizes, order=gpipe_order)), "ctx", F=1.0, B=2.0)
        == (m,) * num_stages
    )
    expected = tuple(min(num_stages - rank, m) for rank in range(num_stages))
    assert peaks(insert_transfers(backpropagation(plan, sizes)), "ctx", F=1.0, B=2.0) == expected
    slow_links = peaks(insert_transfers(backpropagation(plan, sizes)), "ctx", F=1.0, B=2.0, SEND=5.0)
    assert all(count <= bound for count, bound in zip(slow_links, expected, strict=True))


def test_a_group_shares_a_stage() -> None:
    """Two ranks of the first stage each hand their pieces on, and sum their gradients."""
    schedule = check(insert_transfers(backpropagation(plan_of((3, 1), (4,)), (4,))))
    assert labels(schedule, 1) == ["0F0", "0SEND0.1", "1RECV0.1", "0B0", "0ALLREDUCE", "0STEP"]
    assert labels(schedule, 2)[-1] == "1STEP"
    assert "1ALLREDUCE" not in labels(schedule, 2)


def test_a_stage_that_recomputes_holds_one_layers_activations() -> None:
    """Of two stages of four layers the first keeps the inputs of three micro-batches, and one layer's context."""
    plan = plan_of((1,), (1,), layers=(4, 4))
    schedule = check(insert_transfers(backpropagation(recomputing(plan), (1,) * 3)))
    contexts, inputs = ({f"{name}{layer}": 1 for layer in range(8)} for name in ("ctx", "in"))
    times = {"F": 4.0, "R": 1.0, "B": 2.0}
    assert [timed(schedule, contexts, **times).peak_bytes(rank) for rank in (0, 1)] == [1, 1]
    assert [timed(schedule, inputs, **times).peak_bytes(rank) for rank in (0, 1)] == [2 * 4, 3]
    plain = timed(insert_transfers(backpropagation(plan, (1,) * 3)), F=4.0, B=8.0)
    assert sum(span.op.kind == "R" for span in timed(schedule, **times).spans) == 3 * 4 + 3 * 3
    assert plain.makespan_s < timed(schedule, **times).makespan_s < plain.makespan_s + 3 * 4 + 3


def test_a_stage_recomputes_while_it_waits_for_the_gradient() -> None:
    """The first stage's last layer is done again before the gradient arrives, so this takes no time."""
    schedule = insert_transfers(backpropagation(recomputing(plan_of((1,), (1,), layers=(1, 1)), 0), (1, 1)))
    assert "0R0.0" in labels(schedule, 0)
    assert (
        timed(schedule, F=1.0, R=1.0, B=2.0, SEND=5.0).makespan_s
        == timed(insert_transfers(backpropagation(equal_plan(2), (1, 1))), F=1.0, B=2.0, SEND=5.0).makespan_s
    )


def test_a_big_pipeline_needs_each_price_once() -> None:
    """256 stages, 32 micro-batches: the closed form holds with m < p too, and every activity is priced exactly once."""
    requests: list[Op] = []

    def forward(rank: int, op: Op) -> float:
        requests.append(op)
        return 1.0

    schedule = insert_transfers(backpropagation(equal_plan(256), (1,) * 32))
    assert timed(schedule, F=forward, B=2.0).makespan_s == (32 + 255) * 3.0
    assert len(requests) == 256 * 32
