"""Ranks that torchrun starts: calls, answers and events between them."""

from __future__ import annotations

import ast
import json
import pickle
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import workbench
from tests.clusters import cluster_of
from tests.waiting import LIMIT_S
from workbench.cli.torchrun import main
from workbench.core.cluster import Cluster
from workbench.core.errors import CacheError, ConfigError, DeviceLostError, RuntimeSetupError
from workbench.core.schedule import Op
from workbench.core.serial import to_json
from workbench.core.timeline import Span
from workbench.methods.common.rank_results import RankResult, StepTrace, on_rank_zeros_clock
from workbench.profiler.cache import measuring_threads
from workbench.runtime.context import RankContext
from workbench.runtime.messages import CallMessage, CallTable, decode, encode
from workbench.runtime.pipe_engine import Engine
from workbench.runtime.torchrun import Line, TorchrunEngines


def test_a_device_is_measured_with_the_threads_it_runs_with(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engines:
        rank = 1

        def serve(self) -> None:
            threads.append(measuring_threads())

    threads: list[int] = []
    monkeypatch.setenv("WORKBENCH_THREADS", "")
    monkeypatch.setattr(TorchrunEngines, "join", lambda calls: Engines())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    main()
    assert threads == [3]


def two_devices() -> Cluster:
    return cluster_of(("left", "right"), name="two", bytes_per_s=1e6)


CALLS = CallTable({f"{__name__}:{name}": "" for name in ("talk", "fail", "hold")})


class Pair:
    """Both ends of a group of two in one process: what one sends, the other receives.  wait_s: how long a rank waits
    for the other."""

    def __init__(self, wait_s: float = LIMIT_S) -> None:
        self.wait_s = wait_s
        self.queues = [queue.SimpleQueue[torch.Tensor](), queue.SimpleQueue[torch.Tensor]()]

    def end(self, rank: int) -> SimpleNamespace:
        def send(tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
            self.queues[rank].put(tensors[0].clone())
            return SimpleNamespace(wait=lambda timeout=None: None)

        def recv(tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
            def wait(timeout: object = None) -> None:
                try:
                    tensors[0].copy_(self.queues[1 - rank].get(timeout=self.wait_s))
                except queue.Empty:
                    raise RuntimeError("Timed out waiting for recv operation to complete") from None

            return SimpleNamespace(wait=wait)

        return SimpleNamespace(send=send, recv=recv)


def both(pair: Pair) -> list[TorchrunEngines]:
    """Return the ranks of a pair once they have met."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: TorchrunEngines(rank, 2, pair.end(rank), CALLS), (0, 1)))


@pytest.fixture
def leader() -> Iterator[TorchrunEngines]:
    """Yield rank 0 of two, the other served by a thread."""
    engines, other = both(Pair())
    thread = threading.Thread(target=other.serve)
    thread.start()
    engines.lead(two_devices())
    yield engines
    engines.end()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def talk(context: RankContext, payload: int) -> tuple[int, str]:
    context.publish({"step": payload})
    context.publish({"cached": True})
    return context.rank * 10 + payload, context.fidelity


def fail(context: RankContext, payload: None) -> None:
    if context.rank == 1:
        raise CacheError("The cache was asked for.", "It is broken.", "Mend it.")
    raise RuntimeError("gloo: Connection closed by peer")


def hold(context: RankContext, payload: dict[str, torch.Tensor]) -> tuple[np.ndarray, Path]:
    return payload["a"].double().numpy(), Path("here")


def test_calls_answers_and_events(leader: TorchrunEngines) -> None:
    events: list[tuple[int, object]] = []
    results = leader.run(talk, [5, 7], on_event=lambda rank, event: events.append((rank, event)))
    assert results == [(5, "real"), (17, "real")]
    assert sorted(events, key=lambda item: item[0]) == [
        (0, {"step": 5}),
        (0, {"cached": True}),
        (1, {"step": 7}),
        (1, {"cached": True}),
    ]


def test_a_rank_that_answers_is_no_longer_busy(leader: TorchrunEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may end as soon as it has the answers; a rank that is busy then exits with an error."""
    busy, send = [], Engine.send

    def watched(engine: Engine, kind: Any, *message: Any) -> None:
        if kind == "answer":
            busy.append(engine.is_busy)
        send(engine, kind, *message)

    monkeypatch.setattr(Engine, "send", watched)
    leader.run(talk, [1, 1])
    assert busy == [False, False]


def test_the_cause_is_raised_and_the_next_call_works(leader: TorchrunEngines) -> None:
    with pytest.raises(CacheError, match=r"On device .right.: The cache was asked for\. It is broken\. Mend it\."):
        leader.run(fail, [None, None])
    assert leader.run(talk, [1, 1]) == [(1, "real"), (11, "real")]


def test_tensors_arrays_and_paths_travel_also_large_ones(leader: TorchrunEngines) -> None:
    for array, path in leader.run(hold, [{"a": torch.ones(2000, 300, dtype=torch.bfloat16)}] * 2):
        assert (array.dtype, array.shape, array.sum(), path) == (np.float64, (2000, 300), 600_000.0, Path("here"))


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.mark, "run")


def call_of(name: str) -> bytes:
    cluster = two_devices()
    context = RankContext(rank=1, world_size=2, device=cluster.devices[1], cluster=cluster, fidelity="real")
    return encode(CallMessage(function=name, context=context, payload=encode(7)))


HOSTILE: list[Callable[[Path], bytes]] = [
    lambda mark: pickle.dumps(Hostile(mark)),
    lambda mark: random.Random(0).randbytes(300),
    lambda mark: b"",
    lambda mark: b"\x91" * 100_000,  # arrays in arrays
]
CALLED: list[Callable[[Path], bytes]] = [lambda mark: call_of("os:system"), lambda mark: call_of(f"{__name__}:Hostile")]


@pytest.mark.parametrize("hostile", [*HOSTILE, *CALLED])
def test_what_is_no_call_is_refused_and_runs_nothing(
    leader: TorchrunEngines, tmp_path: Path, hostile: Callable[[Path], bytes]
) -> None:
    mark, slot = tmp_path / "mark", leader.slots[1]
    slot.call, slot.number = CALLS.call(talk), 9
    slot.send("call", hostile(mark), 9)
    deadline_s = time.monotonic() + LIMIT_S
    while not (taken := [content for rank, kind, content in leader.inbox.take(0.1) if kind == "ended"]):
        assert time.monotonic() < deadline_s
    assert isinstance(taken[0].error, RuntimeSetupError)
    assert re.search(r"was expected\. What came is something else|not in the table", str(taken[0].error))
    assert not mark.exists()
    assert leader.run(talk, [1, 1]) == [(1, "real"), (11, "real")]


@pytest.mark.parametrize("size", [-2, 1 << 40])
def test_a_part_of_a_frame_that_no_rank_sends_ends_the_line(size: int) -> None:
    pair, lost = Pair(), queue.SimpleQueue[str]()
    ours, theirs = socket.socketpair()
    with ours:
        line = Line(pair.end(0), 1, theirs, lost.put)
        pair.queues[1].put(torch.tensor([size]))
        assert "allowed" in lost.get(timeout=LIMIT_S)
        assert ours.recv(1) == b""
        ours.close()
        line.join()


def test_without_the_secret_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter([b"a word that all devices know", b"another"])
    environment = SimpleNamespace(get=lambda name, default: next(known).decode())
    monkeypatch.setattr("workbench.runtime.torchrun.os", SimpleNamespace(environ=environment))
    with pytest.raises(RuntimeSetupError, match="this run's secret"):
        both(Pair())


def test_moments_of_another_clock_are_moved_to_rank_zeros() -> None:
    pair = Pair()
    other = pair.end(1)
    behind = SimpleNamespace(
        recv=other.recv,
        send=lambda tensors, peer, tag: other.send(
            [tensors[0] - 1000 if tensors[0].is_floating_point() else tensors[0]], peer, tag
        ),
    )
    with ThreadPoolExecutor(2) as pool:
        leader, _ = pool.map(lambda rank, end: TorchrunEngines(rank, 2, end, CALLS), (0, 1), (pair.end(0), behind))
    assert leader._offsets_s == {1: pytest.approx(1000, abs=100)}


def test_a_rank_that_shows_no_sign_of_life_is_named() -> None:
    """Rank 1 has met rank 0 and is frozen then."""
    leader, _ = both(pair := Pair())
    pair.wait_s = 0.2
    leader.lead(two_devices())
    with pytest.raises(
        DeviceLostError, match=r"'right' \(rank 1\) was in a run\. It is lost\. It showed no sign of life"
    ):
        leader.run(talk, [1, 1])
    leader.end()


def test_an_idle_rank_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.runtime.torchrun.BEAT_S", 0.02)
    pair, lost = Pair(), queue.SimpleQueue[str]()
    ours, theirs = socket.socketpair()
    line = Line(pair.end(0), 1, theirs, lost.put)
    assert [int(pair.queues[0].get(timeout=LIMIT_S)) for _ in range(3)] == [0, 0, 0]
    ours.close()
    pair.queues[1].put(torch.tensor([-1]))
    line.join()
    assert lost.empty()


def test_the_table_names_functions_whose_types_travel() -> None:
    from workbench.cli.torchrun import CALLS

    for name in CALLS._events:
        call = CALLS.named(name)
        for kind in (call.payload, call.event, call.result, CallMessage):
            with pytest.raises(RuntimeSetupError, match=r"[Ii]nvalid"):
                decode(b"\xc1", kind, "A message")  # refused as bytes: the type itself is one that can be decoded


def test_nothing_that_travels_between_machines_is_pickled() -> None:
    """Neither pickle nor a collective of torch that pickles, but for functions of a notebook's own on emulated
    devices."""
    folder = Path(workbench.__file__).parent
    engines_only = {"runtime/own_calls.py"}
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in (*PICKLERS, *PICKLING_COLLECTIVES, "torch.load")):
            continue
        tree = ast.parse(text)
        modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if str(path.relative_to(folder)) not in engines_only:
            assert not {name.partition(".")[0] for name in modules} & PICKLERS, path
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & PICKLING_COLLECTIVES, path
        loads = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
        ]
        assert not loads, path


PICKLING_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    *(f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")),
}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_a_cluster_of_another_size_is_refused() -> None:
    leader, _ = both(Pair())
    leader.world_size = 3
    with pytest.raises(ConfigError, match=r"2 devices.*started 3 processes"):
        leader.lead(two_devices())


def test_outside_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeSetupError, match="Start the program with torchrun"):
        TorchrunEngines.join(CALLS)


def test_a_folder_that_one_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    from workbench.cli.torchrun import _require_shared

    class Blind:
        world_size = 2

        def run(self, function, payloads):
            assert payloads[0].is_file()
            return [True, False]

    with pytest.raises(ConfigError, match="right cannot see"):
        _require_shared(Blind(), two_devices(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_results_move_to_rank_zeros_clock() -> None:
    span = Span(1, Op("F", 0, 0), 2.0, 3.0)
    trace = StepTrace(epoch=0, step=0, samples=1, start_s=2.0, end_s=3.0, loss=0.5, spans=(span,))
    result = RankResult(rank=1, steps=[trace], phases_s={"first epoch": (1.0, 4.0)}, redistribution=[span])
    moved = on_rank_zeros_clock(result, 10.0)
    assert (moved.steps[0].start_s, moved.steps[0].end_s, moved.steps[0].spans[0].start_s) == (12.0, 13.0, 12.0)
    assert moved.phases_s == {"first epoch": (11.0, 14.0)}
    assert moved.redistribution[0].end_s == 13.0
    assert result.steps[0].start_s == 2.0
    assert json.loads(to_json(moved.steps))[0][3] == 12.0
