"""Ranks that torchrun starts: calls, answers and events through its store."""

from __future__ import annotations

import ast
import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import workbench
from tests.waiting import LIMIT_S
from workbench.cli.torchrun import main
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import CacheError, ConfigError, DeviceLostError, RuntimeSetupError
from workbench.core.schedule import Op
from workbench.core.serial import to_json
from workbench.core.timeline import Span
from workbench.methods.common.session import RankResult, StepTrace, on_rank_zeros_clock
from workbench.profiler.cache import measuring_threads
from workbench.runtime.context import RankContext
from workbench.runtime.messages import AnswerMessage, CallMessage, CallTable, decode, encode
from workbench.runtime.store_mail import StoreMail
from workbench.runtime.torchrun import TorchrunEngines


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
    link = Link(bytes_per_s=1e6)
    return Cluster(
        name="two", devices=tuple(Device(name=name, flops_per_s=1e9, memory_bytes=10**9, link=link) for name in ("left", "right"))
    )


over = threading.Event()
CALLS = CallTable({f"{__name__}:{name}": "" for name in ("talk", "fail", "wait_or_fail", "hold")})


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def leader(store: dist.Store) -> Iterator[TorchrunEngines]:
    """Yield rank 0 of two, the other served by a thread; a store in memory stands for torchrun's."""
    engines, other = (TorchrunEngines(rank, 2, lambda: store, CALLS) for rank in (0, 1))
    engines.cluster = two_devices()
    thread = threading.Thread(target=other.serve)
    thread.start()
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


def test_the_cause_is_raised_and_the_next_call_works(leader: TorchrunEngines) -> None:
    with pytest.raises(CacheError, match=r"On device .right.: The cache was asked for\. It is broken\. Mend it\."):
        leader.run(fail, [None, None])
    assert leader.run(talk, [1, 1]) == [(1, "real"), (11, "real")]


def test_a_failure_does_not_wait_long_for_the_others(leader: TorchrunEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.runtime.torchrun._GRACE_S", 0.1)
    over.clear()
    with pytest.raises(RuntimeError, match="rank 0 fails"):
        leader.run(wait_or_fail, [None, None])
    over.set()


def wait_or_fail(context: RankContext, payload: None) -> None:
    if context.rank == 0:
        raise RuntimeError("rank 0 fails at once")
    assert over.wait(LIMIT_S)


def hold(context: RankContext, payload: dict[str, torch.Tensor]) -> tuple[np.ndarray, Path]:
    return payload["a"].double().numpy(), Path("here")


def test_tensors_arrays_and_paths_travel(leader: TorchrunEngines) -> None:
    for array, path in leader.run(hold, [{"a": torch.ones(2, 3, dtype=torch.bfloat16)}] * 2):
        assert (array.dtype, array.shape, array.sum(), path) == (np.float64, (2, 3), 6.0, Path("here"))


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.mark, "run")


def sealed(store: dist.Store, key: str, data: bytes) -> None:
    """Put bytes into the store as somebody would who knows how messages are sealed without a secret."""
    mail = StoreMail(store, 1)
    store.set(f"1/{key}", mail._seal(f"1/{key}", data) + data)


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


@pytest.mark.parametrize(
    ("key", "hostile"), [*product(("call/1", "answer/1", "event/1/0"), HOSTILE), *(("call/1", called) for called in CALLED)]
)
def test_what_is_no_message_is_refused_and_runs_nothing(
    store: dist.Store, tmp_path: Path, key: str, hostile: Callable[[Path], bytes]
) -> None:
    mark = tmp_path / "mark"
    leader, other = (TorchrunEngines(rank, 2, lambda: store, CALLS) for rank in (0, 1))
    leader.cluster = two_devices()
    sealed(store, key, hostile(mark))
    if key == "call/1":
        assert other._serve_one()  # it goes on
    elif key == "event/1/0":
        StoreMail(store, 1).put("answer/1", AnswerMessage(result=encode((17, "real"))))
    with pytest.raises(RuntimeSetupError, match=r"was expected\. What came is something else|not in the table"):
        leader.run(talk, [5, 7], on_event=lambda rank, event: None)
    assert not mark.exists()


def test_without_the_secret_messages_are_refused(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(store, "call/1", call_of(f"{__name__}:talk"))
    monkeypatch.setenv("WORKBENCH_SECRET", "a word that all devices know")
    with pytest.raises(RuntimeSetupError, match="this run's seal"):
        StoreMail(store, 1).take("call/1", CallMessage, "A call")
    StoreMail(store, 1).put("call/1", 5)
    assert StoreMail(store, 1).take("call/1", int, "A number") == 5


def test_the_table_names_functions_whose_types_travel() -> None:
    from workbench.cli.torchrun import CALLS

    for name in CALLS._events:
        call = CALLS.named(name)
        for kind in (call.payload, call.event, call.result, CallMessage):
            with pytest.raises(RuntimeSetupError, match=r"[Ii]nvalid"):
                decode(b"\xc1", kind, "A message")  # refused as bytes: the type itself is one that can be decoded


def test_nothing_that_travels_between_machines_is_pickled() -> None:
    """Neither pickle nor a collective of torch that pickles, but for functions of a notebook's own on emulated devices."""
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
        loads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"]
        assert not loads, path


PICKLING_COLLECTIVES = {"all_gather_object", "gather_object", *(f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv"))}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_a_rank_that_shows_no_sign_of_life_is_named(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 beats once and is frozen then; the one that leads does not wait for its answer without an end."""
    monkeypatch.setattr("workbench.runtime.store_mail._PULSE_S", 0.02)
    monkeypatch.setattr("workbench.runtime.store_mail.SILENT_S", 0.2)
    store.set("pulse/1", "1")
    engines = TorchrunEngines(0, 2, lambda: store, CALLS)
    engines.cluster = two_devices()
    engines._pulse.start()
    try:
        with pytest.raises(DeviceLostError, match=r"'right' \(rank 1\) was running .*talk.*no sign of life"):
            engines.run(talk, [1, 1])
    finally:
        engines.end()


def test_a_served_rank_does_not_wait_for_a_frozen_leader(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.runtime.store_mail._PULSE_S", 0.02)
    monkeypatch.setattr("workbench.runtime.store_mail.SILENT_S", 0.2)
    store.set("pulse/0", "1")
    with pytest.raises(DeviceLostError, match="Rank 0 showed no sign of life"):
        TorchrunEngines(1, 2, lambda: store, CALLS).serve()


def test_a_cluster_of_another_size_is_refused() -> None:
    engines = TorchrunEngines(0, 3, dist.HashStore, CALLS)
    with pytest.raises(ConfigError, match=r"2 devices.*started 3 processes"):
        engines.lead(two_devices())


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
