import math
from dataclasses import fields

import pytest

from workbench.core.errors import ConfigError
from workbench.profiler import host
from workbench.profiler.processors import places


def test_this_machine_is_measured(tmp_path):
    result = host.measure_host(seconds=0.05, folder=tmp_path, read_bytes=4 << 20)
    # Between a microcontroller and a supercomputer.
    assert 1e8 < result.gemm_flops_per_s < 1e13
    assert 1e8 < result.memory_bytes_per_s < 1e12
    assert 1e5 < result.storage_bytes_per_s < 1e12 and 1e5 < result.storage_write_bytes_per_s < 1e12
    assert result.cores >= 1
    assert result.processor
    assert all(math.isfinite(getattr(result, field.name)) for field in fields(result) if field.name.endswith("_s"))
    assert not list(tmp_path.iterdir())


def test_an_impossible_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        host.storage_rates(tmp_path / "absent")


def test_no_time_is_refused():
    with pytest.raises(ConfigError):
        host.measure_host(seconds=0)


def test_processors_are_measured_with_each_library_and_nothing_stays_pinned() -> None:
    before = host.os.sched_getaffinity(0), host.torch.get_num_threads()
    result = host.measure_processors(seconds=0.01)
    assert (host.os.sched_getaffinity(0), host.torch.get_num_threads()) == before
    assert {one.library for one in result} >= {"torch"} and all(one.flops_per_s > 0 for one in result)
    assert {one.processor for one in result} == set(places())
