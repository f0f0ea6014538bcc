import random

import pytest
import torch

from tests.clock import Clock
from workbench.core.errors import ConfigError
from workbench.profiler.timing import CoreShare, core_share, counted_timings, time_calls


def test_calls_are_timed_in_turn_after_a_warm_up():
    clock = Clock()
    timings = time_calls({"a": clock.call("a", 1.0), "b": clock.call("b", 3.0)}, repeats=4, budget_s=1e9, clock=clock)
    assert clock.order == list("ab") + list("abba") * 2
    assert timings == {"a": 1.0, "b": 3.0}


def test_every_timing_is_reported_and_rounds_that_are_not_needed_are_no_longer_expected(monkeypatch):
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    clock, messages = Clock(), []
    quicker = iter(100 / step for step in range(1, 10**6))
    calls = {"steady": clock.call("steady", 1.0), "changing": clock.call("changing", lambda: next(quicker))}
    with counted_timings(lambda *now: messages.append(now)):
        time_calls(calls, budget_s=1e9, clock=clock)
        time_calls({"a": clock.call("a", 1.0)}, repeats=2, budget_s=1e9, clock=clock)
    warm_up, both, alone = 2, 2 * 2, 7  # after two rounds one is settled, and the other has seven left
    assert messages[:2] == [(1, 20), (2, 20)]
    assert messages[warm_up + both] == (7, 7 + 6)
    first = warm_up + both + alone
    assert messages[first - 1] == (first, first) and messages[-1] == (first + 3, first + 3)
    time_calls({"a": clock.call("a", 1.0)}, repeats=2, budget_s=1e9, clock=clock)
    assert len(messages) == first + 3


def test_disturbances_do_not_show():
    clock, draw = Clock(), random.Random(0)
    disturbed = clock.call("a", lambda: 1.0 + (draw.random() < 0.4) * draw.uniform(1, 50))
    result = time_calls({"a": disturbed}, repeats=25, budget_s=1e9, clock=clock)["a"]
    assert result == 1.0


def test_drift_hits_all_alike():
    clock = Clock()
    slower = iter(1 + 0.01 * step for step in range(10**6))
    timings = time_calls(
        {"a": clock.call("a", lambda: next(slower)), "b": clock.call("b", lambda: next(slower))},
        repeats=20,
        budget_s=1e9,
        clock=clock,
    )
    assert timings["a"] == pytest.approx(timings["b"], rel=0.01)


def test_a_call_that_nothing_disturbs_is_timed_twice_while_others_go_on(monkeypatch):
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    clock = Clock()
    quicker = iter(100 / step for step in range(1, 10**6))
    calls = {"steady": clock.call("steady", 1.0), "changing": clock.call("changing", lambda: next(quicker))}
    timings = time_calls(calls, budget_s=1e9, clock=clock)
    assert clock.order.count("steady") == 1 + 2 and timings["steady"] == 1.0
    assert clock.order.count("changing") == 1 + 9


def test_the_budget_ends_it_after_at_least_one_round():
    clock = Clock()
    time_calls({"a": clock.call("a", 10.0)}, repeats=100, budget_s=45.0, clock=clock)
    assert len(clock.order) == 1 + 4  # 10 s of warm-up, 20, 30, 40, 50
    time_calls({"b": clock.call("b", 10.0)}, repeats=100, budget_s=1.0, clock=clock)
    assert clock.order.count("b") == 1 + 1


def test_what_is_prepared_is_not_timed():
    clock = Clock()
    given = []

    def run(value):
        given.append(value)
        clock.now_s += 2.0

    def prepare():
        clock.now_s += 100.0
        return len(given)

    assert time_calls({"a": (prepare, run)}, repeats=3, budget_s=1e9, clock=clock)["a"] == 2.0
    assert given == [0, 1, 2, 3]


def test_a_preparation_is_timed_with_its_call_where_it_is_a_call_itself(monkeypatch):
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    clock = Clock()
    quicker = iter(100 / step for step in range(1, 10**6))
    forward = clock.call("F", lambda: next(quicker))
    timings = time_calls({"B": (forward, clock.call("B", 2.0))}, budget_s=1e9, clock=clock, prepared={"B": "F"})
    assert timings == {"B": 2.0, "F": pytest.approx(100 / 8)}  # the lower quartile of nine, after the warm-up
    assert clock.order == list("FB") * (1 + 9)  # B would be settled after two


@pytest.mark.parametrize(("on_a_core", "share"), [(1.0, 1.0), (0.25, 0.25), (4.0, 1.0)])
def test_the_share_of_calls_with_a_core_is_counted(on_a_core, share):
    clock = Clock()

    def prepare():
        clock.now_s += 1.0

    with core_share(CoreShare(wall=clock, core=lambda: on_a_core * clock.now_s)) as counted:
        assert counted.value == 1.0
        time_calls({"a": clock.call("a", 1.0), "b": (prepare, clock.call("b", 2.0))}, repeats=2, clock=clock)
    assert counted.value == pytest.approx(share)
    before = counted.value
    time_calls({"a": clock.call("a", 1.0)}, repeats=1, clock=clock)
    assert counted.value == before


def test_short_calls_run_several_times_a_round():
    clock = Clock()
    result = time_calls({"a": clock.call("a", 5e-5)}, repeats=2, budget_s=1e9, clock=clock)["a"]
    assert result == pytest.approx(5e-5)
    assert len(clock.order) == 2 + 2 * 4


def test_one_torch_thread_is_used_and_the_old_number_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        time_calls({"a": lambda: seen.append(torch.get_num_threads())}, repeats=1)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_to_time_is_refused():
    with pytest.raises(ConfigError):
        time_calls({})
    with pytest.raises(ConfigError):
        time_calls({"a": int}, repeats=0)
