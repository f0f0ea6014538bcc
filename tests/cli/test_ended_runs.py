"""`workbench run` as processes of its own: interrupted, killed, resumed without a network, and nothing left behind any of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tiny_job import CLUSTER_FILE, keep_profile, tiny_job, write_data

from workbench.core.report import Report

LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""
EPOCHS = 5

pytestmark = pytest.mark.timeout(600)


class Command:
    """`workbench run` of a small job, as a process of its own with a temporary folder of its own."""

    def __init__(self, folder: Path, data: Path, cache: Path) -> None:
        self.folder, self.work, self.report = folder, folder / "work", folder / "report.json"
        self.temporary = folder / "t"  # a short name: paths of sockets in it must stay short
        self.temporary.mkdir()
        # Slow devices: an epoch takes long enough to be interrupted in, and costs the host nothing.
        (folder / "two.toml").write_text(CLUSTER_FILE.replace("0.5", "0.1").replace("0.4", "0.08"))
        self.process: subprocess.Popen[str] | None = None
        self.words = [sys.executable, "-m", "workbench", "run", "--model", "tiny-bert", "--task", "sst2", "--data", str(data)]
        self.words += ["--cluster", str(folder / "two.toml"), "--epochs", str(EPOCHS), "--batch-size", "8", "--fidelity", "paced"]
        self.words += ["--workdir", str(self.work), "--report", str(self.report)]
        self.environment = os.environ | {
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "WORKBENCH_CACHE": str(cache),
        }

    def start(self, *more: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [*before, *self.words, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
            # A shell's background jobs ignore Ctrl-C, and so would we.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        return self.process

    def wait_for_an_epoch(self, process: subprocess.Popen[str]) -> list[str]:
        """Return what it said until the first of its epochs was done."""
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            if line.startswith("epoch") and "done" in line:
                return lines
        raise AssertionError(f"the run ended early: {lines}")

    def listening(self) -> tuple[list[psutil.Process], list[tuple[str, int]]]:
        """Return its processes, and the ports on which they listen, each with its program's name."""
        family = [child for child in psutil.process_iter() if self._owns(child)]
        ports = []
        for child in family:
            name = next((word for word in child.cmdline() if word.startswith(("workbench.", "ipyparallel."))), "")
            ports += [(name, other.laddr.port) for other in child.net_connections("tcp") if other.status == psutil.CONN_LISTEN]
        return family, ports

    def survivors(self) -> list[str]:
        """Return what still runs or lies there of it, some seconds after its end."""
        deadline = time.monotonic() + 10
        left = ["not looked yet"]
        while left and time.monotonic() < deadline:
            # torch makes itself an empty folder when it is imported.
            left = [str(path) for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
            for process in psutil.process_iter():
                try:
                    left += [" ".join(process.cmdline())] if self._owns(process) else []
                except psutil.Error:
                    continue
            time.sleep(0.1)
        return left

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return any(str(self.temporary) in word for word in process.cmdline())
        except psutil.Error:
            return False

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    keep_profile(tiny_job(data), folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a call ended.  survivors: what it left behind."""

    said: str = ""
    told: str = ""
    returncode: int | None
    survivors: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One job in three calls: Ctrl-C in the terminal, SIGKILL of the resumed run, and the third finishes, with loopback as its network."""

    interrupted: End
    told_before_the_kill: list[str]
    family: int
    ports: list[tuple[str, int]]
    killed: End
    finished: End
    report: Report
    work: Path


def without_network(*, loopback: bool) -> tuple[str, ...]:
    """Return what goes before a command to run it in a network namespace of its own; nothing where that cannot be."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True).returncode:
        return ()
    return (unshare, "-n", *((sys.executable, "-c", LOOPBACK_UP) if loopback else ()))


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, data: Path, cache: Path) -> Iterator[Life]:
    command = Command(tmp_path_factory.mktemp("c"), data, cache)
    try:
        process = command.start()
        command.wait_for_an_epoch(process)
        os.killpg(process.pid, signal.SIGINT)
        said, told = process.communicate(timeout=60)
        interrupted = End(said=said, told=told, returncode=process.returncode, survivors=command.survivors())

        process = command.start("--resume")
        before = command.wait_for_an_epoch(process)
        family, ports = command.listening()
        process.kill()
        process.communicate(timeout=60)
        killed = End(returncode=process.returncode, survivors=command.survivors())

        process = command.start("--resume", before=without_network(loopback=True))
        said, told = process.communicate(timeout=240)
        finished = End(said=said, told=told, returncode=process.returncode, survivors=command.survivors())
        assert process.returncode == 0, told
        yield Life(
            interrupted=interrupted,
            told_before_the_kill=before,
            family=len(family),
            ports=ports,
            killed=killed,
            finished=finished,
            report=Report.read(command.report),
            work=command.work,
        )
    finally:
        command.end()


def test_control_c_says_how_to_go_on(life: Life) -> None:
    assert life.interrupted.returncode == 130
    assert life.interrupted.told.splitlines()[-1] == "Interrupted. To go on where it stopped, give the same command with --resume."
    assert life.interrupted.survivors == []


def test_a_killed_run_was_resumed_and_leaves_nothing(life: Life) -> None:
    assert any(line.startswith("Resumed after epoch ") for line in life.told_before_the_kill)
    assert life.killed.returncode == -signal.SIGKILL
    assert life.killed.survivors == []


def test_no_port_of_ours_can_be_busy(life: Life) -> None:
    """Every port that devices listen on was chosen by the kernel; the controller listens on none, so none can be taken."""
    assert life.family >= 4  # controller, two engines, janitor
    assert {name for name, _ in life.ports} <= {"workbench.runtime.engine"}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(low <= port <= high for _, port in life.ports)


def test_the_third_call_finishes(life: Life) -> None:
    assert "Resumed after epoch " in life.finished.told
    assert [epoch.epoch for epoch in life.report.epochs] == list(range(EPOCHS))
    assert f"Adapter     {life.work / 'adapter'}" in life.finished.said
    assert life.finished.survivors == []


@pytest.mark.privileged
def test_loopback_is_network_enough(life: Life) -> None:
    """The third call had a network namespace of its own."""
    if not without_network(loopback=True):
        pytest.skip("no network namespaces here")
    assert life.finished.returncode == 0
    assert "accuracy" in life.finished.said


@pytest.mark.privileged
def test_without_loopback_it_says_so(data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = without_network(loopback=False)
    if not before:
        pytest.skip("no network namespaces here")
    command = Command(tmp_path_factory.mktemp("c"), data, cache)
    try:
        process = command.start("--epochs", "2", before=before)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "ip link set lo up" in told.splitlines()[-1]
        assert command.survivors() == []
    finally:
        command.end()


@pytest.mark.privileged
def test_as_an_unprivileged_user(monkeypatch: pytest.MonkeyPatch) -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("becoming another user needs root")
    nobody = (setpriv, "--reuid=65534", "--regid=65534", "--clear-groups")
    # The tests' own folder is closed to other users.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        folder = Path(name)
        monkeypatch.setenv("HOME", "/nonexistent")
        command = Command(folder, write_data(folder / "data"), folder / "cache")
        for place in (folder, command.temporary):
            place.chmod(0o777)
        if subprocess.run([*nobody, "env", sys.executable, "-c", "import torch"], capture_output=True, env=command.environment).returncode:
            pytest.skip("this Python is closed to other users")
        process = command.start("--epochs", "2", before=nobody)
        said, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
        assert "accuracy" in said
        assert command.survivors() == []
