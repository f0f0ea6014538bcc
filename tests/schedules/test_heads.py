"""Heads split over processors: a layer's attention lasts as long as its slowest processor."""

from __future__ import annotations

import pytest
from schedule_plans import peaks, timed

from tests.plans import staged_plan
from workbench.core.errors import ScheduleError
from workbench.schedules import asynchronous_1f1b, check, insert_transfers, split_heads
from workbench.schedules.division import Division
from workbench.schedules.tensor import divide_layers


@pytest.mark.parametrize("num_layers", [1, 3])
def test_attention_lasts_as_long_as_the_slower_stream(num_layers: int) -> None:
    """Per layer max over processors of heads x seconds per head, plus the rest."""
    heads, per_head = (8, 4), (0.25, 0.375)

    def attention(rank, op):
        return heads[op.part] * per_head[op.part]

    schedule = check(split_heads(heads, num_layers=num_layers))
    forward = max(8 * 0.25, 4 * 0.375) + 1.0
    backward = 2 * max(8 * 0.25, 4 * 0.375) + 2.0
    timeline = timed(schedule, ATTN=attention, MLP=1.0, MLPB=2.0, ATTNB=lambda rank, op: 2 * attention(rank, op))
    assert timeline.makespan_s == num_layers * (forward + backward)
    # Two streams at once are not more than one busy device.
    assert timeline.bubble_fraction == 0.0


def test_one_processor_takes_the_sum() -> None:
    """All heads on one stream: no overlap."""
    alone = timed(split_heads((12, 0)), ATTN=3.0, MLP=1.0)
    assert alone.makespan_s == 4.0
    assert {span.op.stream for span in alone.spans} == {"compute"}


def test_contexts_live_until_their_backward() -> None:
    assert peaks(split_heads((1, 1), num_layers=4), "hctx", ATTN=1.0, MLP=1.0, MLPB=1.0, ATTNB=1.0) == (8,)


@pytest.mark.parametrize("columns", [(), (1, 1)])
def test_a_stage_is_computed_layer_by_layer_on_both_processors(columns: tuple[int, ...]) -> None:
    """Asynchronous 1F1B of two stages, the second one divided: complete, and at half of what is divided it is as much
    faster."""
    plan = staged_plan((2, {0: 1}), (2, {1: 1}))
    division = Division(heads=(1, 1), columns=columns, slower=(1.0, 1.0), names=("cpu", "gpu"))
    reference = asynchronous_1f1b(plan, 12)
    schedule = check(insert_transfers(divide_layers(reference, plan, {1: division})))
    assert {op.stream for op in schedule.ops[1] if not op.is_communication} == {"compute", "compute1"}
    assert {op.stage for op in schedule.ops[1] if op.kind == "ATTN"} == {2, 3}
    assert schedule.outputs == reference.outputs
    # A layer forward: 3 of attention, 3 of columns, 2 of the rest; 2 of the rest go to JOIN if there is one.
    rest = {"JOIN": 1.0, "MLP": 1.0} if columns else {"MLP": 5.0}
    seconds = {"F": 16.0, "B": 16.0, "ATTN": 1.5, "COLS": 1.5} | rest
    seconds |= {f"{kind}B": own for kind, own in seconds.items() if kind not in "FB"}
    result = timed(schedule, **seconds)
    assert result.busy_s(1) == 12 * 2 * 2 * (5.0 if columns else 6.5)
    assert {(s.op.stage, s.op.microbatch) for s in result.spans if s.op.kind == "ATTN"} == {
        (layer, m) for layer in (2, 3) for m in range(12)
    }


@pytest.mark.parametrize(("heads", "num_layers"), [((), 1), ((0, 0), 1), ((4, 4), 0), ((4, -1), 1)])
def test_nothing_to_split(heads: tuple[int, ...], num_layers: int) -> None:
    """No head, no layer."""
    with pytest.raises(ScheduleError, match="Give it a layer and a head"):
        split_heads(heads, num_layers=num_layers)
