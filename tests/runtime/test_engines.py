from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine_jobs
import pytest

from tests.waiting import LIMIT_S, wait_for
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import (
    ConfigError,
    DeviceLostError,
    GroupNotFormedError,
    MemoryBudgetError,
    PlanError,
    RuntimeSetupError,
)
from workbench.core.medium import Medium
from workbench.core.processes import ProcessId
from workbench.runtime import engine_service
from workbench.runtime import engines as engines_module
from workbench.runtime.commands import Slow
from workbench.runtime.engines import EngineCluster, EnginePool

WORLD_SIZE = 3


def works_again(engines: EngineCluster) -> bool:
    sums = engines.run(engine_jobs.all_reduce, [1] * WORLD_SIZE)
    return sums == [[6.0]] * WORLD_SIZE


def test_results_come_by_rank(engines: EngineCluster) -> None:
    answers = engines.run(engine_jobs.who_am_i, ["a", "b", "c"])
    assert [answer[:3] for answer in answers] == [(rank, 3, f"device-{rank}") for rank in range(3)]
    assert tuple(answer[3] for answer in answers) == engines.engine_pids
    assert [answer[4] for answer in answers] == ["a", "b", "c"]
    assert engines.fidelity == "paced"


def test_function_defined_where_engines_cannot_import_it(engines: EngineCluster) -> None:
    assert engines.run(lambda context, payload: context.rank * payload, [1, 2, 3]) == [0, 2, 6]


def test_what_a_function_prints_goes_to_the_log_and_not_between_the_messages(engines: EngineCluster) -> None:
    def noisy(context: Any, payload: Any) -> list[str]:
        for stream in (sys.stdout, sys.stderr):
            print("\n\0\0 a library's warning", file=stream, flush=True)  # as the length of a message: 169 MB
        os.write(1, b"\n\0\0\0")
        os.write(2, b"\n\0\0\0")
        return [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]

    for nothing, out, error in engines.run(noisy, [None] * 3):
        assert nothing == os.devnull and out == error and out.endswith(".log")
    assert works_again(engines)


def test_all_events_arrive_in_order(engines: EngineCluster) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    engines.run(engine_jobs.count, [50] * 3, on_event=lambda rank, event: seen[rank].append(event["step"]))
    assert seen == {rank: list(range(50)) for rank in range(3)}


def test_groups_open_again_and_again(engines: EngineCluster) -> None:
    assert engines.run(engine_jobs.all_reduce, [3] * 3) == [[6.0] * 3] * 3
    assert works_again(engines)


def test_group_left_open_is_closed(engines: EngineCluster) -> None:
    assert engines.run(engine_jobs.leave_group_open, [None] * 3) == [True] * 3
    assert engines.run(engine_jobs.group_is_open, [None] * 3) == [False] * 3


def test_group_that_does_not_form_is_tried_again_on_fresh_engines(engines: EngineCluster) -> None:
    pids = engines.engine_pids
    assert engines.run(engine_jobs.group_that_forms_elsewhere, [pids] * 3) == [6.0] * 3
    assert not set(pids) & set(engines.engine_pids)


def test_group_that_never_forms_is_told(engines: EngineCluster) -> None:
    with pytest.raises(GroupNotFormedError, match="did not form"):
        engines.run(engine_jobs.group_that_forms_elsewhere, [None] * 3)
    assert works_again(engines)


def test_clear_error_names_the_device_and_engines_live_on(engines: EngineCluster) -> None:
    pids = engines.engine_pids
    with pytest.raises(PlanError) as caught:
        engines.run(engine_jobs.fail_clearly, [1] * 3)
    assert caught.value.asked == "On device 'device-1': A plan was asked for."
    assert caught.value.todo == "Add a device."
    assert works_again(engines)
    assert engines.engine_pids == pids


def test_other_exception_keeps_its_type_and_tells_the_device(engines: EngineCluster) -> None:
    with pytest.raises(LookupError, match="nothing there") as caught:
        engines.run(engine_jobs.fail_otherwise, [2] * 3)
    assert "device-2" in caught.value.__notes__[0]
    assert "fail_otherwise" in caught.value.__notes__[0]


def test_root_cause_is_told_not_what_the_peers_saw(engines: EngineCluster) -> None:
    with pytest.raises(PlanError, match="device-1"):
        engines.run(engine_jobs.fail_while_others_wait, [1] * 3)
    assert works_again(engines)


def test_wrong_payloads(engines: EngineCluster) -> None:
    with pytest.raises(ConfigError, match="2 payloads"):
        engines.run(engine_jobs.count, [1, 1])
    with pytest.raises(ConfigError, match="cannot be pickled"):
        engines.run(engine_jobs.count, [threading.Lock()] * 3)
    assert works_again(engines)


def test_one_job_at_a_time(engines: EngineCluster) -> None:
    failures: list[Exception] = []

    def start_another(rank: int, event: Any) -> None:
        try:
            engines.run(engine_jobs.count, [1] * 3)
        except RuntimeSetupError as error:
            failures.append(error)

    engines.run(engine_jobs.count, [1] * 3, on_event=start_another)
    assert len(failures) == 3


def test_stop_is_asked_for_and_obeyed(engines: EngineCluster) -> None:
    answers: dict[int, str] = {}
    with engines.service(engine_jobs.train_for_ever, [20.0] * 3) as service:
        for rank in range(3):
            service.start(rank)
        while len(answers) < 3:
            for rank, kind, content in service.news(1.0):
                assert kind in ("event", "ended"), content
                if kind == "ended":
                    answers[rank] = content.result
                elif content["step"] == 3:
                    service.request_stop()
    assert answers == dict.fromkeys(range(3), "stopped")


def test_memory_beyond_the_budget(engines: EngineCluster) -> None:
    pids = engines.engine_pids
    assert engines.run(engine_jobs.fill_memory, [40_000_000] * 3) == [10_000_000] * 3
    with pytest.raises(MemoryBudgetError, match="device-2"):
        engines.run(engine_jobs.fill_memory, [4, 4, 800_000_000])
    assert engines.engine_pids == pids
    assert all(reading.rss_bytes > 50_000_000 for reading in engines.memory())


def test_killed_engine_is_named_with_its_step(engines: EngineCluster) -> None:
    pids = engines.engine_pids

    def kill(rank: int, event: Any) -> None:
        if event["step"] == 5 and rank == 0:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(DeviceLostError, match=r"'device-1' \(rank 1\).*epoch 2, step \d+"):
        engines.run(engine_jobs.train_for_ever, [10 * LIMIT_S] * 3, on_event=kill)  # long before the group's time-out
    assert works_again(engines)
    assert not set(pids) & set(engines.engine_pids)


def test_killed_engine_is_named_while_the_others_hang(engines: EngineCluster) -> None:
    pids = engines.engine_pids

    def kill(rank: int, event: Any) -> None:
        if rank == 1:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(DeviceLostError, match=r"'device-1' .*epoch 3, step 6"):
        engines.run(engine_jobs.sleep_deaf, [60] * 3, on_event=kill)
    assert works_again(engines)


def test_frozen_engine_is_named(engines: EngineCluster) -> None:
    with pytest.raises(DeviceLostError, match=r"'device-2' .*fell silent"):
        engines.run(engine_jobs.freeze_in_a_step, [2] * 3)
    assert works_again(engines)


def test_a_device_frozen_before_the_first_meeting_is_named(
    engines: EngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_service, "FROZEN_S", 1.0)
    pids = engines.engine_pids

    def freeze(rank: int, event: Any) -> None:
        if rank == 2:
            os.kill(pids[2], signal.SIGSTOP)

    with pytest.raises(
        DeviceLostError, match=r"'device-2' \(rank 2\) was running meet_later.*no sign of life for [1-9]"
    ):
        engines.run(engine_jobs.meet_later, [None] * 3, on_event=freeze)
    assert works_again(engines)


def test_engine_killed_between_runs_is_replaced(engines: EngineCluster) -> None:
    lost = ProcessId.of(engines.engine_pids[0])
    os.kill(lost.pid, signal.SIGKILL)
    assert lost.wait(LIMIT_S)
    assert works_again(engines)


@pytest.mark.parametrize("job", [engine_jobs.train_for_ever, engine_jobs.sleep_deaf])
def test_control_c(engines: EngineCluster, job: Callable[..., Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        engines.run(job, [60.0] * 3, on_event=lambda rank, event: signal.raise_signal(signal.SIGINT))
    assert works_again(engines)


@pytest.mark.usefixtures("kernel_links")
@pytest.mark.parametrize("medium", ["switch", "wifi"])
def test_kernel_links_carry_a_group(make_cluster: Callable[..., Cluster], medium: Medium) -> None:
    """Of stations with different rates, too."""
    cluster = make_cluster(2, mbit_per_s=100)
    extra = replace(cluster.devices[1], name="slow", link=Link(bytes_per_s=2.5e6))
    cluster = replace(cluster, devices=(*cluster.devices, extra), medium=medium)
    with EngineCluster.start(cluster) as engines:
        assert engines.fidelity == "kernel"
        assert engines.run(engine_jobs.all_reduce, [2] * 3) == [[6.0, 6.0]] * 3


def test_pool_keeps_engines(make_cluster: Callable[..., Cluster]) -> None:
    pool = EnginePool(capacity=1)
    try:
        first = pool.acquire(make_cluster(1), "paced")
        assert pool.acquire(make_cluster(1), "paced") is first
        engines = [ProcessId.of(pid) for pid in first.engine_pids]
        other = pool.acquire(make_cluster(1, mbit_per_s=10), "paced")
        assert other is not first
        assert engines and all(engine.wait(LIMIT_S) for engine in engines)
    finally:
        pool.stop()
    assert other.engine_pids == ()


def test_engines_that_nobody_uses_end_and_start_again(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "IDLE_S", 0.2)
    with EngineCluster.start(make_cluster(1), fidelity="paced") as engines:
        pids = engines.engine_pids
        assert engines.run(engine_jobs.all_reduce, [1]) == [[1.0]]
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "an end of the engines")
        assert engines.run(engine_jobs.all_reduce, [1]) == [[1.0]]
        engines.keeps_variables = True  # of a notebook's cells
        engines.run(engine_jobs.all_reduce, [1])
        assert engines._idle is None


def test_what_cannot_be_started(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(1)
    real = replace(cluster, devices=(replace(cluster.devices[0], address="pi.local"),))
    with pytest.raises(RuntimeSetupError, match="workbench run"):
        EngineCluster.start(real)
    shared = replace(make_cluster(3), medium="wifi")
    with pytest.raises(RuntimeSetupError, match="which only the kernel emulates"):
        EngineCluster.start(shared, fidelity="paced")
    slow = replace(shared.devices[2], link=Link(bytes_per_s=1e6))
    with pytest.raises(RuntimeSetupError, match=r"from device-2>device-1 takes 63 times as long .* at most 31"):
        EngineCluster.start(replace(shared, devices=(*shared.devices[:2], slow)), fidelity="kernel")
    with pytest.raises(ConfigError, match="auto, kernel, paced"):
        EngineCluster.start(cluster, fidelity="exact")  # type: ignore[arg-type]


def test_a_slow_pair_of_stations_takes_more_air_until_the_run_ends(make_cluster: Callable[..., Cluster]) -> None:
    """The kernel does that; the sender does it where the kernel cannot, and on a switch."""
    cluster, shaped = replace(make_cluster(3), medium="wifi"), list[Cluster]()

    class Session:
        healthy = True

        def shape_links(self, cluster: Cluster) -> None:
            shaped.append(cluster)

    engines = EngineCluster(cluster, "kernel", "")
    engines._session, engines.dilation, engines.keeps_variables = Session(), 2.0, True  # type: ignore[assignment]
    slow = cluster.with_slow_links({"device-0>device-1": 4.0}).with_slower_links(2.0)
    assert engines.slowed(0, Slow(4.0, "device-1")) == Slow(1.0, "device-1") and shaped.pop() == slow
    assert engines.slowed(2, Slow(99.0, "device-1")) == Slow(99.0, "device-1") and shaped.pop() == slow
    engines._finish(())
    assert shaped == [cluster.with_slower_links(2.0)]
    assert EngineCluster(make_cluster(3), "kernel", "").slowed(0, Slow(4.0, "device-1")) == Slow(4.0, "device-1")


def test_links_are_not_shaped_while_idle_engines_end(make_cluster: Callable[..., Cluster]) -> None:
    engines, is_held = EngineCluster(make_cluster(1), "paced", ""), list[bool]()

    class Session:
        def shape_links(self, cluster: Cluster) -> None:
            is_held.append(engines._starting._is_owned())  # type: ignore[attr-defined]

    engines._session = Session()  # type: ignore[assignment]
    engines.dilate(2.0)
    assert is_held == [True] and engines.dilation == 2.0
