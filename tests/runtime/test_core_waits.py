"""How long threads wait for a core: which are counted, threads that begin and end, and systems that do not count."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from workbench.runtime.core_waits import THREADS, CoreWaits


def count(folder: Path, thread: int, waited_ns: int, name: str = "gloo_tcp_loop") -> None:
    (folder / str(thread)).mkdir(exist_ok=True)
    (folder / str(thread) / "comm").write_text(f"{name}\n")
    (folder / str(thread) / "schedstat").write_text(f"123456 {waited_ns} 7\n")


def test_the_waits_of_gloo_and_of_the_calling_thread_are_added(tmp_path: Path) -> None:
    own = threading.get_native_id()
    count(tmp_path, 1, 5_000_000)
    count(tmp_path, 2, 1_000_000, "pt_gloo_runloop")
    count(tmp_path, 3, 9_000_000, "python")  # another stream: its operations have deadlines
    count(tmp_path, own, 500_000, "python")
    waits = CoreWaits(tmp_path)
    assert waits.read_s() == pytest.approx(6.5e-3) == waits.read_s()
    count(tmp_path, 2, 3_000_000, "pt_gloo_runloop")
    assert waits.read_s() == pytest.approx(8.5e-3)
    count(tmp_path, 4, 4_000_000)  # has begun since
    assert waits.read_s() == pytest.approx(12.5e-3)
    waits.close()


def test_a_thread_that_has_ended_counts_no_more(tmp_path: Path) -> None:
    for thread in (1, 2):
        count(tmp_path, thread, 1_000_000)
    waits = CoreWaits(tmp_path)
    assert waits.read_s() == pytest.approx(2e-3)
    for file in (tmp_path / "2").iterdir():
        file.unlink()
    (tmp_path / "2").rmdir()
    assert waits.read_s() == pytest.approx(1e-3)
    waits.close()


def test_a_thread_of_this_process_is_read(tmp_path: Path) -> None:
    if not CoreWaits().is_known:
        pytest.skip("this system does not count for how long threads wait for a core")
    own = threading.get_native_id()
    (tmp_path / str(own)).symlink_to(THREADS / str(own))  # without gloo's threads that earlier tests have left
    waits = CoreWaits(tmp_path)

    def counted_s() -> float:
        return int((tmp_path / str(own) / "schedstat").read_text().split()[1]) * 1e-9

    for _ in range(3):
        before_s, read_s, after_s = counted_s(), waits.read_s(), counted_s()
        assert before_s <= read_s <= after_s
    waits.close()


def test_a_system_that_does_not_count_sees_no_thread_wait(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("gloo_tcp_loop\n")
    for folder in (tmp_path, tmp_path / "missing"):
        waits = CoreWaits(folder)
        assert not waits.is_known and waits.read_s() == 0
        waits.close()
