from __future__ import annotations

import threading
import time

import pytest

from workbench.methods.pac_plus.handlers import ReadAhead


def alive() -> int:
    return sum(thread.name.startswith("read-ahead") for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_in_order_and_no_thread_stays(depth: int) -> None:
    with ReadAhead(lambda step: step * step, 10, depth=depth) as ahead:
        assert [ahead.take() for _ in range(10)] == [step * step for step in range(10)]
        with pytest.raises(IndexError, match="all 10"):
            ahead.take()
    assert alive() == 0


def test_it_reads_ahead_but_not_further_than_its_buffers() -> None:
    """While a result is in use, `depth` more may be loaded: a buffer is never filled before its reader asks for the next."""
    loaded: list[int] = []
    with ReadAhead(lambda step: loaded.append(step) or step, 10, depth=2) as ahead:
        for taken in range(8):
            ahead.take()
            deadline = time.monotonic() + 5
            while len(loaded) < taken + 3 and time.monotonic() < deadline:
                time.sleep(1e-3)
            time.sleep(5e-3)
            assert loaded == list(range(taken + 3))
            assert max(loaded) < taken + ahead.num_buffers


def test_loading_hides_behind_compute() -> None:
    def load(step: int) -> int:
        time.sleep(0.02)
        return step

    def epoch(depth: int) -> float:
        begin = time.monotonic()
        with ReadAhead(load, 10, depth=depth) as ahead:
            for _ in range(10):
                ahead.take()
                time.sleep(0.025)
        return time.monotonic() - begin

    assert epoch(2) < 0.8 * epoch(0)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_the_thread_reaches_the_caller_at_its_step(depth: int) -> None:
    def load(step: int) -> int:
        if step == 3:
            raise OSError("the disk is gone")
        return step

    with ReadAhead(load, 10, depth=depth) as ahead:
        assert [ahead.take() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="disk is gone"):
            ahead.take()
    assert alive() == 0


def test_an_interrupt_in_the_middle_leaves_no_thread() -> None:
    with pytest.raises(KeyboardInterrupt), ReadAhead(lambda step: step, 1000, depth=2) as ahead:
        ahead.take()
        raise KeyboardInterrupt
    assert alive() == 0


def test_nothing_to_load() -> None:
    with ReadAhead(lambda step: step, 0):
        assert alive() == 0
