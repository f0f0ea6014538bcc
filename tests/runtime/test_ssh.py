"""The agent of a real device and what talks to it, over plain pipes; tests/cli/test_kit.py does the same over real OpenSSH."""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ssh_hosts import home, over_pipes, real_cluster

from tests.waiting import LIMIT_S, wait_for
from workbench.core.errors import MemoryBudgetError, RuntimeSetupError
from workbench.runtime import commands as c
from workbench.runtime import ssh
from workbench.runtime.messages import AnswerMessage, CallTable, Parts, decode_told, encode_told
from workbench.runtime.pipe_engine import Asked, ChannelStore, FilePart, Message, Messages, require_wireguard
from workbench.runtime.ssh import Connection, failure_of
from workbench.runtime.ssh_devices import SshEngines, SshService
from workbench.runtime.ssh_seat import KeyStore
from workbench.runtime.ssh_setup import environment_python


class Agent:
    """A connection over pipes to an agent of this machine, and all that it has told."""

    def __init__(self, folder: Path) -> None:
        self.home = home(folder, "alpha")
        self.told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        [device] = real_cluster(("alpha",)).devices
        self.connection = Connection("alpha", over_pipes(folder)(device), lambda kind, content: self.told.put((kind, content)))

    def wait_for(self, kind: str) -> Any:
        while True:
            found, content = self.told.get(timeout=LIMIT_S)
            if found == kind:
                return content


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.connection.close()


def start_sleeper(agent: Agent, folder: Path) -> int:
    """Start an engine that does nothing; return its process number."""
    (folder / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    return agent.connection.ask("start", python=sys.executable, module="sleeper", environment={"PYTHONPATH": str(folder)})


def test_clock_files_and_refusals(agent: Agent, tmp_path: Path) -> None:
    connection = agent.connection
    connection.open()
    assert abs(connection.clock_offset_s) <= connection.clock_bound_s  # both clocks are this machine's

    file = tmp_path / "weights"
    file.write_bytes(os.urandom(300_000))
    assert connection.bring(file, "kit/cache/model/weights")
    assert (agent.home / ".workbench-kit/cache/model/weights").read_bytes() == file.read_bytes()
    assert not connection.bring(file, "kit/cache/model/weights")
    file.write_bytes(b"")
    assert connection.bring(file, "kit/cache/model/weights")

    for place in ("kit/../outside", "/etc/passwd", "elsewhere/x", "run/"):
        with pytest.raises(RuntimeSetupError, match="is no place for a file"):
            connection.send_file(file, place).result(LIMIT_S)
    with pytest.raises(RuntimeSetupError, match="knows no 'import'"):
        connection.ask("import", module="os")
    with pytest.raises(RuntimeSetupError, match="is no program"):
        connection.ask("start", python="/nowhere/python", module="sleeper", environment={})
    with pytest.raises(RuntimeSetupError, match="another digest"):
        bad = connection.post("begin_file", [ssh._frame(ssh.DATA, b"abc")], path="run/x", size=3, sha256="0" * 64)
        bad.result(LIMIT_S)
    assert connection.ask("facts")["cores"] >= 1


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
    assert following.connection.bring(file, "kit/cache/weights") and sent[0] < 1_000_000
    assert (agent.home / ".workbench-kit/cache/weights").read_bytes() == file.read_bytes()
    assert not following.connection.bring(file, "kit/cache/weights")
    following.connection.close()


def test_a_device_that_is_sent_files_is_not_silent(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open()
    job = "workbench.core.job:Job"
    table = CallTable({"workbench.methods.fine_tuning.method:serve_rank": Parts(job, job)})
    engines = SshEngines(real_cluster(), tmp_path / "run", table)
    service, [seat, _] = SshService(engines), engines.seats
    seat.connection, seat.call = agent.connection, table.named("workbench.methods.fine_tuning.method:serve_rank")
    service.running.add(0)
    arrives = threading.Event()

    def frames() -> Iterator[bytes]:
        arrives.wait(LIMIT_S)
        yield ssh._frame(ssh.DATA, b"abc")

    last = c.Pong(charge=0.5)
    engines.tell(0, "event", encode_told(last))
    sent = agent.connection.post("begin_file", frames(), path="run/x", size=3, sha256=hashlib.sha256(b"abc").hexdigest())
    assert [one.content for one in service.news(0)] == [last]
    assert service.command(0, c.Ping()) and [one.content for one in service.news(0)] == [last]
    arrives.set()
    assert sent.result(LIMIT_S)
    assert service.command(0, c.Ping()) and not service.news(0)  # from here on the engine, which there is none of, has to answer


def test_everything_ends_with_the_connection(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open(owner="somebody")
    engine = start_sleeper(agent, tmp_path)
    with pytest.raises(RuntimeSetupError, match="somebody has it since"):
        other = Agent(tmp_path)
        other.connection.open(owner="another")
    looking = Agent(tmp_path)  # a check, and a cleaning, which leave the other's run alone
    looking.connection.open()
    assert looking.connection.greeting["swept"] == 0
    with pytest.raises(RuntimeSetupError, match="somebody has it since"):
        looking.connection.ask("clean")
    assert psutil.pid_exists(engine) and Path(agent.connection.greeting["run"]).is_dir()
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
print(connection.ask("start", python=sys.executable, module="sleeper", environment={"PYTHONPATH": sys.argv[1]}), flush=True)
queue.SimpleQueue().get()
"""


def test_nothing_stays_on_a_device_when_the_laptops_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import subprocess\nsubprocess.run(['sleep', '600'])\n")
    with subprocess.Popen(
        [sys.executable, "-c", LAPTOP, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
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
    assert following.connection.greeting["swept"] == 1
    following.connection.close()


def test_a_silent_laptop_is_taken_for_gone(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "SILENCE_S", 1.0)
    agent.connection.open()
    engine = start_sleeper(agent, tmp_path)
    monkeypatch.setattr(ssh.Connection, "post", lambda self, operation, frames=(), **fields: None)
    agent.wait_for("lost")
    assert not Path(f"/proc/{engine}").exists()
    assert not list((agent.home / ".workbench-kit/runs").iterdir())


def test_what_ssh_says_becomes_one_sentence_and_a_mend() -> None:
    for said, code, found, todo in (
        ("Host key verification failed.", 255, "not known yet", "--trust"),
        ("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!", 255, "not the one", "--forget"),
        ("pi@h: Permission denied (publickey).", 255, "does not accept the key", "ssh-copy-id"),
        ("connect to host h port 22: Connection refused", 255, "Nothing listens", "systemctl"),
        ("Could not resolve hostname h", 255, "name is not known", "address"),
        ("sh: python3: not found", 127, "no python3", "apt install"),
    ):
        failure = failure_of(said, code)
        assert found in failure.found and todo in failure.todo


def test_messages_cross_a_stream_in_any_pieces() -> None:
    sent = [Message("event", 1, b"x" * 1000), Message("answer", 2, b"")]
    data, found, messages = b"".join(one.framed() for one in sent), [], Messages()
    for at in range(0, len(data), 7):
        found += list(messages.of(data[at : at + 7]))
    assert found == sent
    with pytest.raises(RuntimeSetupError, match="was expected"):
        list(Messages().of(b"\0\0\0\3abc"))


def test_a_device_without_memory_is_told_from_one_whose_peer_fell_silent() -> None:
    call = CallTable({"workbench.runtime.measuring:measure_rank_host": ""}).named("workbench.runtime.measuring:measure_rank_host")
    asked = AnswerMessage.of_error(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000 bytes."))
    error = asked.outcome(0, call, "pi0").error
    assert isinstance(error, MemoryBudgetError) and "'pi0' asked for 2.000 MB more. Its system refused." in str(error)
    other = AnswerMessage.of_error(RuntimeError("gloo: connection to a peer: Resource temporarily unavailable")).outcome(0, call, "pi0")
    assert type(other.error) is RuntimeError


def test_commands_and_events_are_typed() -> None:
    table = CallTable({"workbench.methods.fine_tuning.method:serve_rank": Parts("workbench.core.job:Job", "workbench.core.job:Job")})
    call = table.named("workbench.methods.fine_tuning.method:serve_rank")
    from workbench.core.job import Job

    for value in (c.Train(3, (0, 2), Job(seed=7)), c.Pause(3, 9), c.Ping(), c.StepDone(4, 0.5), c.Ended(3, "paused", Job()), {"epoch": 1}):
        assert decode_told(encode_told(value), call, "It") == value
    with pytest.raises(RuntimeSetupError, match="It was expected"):
        decode_told(encode_told(Asked("get", ("key",))), call, "It")


def test_the_store_over_a_channel_forms_a_gloo_group() -> None:
    """Two ranks in two threads; each rank's store speaks to the laptop's by messages alone."""
    kept, sums = KeyStore(), {}

    def ask(asked: Asked, timeout_s: float | None) -> bytes:
        mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        kept.ask(asked, mine.put)
        return mine.get(timeout=LIMIT_S)

    def join(rank: int) -> None:
        own = ChannelStore(ask)
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", own), rank, 2, timedelta(seconds=20))
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.item()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sums == {0: 3.0, 1: 3.0}
    assert not ChannelStore(ask).check(["nothing"])


def test_a_devices_files_stay_in_the_runs_folder(tmp_path: Path) -> None:
    engines = SshEngines(real_cluster(), tmp_path / "run", CallTable({}), command_of=over_pipes(tmp_path))
    [seat, _] = engines.seats
    for offset, data, is_last in ((0, b"ab", False), (2, b"c", True)):
        seat._keep(FilePart("checkpoints/epoch-0-layers-0-3.safetensors", offset, data, is_last))
    seat._keep(FilePart("steps/epoch-0-from-0-rank-1.jsonl", 0, b"old and longer\n", True))
    seat._keep(FilePart("steps/epoch-0-from-0-rank-1.jsonl", 0, b"new\n", True))
    found = {path.relative_to(tmp_path / "run").as_posix(): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert found == {"checkpoints/epoch-0-layers-0-3.safetensors": b"abc", "steps/epoch-0-from-0-rank-1.jsonl": b"new\n"}
    for path in ("../outside", "steps/../../outside", "/etc/passwd", "fingerprint.txt", "steps/a/b"):
        with pytest.raises(RuntimeSetupError, match="sent a file"):
            seat._keep(FilePart(path, 0, b"", True))


def test_a_device_tells_of_its_health_and_refuses_a_network_that_is_not_wireguard(agent: Agent) -> None:
    agent.connection.open()
    agent.connection.ask("ping", health=True)
    health = agent.connection.health
    assert health["free_memory_bytes"] > 0 and health["throttled"] == "" and health["rss_bytes"] == 0
    with pytest.raises(RuntimeSetupError, match="'lo', which is none of WireGuard"):
        require_wireguard("lo")


def test_other_versions_than_the_laptops_are_refused(agent: Agent, tmp_path: Path) -> None:
    agent.connection.open()
    with pytest.raises(RuntimeSetupError, match="no libraries yet"):
        environment_python(agent.connection)
    (agent.home / ".workbench-kit/env-0").mkdir()
    (agent.home / ".workbench-kit/env-0/ready").touch()
    with pytest.raises(RuntimeSetupError, match="other versions than this machine's"):
        environment_python(agent.connection)
    [seat, _] = SshEngines(real_cluster(), tmp_path / "run", CallTable({})).seats
    seat._hear(Message("ready", 0, b"0.0.1"))
    assert seat.ready.is_set() and "its workbench is 0.0.1, this one" in seat.why
