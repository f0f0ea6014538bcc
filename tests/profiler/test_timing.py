import random

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.profiler.timing import counted_timings, monotone, time_calls, time_grids


class Clock:
    """A clock that calls move forward."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def call(self, name, seconds):
        def run(*_):
            self.order.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return run


def test_calls_are_timed_in_turn_after_a_warm_up():
    clock = Clock()
    found = time_calls({"a": clock.call("a", 1.0), "b": clock.call("b", 3.0)}, repeats=4, budget_s=1e9, clock=clock)
    assert clock.order == list("aabb") + list("abba") * 2
    assert found == {"a": 1.0, "b": 3.0}


def test_every_timing_is_reported_and_rounds_that_are_not_needed_are_no_longer_expected(monkeypatch):
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    clock, told = Clock(), []
    with counted_timings(lambda *now: told.append(now)):
        time_grids({"F": lambda *_: clock.call("F", 1.0)}, (1, 2), (8,), budget_s=1e9, clock=clock)
        time_calls({"a": clock.call("a", 1.0)}, repeats=2, budget_s=1e9, clock=clock)
    of_grid, rounds = 2 * (2 + 9), 2 * (2 + 4)  # it is steady, so that four of nine rounds suffice
    assert told[: rounds + 1] == [(done, of_grid) for done in range(1, rounds + 1)] + [(rounds + 1, rounds + 3)]
    assert told[-1] == (rounds + 3, rounds + 3)
    time_calls({"a": clock.call("a", 1.0)}, repeats=2, budget_s=1e9, clock=clock)
    assert told[-1] == (rounds + 3, rounds + 3) and len(told) == rounds + 3


def test_disturbances_do_not_show():
    clock, draw = Clock(), random.Random(0)
    disturbed = clock.call("a", lambda: 1.0 + (draw.random() < 0.4) * draw.uniform(1, 50))
    found = time_calls({"a": disturbed}, repeats=25, budget_s=1e9, clock=clock)["a"]
    assert found == 1.0


def test_drift_hits_all_alike():
    clock = Clock()
    slower = iter(1 + 0.01 * step for step in range(10**6))
    found = time_calls(
        {"a": clock.call("a", lambda: next(slower)), "b": clock.call("b", lambda: next(slower))},
        repeats=20,
        budget_s=1e9,
        clock=clock,
    )
    assert found["a"] == pytest.approx(found["b"], rel=0.01)


def test_rounds_end_when_they_no_longer_change_the_results(monkeypatch):
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    clock = Clock()
    time_calls({"steady": clock.call("steady", 1.0)}, budget_s=1e9, clock=clock)
    assert len(clock.order) == 2 + 4
    quicker = iter(100 / step for step in range(1, 10**6))
    time_calls({"changing": clock.call("changing", lambda: next(quicker))}, budget_s=1e9, clock=clock)
    assert clock.order.count("changing") == 2 + 9


def test_the_budget_ends_it_after_at_least_one_round():
    clock = Clock()
    time_calls({"a": clock.call("a", 10.0)}, repeats=100, budget_s=45.0, clock=clock)
    assert len(clock.order) == 2 + 3  # 20 s of warm-up, 30, 40, 50
    time_calls({"b": clock.call("b", 10.0)}, repeats=100, budget_s=1.0, clock=clock)
    assert clock.order.count("b") == 2 + 1


def test_what_is_prepared_is_not_timed():
    clock = Clock()
    given = []

    def run(value):
        given.append(value)
        clock.now += 2.0

    def prepare():
        clock.now += 100.0
        return len(given)

    assert time_calls({"a": (prepare, run)}, repeats=3, budget_s=1e9, clock=clock)["a"] == 2.0
    assert given == [0, 1, 2, 3, 4]


def test_short_calls_run_several_times_a_round():
    clock = Clock()
    found = time_calls({"a": clock.call("a", 5e-5)}, repeats=2, budget_s=1e9, clock=clock)["a"]
    assert found == pytest.approx(5e-5)
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


def test_grids_of_several_kinds():
    clock = Clock()
    grids = time_grids(
        {
            "F": lambda batch, length: clock.call("F", batch * length),
            "SB": lambda batch, length: clock.call("SB", 1.0 + batch),
        },
        (1, 4),
        (8, 16, 32),
        repeats=2,
        budget_s=1e9,
        clock=clock,
    )
    assert grids["F"](2, 16) == pytest.approx(32)
    assert grids["F"](4, 24) == pytest.approx(96)
    assert grids["SB"].seconds == ((2.0, 2.0, 2.0), (5.0, 5.0, 5.0))


def test_a_grid_of_real_work_grows_with_its_size():
    weights = torch.randn(64, 64)

    def make(batch, length):
        tokens = torch.randn(batch * length, 64)
        return lambda: tokens @ weights

    grid = time_grids({"F": make}, (1, 8), (16, 256), repeats=3, budget_s=1.0)["F"]
    assert all(cell > 0 for row in grid.seconds for cell in row)
    assert grid(8, 256) >= grid(1, 16)


def test_dents_are_ironed_out_both_ways():
    draw = random.Random(2)
    for _ in range(200):
        cells = [[draw.uniform(0, 9) for _ in range(draw.randint(4, 4))] for _ in range(3)]
        found = monotone(cells)
        for row in found:
            assert list(row) == sorted(row)
        for column in zip(*found, strict=True):
            assert list(column) == sorted(column)
        assert sum(map(sum, found)) == pytest.approx(sum(map(sum, cells)))
    assert monotone([[1, 2], [3, 4]]) == ((1, 2), (3, 4))
    assert monotone([[2, 1]]) == ((1.5, 1.5),)


def test_nothing_to_time_is_refused():
    with pytest.raises(ConfigError):
        time_calls({})
    with pytest.raises(ConfigError):
        time_calls({"a": int}, repeats=0)


def test_a_batch_after_a_long_one_takes_as_much_longer_as_it_has_more_samples():
    clock = Clock()
    grids = time_grids(
        {"F": lambda batch, length: clock.call(f"{batch} x {length}", 0.01 * batch * length)},
        (1, 2, 4, 8, 16),
        (8, 128),
        repeats=2,
        budget_s=1e9,
        clock=clock,
    )
    assert grids["F"].seconds == tuple(
        (pytest.approx(0.08 * batch), pytest.approx(1.28 * batch)) for batch in (1, 2, 4, 8, 16)
    )
    assert {name for name in clock.order if name.endswith(" 128")} == {"1 x 128", "2 x 128"} and "16 x 8" in clock.order
