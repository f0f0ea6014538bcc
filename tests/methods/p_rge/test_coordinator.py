"""What becomes of a run when devices die, fall silent or slow down: the coordinator against devices that only reckon, in lockstep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from methods.conftest import four_devices
from methods.p_rge.worlds import Q, chain, prepared_job, profile_for, shared, with_options
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import STEP
from workbench.core.seeds import query_seed
from workbench.methods.common.layers import layers_seconds
from workbench.methods.p_rge import messages as m
from workbench.methods.p_rge.coordinator import Coordinator, Done
from workbench.methods.p_rge.faults import parse_faults
from workbench.methods.p_rge.handlers import record_of
from workbench.methods.p_rge.history import History
from workbench.methods.p_rge.layout import QueryStep
from workbench.methods.p_rge.running import Run
from workbench.methods.p_rge.session import RankPart, StepDone
from workbench.runtime.engine_service import News

ROW_S = 1e-3


def loss_of(seed: int, step: int, part: int) -> float:
    """Return what any device finds for a part."""
    return (query_seed(seed, step, part // 2) % 1000) / 500 * (1 if part % 2 else -1)


class ReckonedDevices:
    """Stands in for an EngineService.  dies: rank -> the step in whose middle it dies; frozen: likewise, answering nothing more.

    A call of `news` makes one step of the generation under way.
    """

    address = ""

    def __init__(self, dies: dict[int, int] | None = None, frozen: dict[int, int] | None = None) -> None:
        self._dies, self._frozen = dies or {}, frozen or {}
        self._pending: list[News] = []
        self._orders: dict[int, m.Train] = {}
        self._paused = False
        self._factors: dict[int, float] = {}
        self._silent: set[int] = set()
        self.jobs: list[m.Train] = []
        self.killed: list[int] = []
        self.probes = 0

    def start(self, rank: int, function: Callable[..., Any], payload: Any) -> None:
        self._pending.append(News(rank, "event", m.Ready()))

    def command(self, rank: int, content: Any) -> bool:
        match content:
            case m.Train():
                if not self._orders:
                    self.jobs.append(content)
                    self._step, self._paused = content.job.first_step, False
                self._orders[rank] = content
            case m.Pause():
                self._paused = True
            case m.Slow():
                self._factors[rank] = content.factor
            case m.Probe():
                self.probes += 1
                self._pending.append(News(rank, "event", m.Probed(self._factors.get(rank, 1.0))))
        return True

    def kill(self, rank: int) -> None:
        self.killed.append(rank)
        self._frozen.pop(rank, None)
        self._silent.discard(rank)
        self._orders.pop(rank, None)
        self._pending.append(News(rank, "died"))

    freeze = kill

    def restart(self, rank: int) -> None:
        self._pending.append(News(rank, "restarted"))

    def news(self, timeout_s: float) -> list[News]:
        if self._orders and not self._silent:
            self._lockstep()
        found, self._pending = self._pending, []
        return found

    def _lockstep(self) -> None:
        train = next(iter(self._orders.values()))
        if set(self._orders) != set(train.members):  # one was killed by a fault
            self._lose(self._step)
            return
        job, step = train.job, self._step
        for rank in [rank for rank in train.members if self._dies.get(rank) == step]:
            del self._dies[rank], self._orders[rank]
            self._pending.append(News(rank, "died"))
        self._silent = {rank for rank in train.members if self._frozen.get(rank) == step}
        if set(self._orders) != set(train.members) or self._silent:
            self._lose(step)
            return
        record = record_of(job, step, {part: loss_of(job.job.seed, step, part) for part in range(2 * job.estimator.queries)})
        self._step += 1
        ends = "finished" if self._step == job.last_step else "paused" if self._paused else ""
        for rank in train.members:
            self._pending.append(News(rank, "event", StepDone(record, self._busy_s(rank, train))))
        if ends:
            for rank in train.members:
                self._tell_end(rank, train, ends, {})
            self._orders = {}

    def _lose(self, step: int) -> None:
        for rank, train in list(self._orders.items()):
            if rank not in self._silent:
                self._tell_end(rank, train, "lost", self._own_losses(rank, train, step))
                del self._orders[rank]

    def _tell_end(self, rank: int, train: m.Train, end: Any, losses: dict[int, float]) -> None:
        part = RankPart(rank=train.members.index(rank), end=end, losses=losses)
        part.records = [self._record(train, step) for step in range(train.job.first_step, self._step)]
        self._pending.append(News(rank, "event", m.Ended(train.generation, part)))

    def _record(self, train: m.Train, step: int) -> Any:
        job = train.job
        return record_of(job, step, {part: loss_of(job.job.seed, step, part) for part in range(2 * job.estimator.queries)})

    def _own_losses(self, rank: int, train: m.Train, step: int) -> dict[int, float]:
        place, first = train.members.index(rank), 0
        for share in train.job.plan.stages[-1].shares:
            if share.rank == place:
                return {part: loss_of(train.job.job.seed, step, part) for part in range(2 * first, 2 * (first + share.queries))}
            first += share.queries
        return {}

    def _busy_s(self, rank: int, train: m.Train) -> float:
        job, place = train.job, train.members.index(rank)
        step = QueryStep.build(job.plan, job.passings, len(train.members))
        total = layers_seconds(job.profile.layers[place], STEP, job.estimator.queries, 1)
        for op in step.schedule.ops[place]:
            if op.kind == "F":
                queries = len(step.queries(op.part))
                count, parts = job.passings[place].passes(queries)
                total += count * layers_seconds(job.profile.layers[place], "F", parts * job.change.setting.batch_size, 1)
                total += layers_seconds(job.profile.layers[place], STEP, queries, 1)
        return self._factors.get(rank, 1.0) * total


@pytest.fixture
def coordinate(tmp_path: Path) -> Iterator[Callable[..., tuple[Done, History]]]:
    """Yield what runs a job on reckoned devices.  memory_bytes: of each."""

    def run(devices: ReckonedDevices, plan: Any, *, memory_bytes: int = 100_000_000, **options: Any) -> tuple[Done, History]:
        prepared = with_options(prepared_job(), **{"steps": 16} | options)
        cluster = four_devices(memory_bytes)
        profile = profile_for(prepared, cluster, ROW_S)
        opened = Run(
            prepared,
            cluster,
            tmp_path,
            prepared.setting,
            profile_of=lambda precision: profile,
            is_real=False,
            resume=False,
            notify=lambda event: None,
        )
        with opened:
            faults = parse_faults(prepared.options.faults, cluster)
            service: Any = devices
            done = Coordinator(service, prepared, cluster, opened.launcher, opened.history, faults, lambda event: None).run(plan)
        return done, opened.history

    yield run


@pytest.mark.parametrize("after_loss", ["drop", "repeat"])
def test_the_step_of_a_death(coordinate: Callable[..., tuple[Done, History]], after_loss: str) -> None:
    """It is made from the survivors' queries, or repeated by them; all other steps have all queries."""
    devices = ReckonedDevices(dies={1: 3})
    done, history = coordinate(devices, shared(1, 2, 1), after_loss=after_loss)
    used = [len(record.seeds) for record in history.records]
    seeds = [query_seed(0, 3, query) for query in ((0, 3) if after_loss == "drop" else range(Q))]
    assert used == [Q] * 3 + [len(seeds)] + [Q] * 12
    assert list(history.records[3].seeds) == seeds
    # The losses of a part are the same whoever computes it.
    assert history.records[3].gradients[0] == pytest.approx((loss_of(0, 3, 0) - loss_of(0, 3, 1)) / 0.02, rel=1e-5)
    first, second = devices.jobs
    assert second.job.first_step == (4 if after_loss == "drop" else 3)
    assert second.job.records == tuple(history.records[: second.job.first_step])
    assert first.members == (0, 1, 2)
    assert 1 not in second.members and sum(share.queries for share in second.job.plan.stages[0].shares) == Q
    assert "device-1 is lost, in step 4." in done.notes


def test_one_that_knew_the_whole_step(coordinate: Callable[..., tuple[Done, History]]) -> None:
    """Nothing is dropped when the device dies between two steps: by an injected fault after step 5; it comes back after step 8."""
    devices = ReckonedDevices()
    done, history = coordinate(devices, shared(2, 2), faults="kill device-0 5; back device-0 8", after_loss="repeat")
    assert [len(record.seeds) for record in history.records] == [Q] * 16
    assert [0 in job.members for job in devices.jobs] == [True, False, True]
    assert any("device-0 has come back" in note for note in done.notes)


def test_a_silent_device_is_ended(coordinate: Callable[..., tuple[Done, History]], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout in which the others have told that they wait for it in vain."""
    monkeypatch.setattr("workbench.methods.p_rge.launch.SHORTEST_TIMEOUT_S", 0.05)
    devices = ReckonedDevices(frozen={2: 2})
    begin_s = time.monotonic()
    _, history = coordinate(devices, shared(2, 1, 1))
    assert devices.killed == [2]
    assert time.monotonic() - begin_s > 0.05
    assert [len(record.seeds) for record in history.records] == [Q, Q, Q - 1] + [Q] * 13


def test_survivors_that_cannot_go_on(coordinate: Callable[..., tuple[Done, History]]) -> None:
    """The log stays to be gone on with, and the error says what is missing."""
    # A device holds a half of the layers; three of four die, one after the other.
    with pytest.raises(DeviceLostError, match=r"without device-.*Device 'device-\d' has 1\.2 MB; .* need .* Bring the device back"):
        coordinate(ReckonedDevices(dies={0: 3, 1: 5, 2: 7, 3: 9}), chain(3, 6, ranks=(1, 0)), memory_bytes=1_200_000)
    with pytest.raises(DeviceLostError, match="No device is left"):
        coordinate(ReckonedDevices(dies=dict.fromkeys(range(4), 2)), shared(1, 1, 1, 1))


def test_pace_changes_shares_and_is_probed_when_idle(coordinate: Callable[..., tuple[Done, History]]) -> None:
    """A device that is 20 times slower gets nothing more, is probed, and gets its share back when it is as fast as before."""
    devices = ReckonedDevices()
    done, history = coordinate(
        devices, shared(1, 1, 1, 1), faults="slow device-3 2 20; slow device-3 20 1", adapt=True, step_s=1e3, steps=60
    )
    assert [3 in job.members for job in devices.jobs] == [True, False, True]
    assert devices.probes > 5
    assert [note for note in done.notes if "device-3 20.0 times" in note]
    assert [note for note in done.notes if "device-3 1.0 times" in note]
    assert [len(record.seeds) for record in history.records] == [Q] * 60


@pytest.mark.parametrize("asked", [True, False], ids=["to the seconds asked for", "half as long again as at first"])
def test_steps_are_kept_short(asked: bool, coordinate: Callable[..., tuple[Done, History]]) -> None:
    """When all devices become slower, q x E is halved until a step fits the time that it may take; the log tells where."""
    devices = ReckonedDevices()
    slow = "; ".join(f"slow device-{rank} 4 3" for rank in range(4))
    prepared = prepared_job()
    before_s = 6 * (4 + 2) * ROW_S  # one query of two samples on each device
    _, history = coordinate(devices, shared(1, 1, 1, 1), faults=slow, adapt=True, **({"step_s": 1.5 * before_s} if asked else {}))
    settings = [change.setting for change in history.changes]
    assert settings[0] == prepared.setting
    assert settings[-1].passes < settings[0].passes
    at = history.changes[-1].step
    assert len(history.records[at].seeds) == settings[-1].queries
    assert history.changes[-1].samples == at * settings[0].batch_size
    assert devices.jobs[-1].job.change == history.changes[-1]
    assert all(settings[-1] != setting for setting in settings[:-1])
