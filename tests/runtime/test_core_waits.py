"""How long threads wait for a core: what is counted, threads that begin and end, and systems that do not count."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.waiting import wait_for
from workbench.runtime.core_waits import CoreWaits


def count(folder: Path, thread: int, waited_ns: int) -> None:
    (folder / str(thread)).mkdir(exist_ok=True)
    (folder / str(thread) / "schedstat").write_text(f"123456 {waited_ns} 7\n")


def test_waits_are_added_over_threads_from_a_reading_on(tmp_path: Path) -> None:
    count(tmp_path, 11, 5_000_000)
    count(tmp_path, 12, 1_000_000)
    waits = CoreWaits(tmp_path)
    before = waits.read()
    assert before == {11: 5_000_000, 12: 1_000_000} and waits.since_s(before) == 0
    count(tmp_path, 11, 7_000_000)
    count(tmp_path, 12, 1_500_000)
    count(tmp_path, 13, 4_000_000)  # has begun since
    assert waits.since_s(before) == pytest.approx(6.5e-3)
    assert waits.since_s(before, without={11}) == pytest.approx(4.5e-3)
    assert waits.since_s(before, without={11, 13, 99}) == pytest.approx(0.5e-3)


def test_a_thread_that_has_ended_counts_no_more(tmp_path: Path) -> None:
    for thread in (11, 12):
        count(tmp_path, thread, 1_000_000)
    waits = CoreWaits(tmp_path)
    waits.read()
    (tmp_path / "12" / "schedstat").unlink()
    (tmp_path / "12").rmdir()
    assert waits.read() == {11: 1_000_000}


def test_this_process_is_read() -> None:
    waits = CoreWaits()
    if not waits.is_known:
        pytest.skip("this system does not count for how long threads wait for a core")
    ends, numbers = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: (numbers.append(threading.get_native_id()), ends.wait()))
    thread.start()
    own = threading.get_native_id()
    first = wait_for(lambda: numbers and waits.read(), "the thread's number")
    assert {own, *numbers} <= first.keys() and waits.since_s(first) >= 0
    ends.set()
    thread.join()
    wait_for(lambda: numbers[0] not in waits.read(), "the end of the thread")
    assert waits.read()[own] >= first[own]


def test_a_system_that_does_not_count_sees_no_thread_wait(tmp_path: Path) -> None:
    (tmp_path / "11").mkdir()
    for folder in (tmp_path, tmp_path / "missing"):
        waits = CoreWaits(folder)
        assert not waits.is_known and waits.read() == {} and waits.since_s({}) == 0
