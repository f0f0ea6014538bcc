"""Devices that send anything: each is lost for itself, with one sentence, and neither another device nor a thread is
harmed."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_agent import FOUND, ScriptedAgent, engine_frame, frame, json_frame
from ssh_hosts import real_cluster

from tests.waiting import LIMIT_S
from workbench.core.errors import DivergedError, RuntimeSetupError
from workbench.core.methods import Parts
from workbench.runtime import commands as c
from workbench.runtime import ssh
from workbench.runtime.engine_service import EngineService
from workbench.runtime.frames import HEADER, LENGTH, MOST_FRAME_BYTES, Asked, FilePart, Message
from workbench.runtime.jobs import Outcome
from workbench.runtime.messages import AnswerMessage, CallTable, encode, encode_message
from workbench.runtime.own_calls import Own
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_devices import SshEngines
from workbench.runtime.ssh_login import Failure

JOB = "workbench.core.job:Job"
CALL = "workbench.methods.fine_tuning.method:FineTuning.serve_rank"
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 0.5, -1e308, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "hot",
        "\x1b[2J\x1b]0;owned\x07",
        "a\n  -> all is well",
        "../../etc/passwd",
        "-oProxyCommand=x",
        "9" * 5000,
        "\ud83d",
    ),
    *([], {}, [[]], {"": None}, ["x"] * 3000, b"", b"\0" * 3000),
)
CHANGES = 400
NESTED = b"[" * 60_000 + b"]" * 60_000


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ScriptedAgent]]:
    """Connections take these agents, one after the other; no thread may be left of them."""
    agents: list[ScriptedAgent] = []
    monkeypatch.setattr(ssh, "_CLOCK_ROUNDS", 2)
    monkeypatch.setattr(ssh.subprocess, "Popen", lambda *words, **named: agents.pop(0))
    before = set(threading.enumerate())
    yield agents
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), thread.name


def changed_value(value: Any, draw: random.Random) -> Any:
    """Return a value with one place changed: replaced, removed, doubled or renamed."""
    if isinstance(value, dict | list | tuple) and value and draw.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, result = draw.choice(keys), dict(value) if isinstance(value, dict) else list(value)
        what = draw.random()
        if what < 0.7:
            result[key] = changed_value(value[key], draw)
        elif what < 0.85:
            del result[key]
        elif isinstance(result, dict):
            result[draw.choice(["extra", "id", "kind", ""])] = draw.choice(HOSTILE)
        else:
            result.append(draw.choice(HOSTILE))
        return result
    return draw.choice(HOSTILE)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with some flipped, cut, doubled or foreign ones."""
    result = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(result) or 1)
        match draw.randrange(4):
            case 0:
                result[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del result[at:]
            case 2:
                result[at:at] = result[at : at + draw.randrange(40)]
            case 3:
                result[at:at] = draw.randbytes(draw.randrange(1, 20))
    return bytes(result)


def changed_json(answer: bytes, draw: random.Random) -> bytes:
    """Return an agent's frame changed in its values, its text, its length or its kind."""
    what, payload = draw.random(), answer[HEADER.size :]
    if what < 0.7:
        return json_frame(json.dumps(changed_value(json.loads(payload), draw), default=repr).encode(errors="replace"))
    if what < 0.85:
        return json_frame(changed_bytes(payload, draw)[:MOST_FRAME_BYTES])
    if what < 0.95:
        return changed_bytes(answer, draw)
    return json_frame(
        draw.choice([b"null", b"3", b"[1]", b"", b'"x"', NESTED, b'{"kind":"answer","id":1,"found":' + NESTED + b"}"])
    )


def told(value: Any) -> bytes:
    return encode_message(value)


def settled(future: Future[Any]) -> BaseException | None:
    """Return the error of a future, which must come: a device that is given up leaves nobody waiting."""
    return future.exception(LIMIT_S)


@pytest.mark.parametrize("operation", ["hello", "ping", "facts"])
def test_of_hundreds_of_changed_answers_none_harms_more_than_its_device(
    operation: str, scripted: list[ScriptedAgent]
) -> None:
    draw, lost = random.Random(operation), 0
    honest = ScriptedAgent()
    scripted.append(honest)
    other = Connection("beta", ["ssh"])
    other.open()
    for _ in range(CHANGES):
        scripted.append(
            ScriptedAgent(lambda asked, answer: changed_json(answer, draw) if asked["op"] == operation else None)
        )
        connection = Connection("alpha", ["ssh"])
        try:
            connection.open()
            facts = connection.ask("facts", LIMIT_S)
            assert msgspec.to_builtins(facts).keys() == FOUND["facts"].keys()
        except RuntimeSetupError as error:
            lost += 1
            assert "alpha" in str(error) and error.todo
            assert error.found.isprintable(), error.found
        connection.close()
    assert other.lost is None and settled(other.post("ping")) is None
    other.close()
    assert lost > CHANGES / 2  # some changes leave a message that is right


ENGINE_MESSAGES: dict[str, list[tuple[str, int, Any]]] = {
    "run": [
        ("ready", 0, b"1.0"),
        ("store", 1, Asked("set", ("generation-1/here/0",), b"")),
        ("store", 2, Asked("get", ("generation-1/0",))),
        ("store", 3, Asked("wait", ("a", "b"))),
        ("store", 4, Asked("check", ("a",))),
        ("store", 5, Asked("fetch", ("brought/x/model.safetensors",))),
        ("event", 1, c.Ready()),
        ("event", 1, c.Pong(0.5, False, 3.0, 10**9)),
        ("event", 1, c.StepDone(4, 0.5, None, (c.Transfer("alpha>beta", "x", 1.0, 0.1),))),
        ("event", 1, {"epoch": 1, "step": 2}),
    ],
    "files": [
        ("file", 0, FilePart("steps/epoch-0-from-0-rank-0.jsonl", 0, b'{"step": 1}\n', True)),
        ("file", 0, FilePart("snapshots/weights-epoch-1-step-0-layers-0-3.safetensors", 0, bytes(500), False)),
        ("file", 0, FilePart("snapshots/weights-epoch-1-step-0-layers-0-3.safetensors", 500, bytes(500), True)),
    ],
    "end": [
        ("event", 1, c.Ended(1, "finished", None)),
        ("answer", 1, AnswerMessage(result=encode(None))),
        (
            "answer",
            1,
            AnswerMessage.of_error(DivergedError("Step 3 was done.", "Its loss is NaN.", "Lower the learning rate.")),
        ),
    ],
}


def as_msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return repr(value).encode()


def engine_bytes(kind: str, number: int, content: Any, draw: random.Random) -> bytes:
    """Return a message of an engine as frames, changed in one of its three layers, or in the frames themselves."""
    packed = (
        content
        if isinstance(content, bytes)
        else encode(content)
        if kind in ("store", "file", "answer")
        else told(content)
    )
    what = draw.random()
    if what < 0.45:  # the innermost: fields
        packed = as_msgpack(changed_value(msgspec.msgpack.decode(packed), draw)) if kind != "ready" else b"\xff"
    elif what < 0.6:
        packed = changed_bytes(packed, draw)
    message: Any = [kind, number, packed]
    if 0.6 <= what < 0.75:
        message = changed_value(message, draw)
    data = as_msgpack(message)
    if 0.75 <= what < 0.85:
        data = changed_bytes(data, draw)
    length = draw.choice([len(data)] * 20 + [0, 2**31, 2**32 - 1, len(data) + 1])
    sent = engine_frame(LENGTH.pack(length) + data)
    return changed_bytes(sent, draw) if 0.85 <= what < 0.9 else sent


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stage", ENGINE_MESSAGES)
def test_of_hundreds_of_changed_messages_of_an_engine_none_harms_another_device(
    stage: str, scripted: list[ScriptedAgent], tmp_path: Path
) -> None:
    draw, lost = random.Random(stage), 0
    engines = SshEngines(
        real_cluster(), tmp_path / "run", CallTable({CALL: Parts(JOB, JOB)}), command_of=lambda device: ["ssh"]
    )
    engines.inbox.most_bytes = 10_000
    alpha, beta = engines.slots
    call = engines.table.named(CALL)
    scripted.append(ScriptedAgent())
    beta.connection = Connection("beta", ["ssh"], beta._take)
    beta.connection.open()
    beta.call, beta.number = call, 1
    for _ in range(CHANGES):
        agent = ScriptedAgent()
        scripted.append(agent)
        service = EngineService(engines, print, ())
        service.running = {0, 1}
        alpha.connection = Connection("alpha", ["ssh"], alpha._take)
        alpha.call, alpha.number = call, 1
        alpha.connection.open()
        alpha.connection.ask("start", LIMIT_S)
        agent.send(json_frame({"kind": "started", "pid": 4711}))
        for kind, number, content in draw.sample(ENGINE_MESSAGES[stage], k=2):
            agent.send(engine_bytes(kind, number, content, draw))
        if draw.random() < 0.2:
            ended = {"kind": "ended", "pid": 4711, "code": 1, "log": "MemoryError\n\x1b[2J"}
            agent.send(
                frame(
                    draw.choice(b"JDE\0"), json.dumps(changed_value(ended, draw), default=repr).encode(errors="replace")
                )
            )
        agent.send(b"", ends=True)
        alpha.connection._threads[-1].join(LIMIT_S)  # it has read all
        news = service.news(LIMIT_S)
        assert all(item.rank == 0 for item in news)
        assert all(isinstance(item.content, Outcome) for item in news if item.kind == "ended")
        [died] = [item.content for item in news if item.kind in ("died", "ended")]
        if isinstance(died, str):
            assert died.isprintable(), died
        lost += alpha.why != "The connection ended with status 255."
        alpha.close()
    beta._take_message(Message("event", 1, told(c.Pong())))
    assert [item.content for item in service.news(LIMIT_S)] == [c.Pong()]
    assert beta.connection.lost is None and settled(beta.connection.post("ping")) is None
    beta.close()
    assert lost > 0.3 * CHANGES  # some changes leave a message that is right
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.parent.name in ("steps", "snapshots") for path in kept)
    assert sum(path.stat().st_size for path in kept) < CHANGES * engines.inbox.most_bytes
    assert not [path for path in kept if path.suffix == ".part"]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (HEADER.pack(2**32 - 1, ord("J")), "it has 4,294,967,295 bytes"),
        (HEADER.pack(3, ord("D")) + b"abc", "its kind is 68"),
        (json_frame({"kind": "answer", "id": 10**6, "found": None}), "number 1000000 was not asked for"),
        (json_frame({"kind": "echo", "id": 10**6, "clock_s": 1.0, "cpu_s": 1.0, "health": None}), "was not asked for"),
        (json_frame({"kind": "lost"}), "Invalid value 'lost'"),
        (engine_frame(LENGTH.pack(2**32 - 1)), "at most 10,000 are allowed"),
        (engine_frame(Message("hello", 0, b"").framed()), "'hello' with 0 bytes"),
        (engine_frame(Message("ready", 0, bytes(101)).framed()), "'ready' with 101 bytes"),
        (engine_frame(Message("event", 1, b"x").framed()), "an event of device 'alpha'"),
        (
            engine_frame(Message("event", 1, told({"phase": "x", "step": "\x1b[2J"})).framed()),
            "Expected `int`, got `str` - at `$.step`",
        ),
        (engine_frame(Message("event", 1, told(c.StepDone(-1, 0.5))).framed()), "Expected `int` >= 0"),
        (
            engine_frame(Message("store", 1, encode(Asked("fetch", ("x",)))).framed()) * 2,
            "weights are asked for while others",
        ),
        (engine_frame(Message("event", 1, told(Own(b"pickled"))).framed()), "an event of device 'alpha'"),
    ],
)
def test_what_loses_a_device_is_one_sentence(
    sent: bytes, why: str, scripted: list[ScriptedAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(SshEngines, "bring_weights", lambda self, link, places: waits.wait(LIMIT_S))
    engines = SshEngines(real_cluster(), tmp_path, CallTable({CALL: Parts(JOB, JOB)}))
    engines.inbox.most_bytes = 10_000
    [slot, _] = engines.slots
    slot.call, slot.number = engines.table.named(CALL), 1
    agent = ScriptedAgent()
    scripted.append(agent)
    with closing(slot):
        slot.connection = Connection("alpha", ["ssh"], slot._take)
        slot.connection.open()
        agent.send(sent)
        [(rank, kind, said)] = engines.inbox.take(LIMIT_S)
        waits.set()
    assert (rank, kind) == (0, "died") and why in said and said.count("\n") == 0


def test_a_device_that_is_not_read_for_long_cannot_fill_the_memory(tmp_path: Path) -> None:
    engines = SshEngines(real_cluster(), tmp_path, CallTable({CALL: Parts(JOB, JOB)}))
    engines.inbox.most_bytes = 1000
    [slot, _] = engines.slots
    slot.call, slot.number = engines.table.named(CALL), 1
    event = Message("event", 1, told({"text": "x" * 900}))
    for _ in range(4):
        slot._take_message(event)
        engines.inbox.take(0)
    slot._take_message(event)
    slot._take_message(event)
    with pytest.raises(RuntimeSetupError, match="that nobody has read yet"):
        slot._take_message(event)
    engines.inbox.put(0, "died", "it sent too much")  # its loss is noted all the same
    assert [kind for _, kind, _ in engines.inbox.take(0)] == ["event", "event", "died"]
    slot._take_message(event)


def test_a_mute_device_is_given_up_by_whoever_waits(scripted: list[ScriptedAgent]) -> None:
    was_asked = threading.Event()

    def mute(operation: dict[str, Any], answer: bytes) -> bytes | None:
        if operation["op"] != "ping":
            return None
        was_asked.set()
        return b""

    scripted.append(ScriptedAgent(mute, ends=False))
    connection, results = Connection("alpha", ["ssh"]), list[RuntimeSetupError]()

    def wait() -> None:
        try:
            connection.open()
        except RuntimeSetupError as error:
            results.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert was_asked.wait(LIMIT_S)
    connection.give_up(Failure("It was interrupted.", ""))
    waiting.join(LIMIT_S)
    assert [error.found for error in results] == ["It was interrupted."]
