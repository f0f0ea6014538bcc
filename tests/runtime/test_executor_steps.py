"""When a program or a step begins, how a busy host lengthens waits, and what a step leaves behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gloo_pairs import cluster_of_two, on_executors, on_ranks, program
from small_operations import WIDTH, ones, op, small, value

from tests.waiting import LIMIT_S
from workbench.core.costs import MESSAGE_S
from workbench.core.errors import ScheduleError
from workbench.core.program import Program, chained
from workbench.core.schedule import ALLREDUCE, NONE, Op, Schedule, recv, send
from workbench.core.timeline import Span
from workbench.runtime.executor import Contents, Executor
from workbench.runtime.pacing import GRAIN_S, Pacer, RankLinks
from workbench.runtime.transport import Transport
from workbench.schedules import check
from workbench.simulator import simulate


def test_a_program_begins_when_its_device_could_begin() -> None:
    """If the host was busy since then, its first operation makes up for it; later programs begin where the one before
    ended, or when they are asked for."""
    schedule = Schedule(ops=((op("F", (), (value("made"),)),),), inputs=((),), outputs=((value("made"),),))
    paced = program(schedule, small, F=1e-4)

    def work(executor: Executor) -> list[float]:
        def begin() -> Span:
            return executor.run(paced, {"F": ones}, {}).spans[0]

        executor.idle(could_s := time.monotonic() - 0.5)
        first, second = begin(), begin()
        executor.idle()
        now_s = time.monotonic()
        third, fourth = begin(), begin()
        return [
            first.start_s - could_s,
            second.start_s - first.end_s,
            min(0.0, third.start_s - now_s),
            fourth.start_s - third.end_s,
        ]

    assert on_executors(1, work) == [[0.0] * 4]


@pytest.mark.parametrize(("factor", "message_late_s"), [(1.0, 0.0), (1.0, 0.25), (0.0, 0.25)])
def test_a_pacer_learns_by_how_much_a_busy_host_lengthens_waits(
    factor: float, message_late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message comes, and a collective ends, after it is due (if its links are emulated).

    Where nothing is paced, it learns nothing.
    """

    class Listening(Pacer):
        def wait(self, seconds: float, late_s: Callable[[], float]) -> None:
            waits[threading.get_native_id()].append((seconds, late_s()))

    links: Any = None
    if message_late_s:  # the host wakes threads up too late
        for module in ("transport", "collectives"):
            monkeypatch.setattr(
                f"workbench.runtime.{module}.wait_until",
                lambda due_s: max(due_s, time.monotonic()) + message_late_s,
            )
        monkeypatch.setattr(RankLinks, "collective_s", lambda links, kind, ranks, nbytes: LIMIT_S)
        links = partial(RankLinks, cluster=cluster_of_two(), fidelity="paced")
    ready, total, waits = value("ready"), value("total"), defaultdict[int, list[tuple[float, float]]](list)
    parts = [value("part", rank) for rank in range(2)]
    sums = [Op(ALLREDUCE, 0, NONE, NONE, (part,), (total,), (0, 1), "compute") for part in parts]
    schedule = Schedule(
        ops=(
            (op("MAKE", (), (ready, parts[0])), send(ready, 0, 1), sums[0]),
            (recv(ready, 0, 1), op("USE", (ready,), (parts[1],)), sums[1]),
        ),
        inputs=((), ()),
        outputs=((total,), (total,)),
    )

    def work(rank: int, transport: Transport) -> list[tuple[float, float]]:
        handlers = {"MAKE": ones, "USE": ones, ALLREDUCE: lambda made, reads: reads}
        with Executor(rank, transport, Listening(factor)) as executor:
            executor.run(program(schedule, small), handlers, {})
        return waits[threading.get_native_id()]

    results = on_ranks(2, work, links=links and (lambda rank: links(rank=rank)))
    if not factor:
        assert results == [[], []]
        return
    [[first], [message, second]] = results
    assert min(first[0], second[0], message[0]) > 0
    for _, late_s in (message, first, second):
        assert late_s >= message_late_s - MESSAGE_S - GRAIN_S if message_late_s else late_s == 0


def chain() -> Schedule:
    """A step of two ranks: rank 0 makes a value for rank 1, both keep a state from step to step, and rank 1 begins with
    the one before."""
    ready, former, old, new = value("ready"), value("former"), value("state", 0), value("state", 1)
    first = (op("MAKE", (old,), (new, ready)), send(ready, 0, 1))
    second = (op("USE", (former, old), (new,)), recv(ready, 0, 1))
    return Schedule(
        ops=(first, second),
        inputs=((old,), (old, former)),
        outputs=((new,), (new, ready)),
        carried=(((new, old),), ((new, old), (ready, former))),
    )


def test_steps_follow_without_a_pause() -> None:
    """Rank 1 reads in each step what came in the step before; rank 0 is steps ahead, never drained."""
    schedule, num_steps = chain(), 4
    check(schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule
    ahead = threading.Event()

    def work(executor: Executor) -> list[Any]:
        executed_program: Program = program(schedule, small)
        seen: list[float] = []
        count = iter(range(num_steps))

        def make(made: Op, reads: Contents) -> Contents:
            if next(count) == 1:
                ahead.set()
            return reads[0] + 1, 10 * (reads[0] + 1)

        def use(made: Op, reads: Contents) -> Contents:
            assert ahead.wait(LIMIT_S), "rank 0 waits for rank 1"
            seen.append(reads[0][0].item())
            return (reads[0] + reads[1],)

        start = {one: torch.zeros(WIDTH) for one in schedule.inputs[executor.rank]}
        steps = [executor.begin(executed_program, {"MAKE": make, "USE": use}, start)]
        for _ in range(num_steps - 1):
            steps.append(executor.begin(executed_program, {"MAKE": make, "USE": use}, {}))
            assert steps[-2].finish().outputs == {}, "what is carried stays with the executor"
        steps[-1].finish()
        return seen

    assert on_executors(2, work) == [[], [0.0, 10.0, 20.0, 30.0]]


def test_several_steps_as_one_program_is_simulated_without_a_pause() -> None:
    schedule = chain()
    executed_program = program(schedule, small, MAKE=1.0, USE=1.0)
    (alone,) = {span.end_s for span in simulate(executed_program).spans if span.op.kind == "USE"}
    reference = simulate(chained([executed_program] * 4))
    ends = [span.end_s for span in reference.spans if span.op.kind in ("MAKE", "USE")]
    assert alone == 1.0 and sorted(ends) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    text = chained([executed_program] * 2).to_text()
    assert Program.from_text(text).to_text() == text
    with pytest.raises(ScheduleError, match="carry"):
        Schedule(ops=((),), carried=(((value("a"), value("b")),),))


def test_what_a_step_held_is_freed_at_once() -> None:
    """By reference counts alone: a device's memory is too small to wait for the garbage collector."""
    result, end = value("made"), value("end")
    schedule = Schedule(ops=((op("MAKE", (), (result,)), op("END", (result,), (end,), "compute1")),), outputs=((end,),))

    class Handlers:
        def make(self, made: Op, reads: Contents) -> Contents:
            return (torch.ones(WIDTH),)

    def work(executor: Executor) -> list[object]:
        values = []
        for _ in range(3):
            handlers = Handlers()
            values.append(weakref.ref(handlers))
            executor.run(program(schedule, small), {"MAKE": handlers.make, "END": lambda made, reads: reads}, {})
            del handlers
        return [one() for one in values]

    gc.disable()
    try:
        assert on_executors(1, work) == [[None, None, None]]
    finally:
        gc.enable()
