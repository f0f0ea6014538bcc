"""A machine's processors by name, and threads pinned to them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.profiler import processors
from workbench.profiler.cache import measuring_threads
from workbench.profiler.processors import Place, core_groups, pinned, place_of, places

needs_pinning = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")


def test_cores_are_grouped_by_what_the_kernel_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slow cores with a capacity, one fast core with a frequency alone, and all alike where it states nothing."""
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda process: {0, 1, 2})
    for core, name, value in (
        (0, "cpu_capacity", 400),
        (1, "cpu_capacity", 400),
        (2, "cpufreq/cpuinfo_max_freq", 2_000_000),
    ):
        file = tmp_path / f"cpu{core}" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"{value}\n")
    assert core_groups(tmp_path) == [[2], [0, 1]]
    assert core_groups(tmp_path / "none") == [[0, 1, 2]]


def test_names_say_which_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "core_groups", lambda: [[4, 5, 7], [0, 1, 2, 3]])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = places()
    assert list(result)[:3] == ["cores 4-5,7", "cores 0-3", "cuda:0"]
    assert result["cuda:0"] == Place(torch.device("cuda:0"), (4, 5, 7))
    assert all(place_of(name, "d") == place for name, place in result.items())
    assert place_of("cores 1,4-5", "d").cores == (1, 4, 5)
    for name in ("gpu", "cores 0-8", "cores", "cores x"):
        with pytest.raises(
            ConfigError, match=f"Processor '{name}' of device 'd'.*That machine has cores 4-5,7, cores 0-3, cuda:0"
        ):
            place_of(name, "d")


@needs_pinning
def test_a_pinned_process_measures_with_as_many_threads_and_is_restored() -> None:
    before, cores = (
        (os.sched_getaffinity(0), torch.get_num_threads(), measuring_threads()),
        sorted(os.sched_getaffinity(0)),
    )
    with pinned(Place(torch.device("cpu"), (cores[-1],))):
        assert (os.sched_getaffinity(0), torch.get_num_threads(), measuring_threads()) == ({cores[-1]}, 1, 1)
        allowed = set[frozenset[int]]()
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # a thread of an earlier test may end meanwhile
                allowed.add(frozenset(os.sched_getaffinity(int(task.name))))
        assert allowed == {frozenset(cores[-1:])}
    assert (os.sched_getaffinity(0), torch.get_num_threads(), measuring_threads()) == before
