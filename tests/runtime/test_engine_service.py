from __future__ import annotations

import time

import engine_jobs
import pytest
import service_jobs

from tests.waiting import LIMIT_S
from workbench.core.errors import RuntimeSetupError
from workbench.runtime.engine_service import EngineService
from workbench.runtime.engines import EngineCluster


def wait_for(service: EngineService, wanted: set[tuple[int, str]]) -> dict[tuple[int, str], object]:
    """Take news until all of the wanted (rank, kind or name of the event) were there."""
    found: dict[tuple[int, str], object] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while not wanted <= set(found):
        assert time.monotonic() < deadline_s, f"only {found}"
        for news in service.news(0.05):
            name, content = news.content if news.kind == "event" else (news.kind, news.content)
            found[news.rank, name] = content
    return found


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
        found = wait_for(service, {(0, "sum"), (2, "sum"), (1, "restarted")})  # in any order
        assert (found[0, "sum"], found[2, "sum"], found[1, "restarted"]) == (2.0, 2.0, None)
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
