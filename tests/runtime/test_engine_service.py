from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_jobs
import pytest
import service_jobs
from ssh_hosts import real_cluster

from tests.waiting import LIMIT_S
from workbench.core.errors import RuntimeSetupError
from workbench.runtime.engine_service import EngineService
from workbench.runtime.engine_session import LocalSlot
from workbench.runtime.engine_slots import Inbox
from workbench.runtime.engines import EngineCluster
from workbench.runtime.frames import Message
from workbench.runtime.messages import CallTable
from workbench.runtime.pipe_engine import Engine
from workbench.runtime.ssh_devices import SshEngines, SshSlot


def wait_for(service: EngineService, wanted: set[tuple[int, str]]) -> dict[tuple[int, str], object]:
    """Take news until all of the wanted (rank, kind or name of the event) were there."""
    results: dict[tuple[int, str], object] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while not wanted <= set(results):
        assert time.monotonic() < deadline_s, f"only {results}"
        for news in service.news(0.05):
            name, content = news.content if news.kind == "event" else (news.kind, news.content)
            results[news.rank, name] = content
    return results


def test_one_device_dies_and_comes_back_while_the_others_go_on(engines: EngineCluster) -> None:
    pids = engines.engine_pids
    with engines.service(service_jobs.echo) as service:
        for rank in range(3):
            service.start(rank)
        wait_for(service, {(rank, "ready") for rank in range(3)})
        with pytest.raises(RuntimeSetupError, match="running another"):
            engines.run(engine_jobs.count, [1] * 3)

        service.kill(1)
        wait_for(service, {(1, "died")})
        assert service.running == {0, 2}
        service.restart(1)
        # The others answer meanwhile, also among themselves.
        for rank in (0, 2):
            assert service.command(rank, ("pair", (0, 2)))
        result = wait_for(service, {(0, "sum"), (2, "sum"), (1, "restarted")})  # in any order
        assert (result[0, "sum"], result[2, "sum"], result[1, "restarted"]) == (2.0, 2.0, None)
        assert not service.command(1, "anybody there?")
        service.start(1)
        wait_for(service, {(1, "ready")})
        for rank in range(3):
            assert service.command(rank, ("all", (0, 1, 2)))
        assert wait_for(service, {(rank, "sum") for rank in range(3)})[1, "sum"] == 3.0

        service.freeze(2)
        service.restart(2)  # a process that only sleeps is ended first
        assert wait_for(service, {(2, "restarted")})[2, "restarted"] is None
        for rank in (0, 1):
            service.command(rank, "stop")
        assert wait_for(service, {(0, "ended"), (1, "ended")})[0, "ended"].result == "stopped"  # type: ignore[attr-defined]
    survivors = engines.engine_pids
    assert survivors[0] == pids[0] and survivors[1] != pids[1] and survivors[2] != pids[2]
    assert engines.run(engine_jobs.all_reduce, [1] * 3) == [[6.0]] * 3
    assert engines.engine_pids == survivors


def test_a_job_that_does_not_end_is_ended(engines: EngineCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    close = EngineService.close
    monkeypatch.setattr(EngineService, "close", lambda self, timeout_s: close(self, 0.2))
    with engines.service(service_jobs.echo) as service:
        service.start(0)
        wait_for(service, {(0, "ready")})
    assert engines.run(engine_jobs.all_reduce, [1] * 3) == [[6.0]] * 3


class Once:
    """An attribute that another thread sets to None as soon as it has been read."""

    def __set__(self, instance: Any, value: Any) -> None:
        instance.value = value

    def __get__(self, instance: Any, owner: type) -> Any:
        value, instance.value = instance.value, None
        return value


class EndingEngine(Engine):
    _channel = Once()


class ClosingSlot(SshSlot):
    connection = Once()


class RestartingSlot(LocalSlot):
    @property
    def is_alive(self) -> bool:
        self._pipe = None
        return False


def test_a_command_that_comes_as_its_job_ends_does_not_end_the_engine() -> None:
    engine, heard = EndingEngine(CallTable({}), 0, 1, lambda engine: None), list[bytes]()
    engine._channel = SimpleNamespace(command=heard.append)
    for number in range(2):
        engine._take(Message("command", 1, b"%d" % number))
    assert heard == [b"0"]


def test_a_device_is_looked_at_while_it_is_restarted() -> None:
    cluster, heard = real_cluster(), list[str]()
    slot = RestartingSlot(0, cluster.devices[0], Inbox(2), None)  # type: ignore[arg-type]
    slot._pipe = SimpleNamespace(hang_up=lambda: heard.append("hang up"))  # type: ignore[assignment]
    slot.look()
    assert heard == ["hang up"] and slot._pipe is None


@pytest.mark.parametrize(
    "use",
    [
        SshSlot.kill,
        lambda slot: slot.is_sending,
        lambda slot: slot.cpu_s,
        lambda slot: slot.memory,
        lambda slot: slot.link.name,
        lambda slot: slot.give_up(ValueError("odd")),
        lambda slot: slot._write(b"x"),
    ],
)
def test_a_device_whose_connection_is_closed_meanwhile(use: Callable[[SshSlot], object], tmp_path: Path) -> None:
    engines, used = SshEngines(real_cluster(), tmp_path, CallTable({})), list[str]()

    class Connection:
        def __getattr__(self, name: str) -> Any:
            used.append(name)
            return None if name == "health" else lambda *words, **named: None

    slot = ClosingSlot(0, engines.cluster.devices[0], engines)
    slot.connection = Connection()
    use(slot)
    assert used
