"""The agent of a real device and what talks to it, over plain pipes; tests/cli/test_kit.py does the same over real
OpenSSH."""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from ssh_hosts import home, over_pipes, real_cluster

from tests.waiting import LIMIT_S, wait_for
from workbench.core.errors import MemoryBudgetError, RuntimeSetupError
from workbench.core.methods import Parts
from workbench.runtime import commands as c
from workbench.runtime import ssh, ssh_agent
from workbench.runtime.engine_service import EngineService
from workbench.runtime.frames import FROM_ENGINE, Asked, Message, Messages
from workbench.runtime.messages import AnswerMessage, CallTable, decode_message, encode_message
from workbench.runtime.pipe_engine import require_wireguard
from workbench.runtime.relays import Relays
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_devices import SshEngines
from workbench.runtime.ssh_setup import environment_python


class Agent:
    """A connection over pipes to an agent of this machine, and all that it has told."""

    def __init__(self, folder: Path) -> None:
        self.home = home(folder, "alpha")
        self.told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        [device] = real_cluster(("alpha",)).devices
        self.connection = Connection(
            "alpha", over_pipes(folder)(device), lambda kind, content: self.told.put((kind, content))
        )

    def wait_for(self, kind: str) -> Any:
        while True:
            result, content = self.told.get(timeout=LIMIT_S)
            if result == kind:
                return content


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.connection.close()


def start_sleeper(agent: Agent, folder: Path) -> int:
    """Start an engine that does nothing; return its process number."""
    (folder / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    return agent.connection.ask(
        "start", python=sys.executable, module="sleeper", environment={"PYTHONPATH": str(folder)}
    )


def test_clock_files_and_refusals(agent: Agent, tmp_path: Path) -> None:
    connection = agent.connection
    connection.open()
    assert abs(connection.clock_offset_s) <= connection.clock_bound_s  # both clocks are this machine's

    file = tmp_path / "weights"
    model: list[tuple[Path, str, None]] = [(file, "kit/cache/model/weights", None)]
    file.write_bytes(os.urandom(300_000))
    assert connection.bring(model) == 1
    assert (agent.home / ".workbench-kit/cache/model/weights").read_bytes() == file.read_bytes()
    assert connection.bring(model) == 0
    file.write_bytes(b"")
    assert connection.bring(model) == 1

    for place in ("kit/../outside", "/etc/passwd", "elsewhere/x", "run/"):
        with pytest.raises(RuntimeSetupError, match="is not a valid place for a file"):
            connection.send_file(file, place).result(LIMIT_S)
    with pytest.raises(RuntimeSetupError, match="knows no 'import'"):
        connection.ask("import", module="os")
    with pytest.raises(RuntimeSetupError, match="is not a program"):
        connection.ask("start", python="/nowhere/python", module="sleeper", environment={})
    with pytest.raises(RuntimeSetupError, match="another digest"):
        bad = connection.post("begin_file", [ssh._frame(ssh.DATA, b"abc")], path="run/x", size=3, sha256="0" * 64)
        bad.result(LIMIT_S)
    assert connection.ask("facts").cores >= 1


def test_a_broken_transfer_goes_on(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sent = tmp_path / "weights", list[int]()
    file.write_bytes(os.urandom(1_000_000))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    agent.connection.open()
    first = [ssh._frame(ssh.DATA, file.read_bytes()[:400_000])]
    agent.connection.post("begin_file", first, path="kit/cache/weights", size=1_000_000, sha256=digest)
    agent.connection.ask("facts")
    os.kill(agent.connection._process.pid, signal.SIGTERM)
    agent.wait_for("lost")
    following, frames_of = Agent(tmp_path), ssh._frames_of
    monkeypatch.setattr(ssh, "_frames_of", lambda file, size: sent.append(size) or frames_of(file, size))
    following.connection.open()
    assert following.connection.bring([(file, "kit/cache/weights", None)]) == 1 and sent[0] < 1_000_000
    assert (agent.home / ".workbench-kit/cache/weights").read_bytes() == file.read_bytes()
    assert following.connection.bring([(file, "kit/cache/weights", None)]) == 0
    following.connection.close()


def test_a_device_that_is_sent_files_is_not_silent(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.connection.open()
    job = "workbench.core.job:Job"
    table = CallTable({"workbench.methods.fine_tuning.method:FineTuning.serve_rank": Parts(job, job)})
    engines = SshEngines(real_cluster(), tmp_path / "run", table)
    service, [slot, _] = EngineService(engines, print, ()), engines.slots
    slot.connection, slot.call = (
        agent.connection,
        table.named("workbench.methods.fine_tuning.method:FineTuning.serve_rank"),
    )
    service.running.add(0)
    arrives = threading.Event()

    def frames() -> Iterator[bytes]:
        arrives.wait(LIMIT_S)
        yield ssh._frame(ssh.DATA, b"abc")

    last = c.Pong(charge=0.5)
    slot._take_message(Message("event", slot.number, encode_message(last)))
    sent = agent.connection.post(
        "begin_file", frames(), path="run/x", size=3, sha256=hashlib.sha256(b"abc").hexdigest()
    )
    assert [item.content for item in service.news(0)] == [last]
    assert service.command(0, c.Ping()) and [item.content for item in service.news(0)] == [last]
    set_result, is_sending = Future.set_result, list[bool]()

    def watched(future: Future[Any], result: Any) -> None:
        if future is sent:
            is_sending.append(agent.connection.is_sending)
        set_result(future, result)

    monkeypatch.setattr(Future, "set_result", watched)
    arrives.set()
    assert sent.result(LIMIT_S) and is_sending == [False]  # also for whoever has the result first
    assert service.command(0, c.Ping()) and not service.news(
        0
    )  # from here on the engine, which there is none of, has to answer


def test_everything_ends_with_the_connection(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open(owner="somebody")
    engine = start_sleeper(agent, tmp_path)
    with pytest.raises(RuntimeSetupError, match="somebody has it since"):
        other = Agent(tmp_path)
        other.connection.open(owner="another")
    looking = Agent(tmp_path)  # a check, and a cleaning, which leave the other's run alone
    looking.connection.open()
    assert looking.connection.greeting.swept == 0
    with pytest.raises(RuntimeSetupError, match="somebody has it since"):
        looking.connection.ask("clean")
    assert psutil.pid_exists(engine) and Path(agent.connection.greeting.run).is_dir()
    looking.connection.close()
    agent.connection.close()
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), "its end")
    wait_for(lambda: not list((agent.home / ".workbench-kit/runs").iterdir()), "its end")


LAPTOP = """
import queue, sys
from ssh_hosts import over_pipes, real_cluster
from pathlib import Path
from workbench.runtime.ssh import Connection
[device] = real_cluster(("alpha",)).devices
connection = Connection("alpha", over_pipes(Path(sys.argv[1]))(device))
connection.open(owner="a laptop")
environment = {"PYTHONPATH": sys.argv[1]}
print(connection.ask("start", python=sys.executable, module="sleeper", environment=environment), flush=True)
queue.SimpleQueue().get()
"""


def test_nothing_stays_on_a_device_when_the_laptops_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import subprocess\nsubprocess.run(['sleep', '600'])\n")
    with subprocess.Popen(
        [sys.executable, "-c", LAPTOP, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    ) as laptop:
        assert laptop.stdout is not None
        engine = psutil.Process(int(laptop.stdout.readline()))
        wait_for(engine.children, "its own process")
        started = [engine, engine.parent(), *engine.children()]
        laptop.kill()
    wait_for(lambda: not any(process is not None and process.is_running() for process in started), "its end")
    wait_for(lambda: not list((home(tmp_path, "alpha") / ".workbench-kit/runs").iterdir()), "its end")


def test_a_killed_agent_takes_its_engine_along_and_its_folder_is_swept(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open()
    engine = start_sleeper(agent, tmp_path)
    os.kill(agent.connection._process.pid, signal.SIGKILL)
    agent.wait_for("lost")
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), "its end")
    assert list((agent.home / ".workbench-kit/runs").iterdir())
    following = Agent(tmp_path)
    following.connection.open()
    assert following.connection.greeting.swept == 1
    following.connection.close()


def test_a_silent_laptop_is_taken_for_gone(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "SILENCE_S", 2.0)  # a busy host may take its time to start an engine
    agent.connection.open()
    engine = start_sleeper(agent, tmp_path)
    monkeypatch.setattr(ssh.Connection, "post", lambda self, operation, frames=(), **fields: None)
    agent.wait_for("lost")
    assert not Path(f"/proc/{engine}").exists()
    assert not list((agent.home / ".workbench-kit/runs").iterdir())


def test_messages_cross_a_stream_in_any_pieces() -> None:
    sent = [Message("event", 1, b"x" * 1000), Message("answer", 2, b"")]
    data, results, messages = b"".join(one.framed() for one in sent), [], Messages(FROM_ENGINE, 2000)
    for at in range(0, len(data), 7):
        results += list(messages.of(data[at : at + 7]))
    assert results == sent
    with pytest.raises(RuntimeSetupError, match="was expected"):
        list(Messages(FROM_ENGINE, 2000).of(b"\0\0\0\3abc"))


def test_a_device_without_memory_is_told_from_one_whose_peer_fell_silent() -> None:
    call = CallTable({"workbench.runtime.measuring:measure_rank_host": ""}).named(
        "workbench.runtime.measuring:measure_rank_host"
    )
    answer = AnswerMessage.of_error(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000 bytes.")
    )
    error = answer.outcome(0, call, "pi0").error
    assert isinstance(error, MemoryBudgetError) and "'pi0' asked for 2.000 MB more. Its system refused." in str(error)
    other = AnswerMessage.of_error(
        RuntimeError("gloo: connection to a peer: Resource temporarily unavailable")
    ).outcome(0, call, "pi0")
    assert type(other.error) is RuntimeError


def test_commands_and_events_are_typed() -> None:
    table = CallTable(
        {
            "workbench.methods.fine_tuning.method:FineTuning.serve_rank": Parts(
                "workbench.core.job:Job", "workbench.core.job:Job"
            )
        }
    )
    call = table.named("workbench.methods.fine_tuning.method:FineTuning.serve_rank")
    from workbench.core.job import Job

    for value in (
        c.Train(3, (0, 2), Job(seed=7)),
        c.Pause(3, 9),
        c.Ping(),
        c.StepDone(4, 0.5),
        c.Ended(3, "paused", Job()),
        {"epoch": 1},
    ):
        assert decode_message(encode_message(value), call, "It") == value
    with pytest.raises(RuntimeSetupError, match="It was expected"):
        decode_message(encode_message(Asked("get", ("key",))), call, "It")


def test_the_exposing_device_is_to_blame_for_a_relay_that_it_refuses() -> None:
    blamed, at = list[int](), Future[Any]()

    class Agent:
        def post(self, operation: str, **fields: object) -> Future[Any]:
            return at

    address = (
        struct.pack("=Q", 0)
        + struct.pack("=Q", 136)
        + struct.pack("=H", 2)
        + b"\x1f\x90"
        + socket.inet_aton("127.0.0.1")
        + bytes(128)
    )
    relays = Relays(lambda rank, error: blamed.append(rank))
    relays.publish(1, Agent(), "key", address)  # type: ignore[arg-type]
    relays.reply(0, Agent(), "key", lambda value: None, address)  # type: ignore[arg-type]
    at.set_exception(RuntimeSetupError("It was asked.", "It has no certificate."))
    assert blamed == [1]


def test_a_device_tells_of_its_health_and_refuses_a_network_that_is_not_wireguard(agent: Agent) -> None:
    agent.connection.open()
    agent.connection.ask("ping", health=True)
    health = agent.connection.health
    assert health is not None and health.free_memory_bytes > 0 and health.throttled == "" and health.rss_bytes == 0
    with pytest.raises(RuntimeSetupError, match="'lo', which is none of WireGuard"):
        require_wireguard("lo")


def test_other_versions_than_the_laptops_are_refused(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open()
    with pytest.raises(RuntimeSetupError, match="no libraries yet"):
        environment_python(agent.connection)
    (agent.home / ".workbench-kit/env-0").mkdir()
    (agent.home / ".workbench-kit/env-0/ready").touch()
    with pytest.raises(RuntimeSetupError, match="other versions than the project's lock"):
        environment_python(agent.connection)
    [slot, _] = SshEngines(real_cluster(), tmp_path / "run", CallTable({})).slots
    slot._take_message(Message("ready", 0, b"0.0.1"))
    assert slot.ready.is_set() and "its workbench is 0.0.1, this one" in slot.why


SHA256 = "0" * 64


@pytest.mark.parametrize(
    ("operation", "fields", "field"),
    [
        ("has", {"path": "kit/x", "size": -1, "sha256": SHA256}, "size"),
        ("has", {"path": "kit/x", "size": 1.5, "sha256": SHA256}, "size"),
        ("has", {"path": "kit/x\n", "size": 1, "sha256": SHA256}, "path"),
        ("begin_file", {"path": "kit/x", "size": 1, "sha256": "../x"}, "sha256"),
        ("begin_file", {"path": "kit/x", "size": 1, "sha256": SHA256, "mode": 1}, "mode"),
        ("start", {"python": "/bin/sh", "module": "-c", "environment": {}}, "module"),
        ("start", {"python": "/bin/sh", "module": "x", "environment": {"PATH": 1}}, "environment"),
        ("signal_engine", {"name": "TERM"}, "name"),
        ("holds", {"folder": "../.."}, "folder"),
        ("unpack", {"archive": "kit/x", "folder": "*-0", "python": False}, "folder"),
        ("reach", {"host": "example.org", "port": 22}, "host"),
        ("expose", {"port": 0}, "port"),
        ("hello", {"silence_s": True}, "silence_s"),
    ],
)
def test_the_agent_takes_no_field_that_does_not_fit(operation: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ssh_agent.Refused, match=f"cannot {operation} with such a '{field}'"):
        ssh_agent.check(operation, fields)


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xffJ", b"\0\0\0\1X?", b"\0\0\0\2J[]", b"\0\0\0\1J{", b"\0\0\0\3Dabc", b'\0\0\0\x0bJ{"id":null}'],
    ids=repr,
)
def test_an_agent_ends_at_bytes_that_no_laptop_sends(sent: bytes, agent: Agent) -> None:
    agent.connection.open()
    run = Path(agent.connection.greeting.run)
    agent.connection._queue.put((sent,))
    agent.wait_for("lost")
    wait_for(lambda: not run.exists(), "the end of the run's folder")
