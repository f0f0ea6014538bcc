"""Memory from liveness, against bytes counted by hand."""

from __future__ import annotations

from tests.simulated import simulated
from workbench.core.costs import TableCosts
from workbench.core.schedule import Schedule
from workbench.core.timeline import MemorySample
from workbench.simulator import live_counts

TRAINING = """
    rank 0
    in tokens:_.0 tokens:_.1
    0F0 (tokens:_.0) -> (act:0.0 ctx:0.0)
    0SEND0 0>1 (act:0.0) -> () @send
    0F1 (tokens:_.1) -> (act:0.1 ctx:0.1)
    0SEND1 0>1 (act:0.1) -> () @send
    1RECV0 1>0 () -> (grad:1.0) @recv
    0B0 (ctx:0.0 grad:1.0) -> (gacc:0.0)
    1RECV1 1>0 () -> (grad:1.1) @recv
    0B1 (ctx:0.1 grad:1.1) -> (gacc:0.1)
    0STEP (gacc:0.0 gacc:0.1) -> (weight:0)
    out weight:0
    rank 1
    0RECV0 0>1 () -> (act:0.0) @recv
    1F0 (act:0.0) -> (ctx:1.0)
    1B0 (ctx:1.0) -> (grad:1.0)
    1SEND0 1>0 (grad:1.0) -> () @send
    0RECV1 0>1 () -> (act:0.1) @recv
    1F1 (act:0.1) -> (ctx:1.1)
    1B1 (ctx:1.1) -> (grad:1.1)
    1SEND1 1>0 (grad:1.1) -> () @send
"""
COSTS = TableCosts(
    seconds_by_kind={"F": 1.0, "B": 2.0, "SEND": 0.5, "STEP": 0.25},
    bytes_by_name={"tokens": 1, "act": 10, "grad": 20, "ctx": 100, "weight": 1000},
    resident_by_rank={0: 5000, 1: 7000},
)


def test_two_stages_by_hand() -> None:
    """Every change of a 1F1B of two stages and two micro-batches."""
    timeline = simulated(TRAINING, COSTS)
    changes = {sample.time_s: sample.nbytes - 5000 for sample in timeline.memory[0]}
    # 0.0 tokens and the first forward's writes; 1.0 tokens:_.0 end; 1.5 act:0.0 was sent ...
    assert changes == {
        0.0: 2 + 110,
        1.0: 1 + 110 + 110,
        1.5: 1 + 100 + 110,
        2.0: 100 + 110,
        2.5: 100 + 100,
        4.5: 200 + 20,
        7.0: 100,
        7.5: 100 + 20,
        10.0: 0,
        10.25: 1000,
    }
    assert timeline.peak_bytes(0) == 5000 + 1000
    assert timeline.memory[0][0] == MemorySample(0.0, 5112)
    # On rank 1 act:0.1 arrives (2.0 to 2.5) while the first backward still holds its context and writes its gradient.
    assert timeline.peak_bytes(1) == 7000 + 100 + 10 + 20
    assert timeline.memory[1][-1].nbytes == 7000


def test_outputs_stay_and_unread_values_go() -> None:
    """An output lives to the end; what nobody reads lives while it is written; unused inputs end at once."""
    text = "rank 0\nin spare kept\n0F0 () -> (a)\n0F1 () -> (b)\n0F2 () -> ()\nout b kept\n"
    costs = TableCosts(seconds_by_kind={"F": 1.0}, bytes_by_name={"a": 1, "b": 2, "spare": 4, "kept": 8})
    (samples,) = simulated(text, costs).memory
    assert [(s.time_s, s.nbytes) for s in samples] == [(0.0, 9), (1.0, 10)]


def test_a_step_updates_in_place_unless_the_old_version_is_needed() -> None:
    """Two versions only while somebody still reads the old one."""
    place = "rank 0\nin w:_._.0\n0STEP (w:_._.0) -> (w:_._.1)\nout w:_._.1\n"
    copy = "rank 0\nin w:_._.0\n0STEP (w:_._.0) -> (w:_._.1)\n0B (w:_._.0) -> ()\nout w:_._.1\n"
    costs = TableCosts(seconds_by_kind={"STEP": 1.0, "B": 1.0}, bytes_by_name={"w": 6})
    assert simulated(place, costs).peak_bytes(0) == 6
    assert simulated(copy, costs).peak_bytes(0) == 12


def test_live_counts() -> None:
    """The same liveness, counted by name."""
    schedule = Schedule.from_text(TRAINING)
    spans = simulated(schedule, COSTS, memory=False).spans
    assert live_counts(schedule, spans, "ctx") == (2, 1)
    # The order of the spans does not matter: measured ones come rank by rank.
    assert live_counts(schedule, tuple(reversed(spans)), "act") == (2, 2)
    assert live_counts(schedule, spans, "nothing") == (0, 0)


def test_an_idle_rank_has_its_resident_bytes() -> None:
    """One sample, from time 0."""
    assert simulated(Schedule(ops=((), ())), COSTS).memory == (
        (MemorySample(0.0, 5000),),
        (MemorySample(0.0, 7000),),
    )
