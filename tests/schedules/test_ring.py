"""RingAda: no contexts and no backward below the terminator, labels stay home, frozen stages run ahead."""

from __future__ import annotations

import pytest
from schedule_plans import equal_plan, peaks, plan_of, timed

from workbench.core.errors import ScheduleError
from workbench.core.schedule import SEND
from workbench.schedules import check, insert_transfers, ring
from workbench.schedules.ring import terminator


@pytest.mark.parametrize("unfrozen", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [1, 5])
def test_makespan_and_contexts_by_depth(unfrozen: int, num_batches: int) -> None:
    """Frozen stages overlap, unfrozen ones take one batch at a time: (p - u) f + n u (f + b)."""
    schedule = check(insert_transfers(ring(equal_plan(4), unfrozen_layers=unfrozen, initiators=(0,), batches_per_initiator=num_batches)))
    timeline = timed(schedule, F=1.0, B=2.0)
    assert timeline.makespan_s == (4 - unfrozen) * 1.0 + num_batches * unfrozen * 3.0
    assert peaks(schedule, "ctx", F=1.0, B=2.0) == (0,) * (4 - unfrozen) + (1,) * unfrozen
    # Nothing is stale: there is one version of every unfrozen adapter.
    assert max(peaks(schedule, "adapter", F=1.0, B=2.0)) <= 2  # of a stage, and of the head on the initiator
    assert peaks(schedule, "adapter", F=1.0, B=2.0)[3] == 1


def test_below_the_terminator_nothing_is_trained() -> None:
    """Depth 3 of layers 4 : 5 : 2 : 3 ends on the fourth client, depth 4 on the third (the paper's Fig. 2)."""
    plan = plan_of((1,), (1,), (1,), (1,), layers=(4, 5, 2, 3))
    assert [terminator(plan, depth) for depth in (1, 3, 4, 5, 6, 10, 11, 14)] == [3, 3, 2, 2, 1, 1, 0, 0]
    schedule = insert_transfers(ring(plan, unfrozen_layers=3, initiators=(0,), batches_per_initiator=2))
    for rank in range(3):
        kinds = {op.kind for op in schedule.ops[rank] if op.stage == rank}
        assert "B" not in kinds and "STEP" not in kinds
    # The gradient goes u_1 -> u_4 and no further.
    gradients = [op.ranks for ops in schedule.ops for op in ops if op.kind == SEND and op.reads[0].name == "grad"]
    assert gradients == [(0, 3)] * 2


@pytest.mark.parametrize("initiator", [0, 1, 2])
def test_the_loss_is_computed_where_the_labels_are(initiator: int) -> None:
    """Samples and labels never travel; the head is on the initiator, wherever in the ring that is."""
    schedule = check(insert_transfers(ring(equal_plan(3), unfrozen_layers=2, initiators=(initiator,), batches_per_initiator=2)))
    sent = {op.reads[0].name for ops in schedule.ops for op in ops if op.kind == SEND}
    assert sent == ({"embedding", "act", "grad"} if initiator else {"act", "grad"})
    assert [any(op.kind == "HEAD" for op in ops) for ops in schedule.ops] == [rank == initiator for rank in range(3)]


def test_the_head_is_handed_to_the_next_initiator() -> None:
    """Its newest version travels once per change of initiator."""
    schedule = check(insert_transfers(ring(equal_plan(3), unfrozen_layers=1, initiators=(0, 1, 2), batches_per_initiator=2)))
    heads = [(op.ranks, op.part) for ops in schedule.ops for op in ops if op.kind == SEND and op.reads[0].name == "adapter"]
    assert heads == [((0, 1), 2), ((1, 2), 4)]


def test_impossible_rings_are_refused() -> None:
    """Depths that do not exist, groups, initiators from outside."""
    for depth in (0, 4):
        with pytest.raises(ScheduleError, match="unfreezing depth"):
            ring(equal_plan(3), unfrozen_layers=depth, initiators=(0,), batches_per_initiator=1)
    with pytest.raises(ScheduleError, match="2 ranks"):
        ring(plan_of((1, 1)), unfrozen_layers=1, initiators=(0,), batches_per_initiator=1)
    with pytest.raises(ScheduleError, match="initiator"):
        ring(equal_plan(3), unfrozen_layers=1, initiators=(3,), batches_per_initiator=1)
