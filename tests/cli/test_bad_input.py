"""The command line on bad input and bad ends: one clear line each, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_job import CLUSTER_FILE, write_data
from typer.testing import CliRunner

from workbench.cli.app import app
from workbench.core.report import Report

LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))


def refused(*words: str) -> dict[str, str]:
    """Call a command that must be refused; return its error from --json, having checked that the plain one is the same line."""
    as_json = CliRunner().invoke(app, [*words, "--json"])
    assert as_json.exit_code == 2, as_json.output
    error = json.loads(as_json.stdout)
    plain = CliRunner().invoke(app, list(words))
    assert (plain.exit_code, plain.stdout) == (2, "")
    told = plain.stderr.splitlines()[-1]
    assert told == " ".join(part for part in (f"{error['error']}:", error["asked"], error["found"], error["todo"]) if part)
    return error


@pytest.mark.parametrize(
    ("words", "found", "todo"),
    [
        (("--method", "pac-plus"), "Known methods: pac_plus", "'pac_plus'?"),
        (("--model", "tiny-bort"), "tiny-gpt2", "'tiny-bert'?"),
        (("--model", "all-MiniLM-L6"), "all-MiniLM-L6-v2", "'all-MiniLM-L6-v2'?"),
        (("--model", "quite unknown"), "no hub name", "a folder or a hub name"),
        (("--task", "sentimnt"), "stsb", "'sentiment'?"),
        (("--cluster", "laptob"), "pac-env-a", "'laptop'?"),
        (("--cluster", "nowhere.toml"), "no such file", "Check the path"),
        (("--option", "reducton=4"), "Known: reduction", "'reduction'?"),
        (("--option", "reduction=four"), "a whole number", "Change it"),
        (("--option", "order=best"), "one of given, all", "Change it"),
        (("--option", "dropout=1.5", "--model", "tiny-bert"), "[0, 1)", "Change it"),
        (("--option", "reduction=5", "--model", "tiny-bert"), "32 is not a multiple of 5", "divisor"),
        (("--option", "reduction"), "not KEY=VALUE", "reduction=8"),
        (("--epochs", "0"), "at least 1", "Raise epochs"),
        (("--epochs", "many"), "'--epochs'", "--help"),
        (("--batch-size", "30"), "not a multiple of 4", "Change one"),
        (("--learning-rate", "nan"), "above 0", "Change them"),
        (("--train-samples", "0"), "trains nothing", "Raise train_samples"),
        (("--max-length", "2", "--model", "tiny-bert"), "Special tokens", "Raise max_length"),
        (("--mode", "emulate"), "'simulate', 'execute'", "--help"),
        (("--no-such-option",), "No such option", "--help"),
    ],
)
def test_what_cannot_be_meant(words: tuple[str, ...], found: str, todo: str, data: Path) -> None:
    options = dict(zip(("--task", "--data"), ("sst2", str(data)), strict=True))
    given = [word for name, value in options.items() if name not in words for word in (name, value)]
    error = refused("run", *given, *words)
    assert found in error["found"]
    assert todo in error["todo"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = two\n", "malformed"),
        ('name = "none"\n', "no devices"),
        (
            CLUSTER_FILE.replace("gflops = 30", "gflops = 30\nbandwidth_mbit_per_s = -5"),
            "line 4: Device 'alpha' asks for bandwidth",
        ),
        (CLUSTER_FILE.replace("host_share = 0.4", "host_share = 0"), "Device 'beta' asks for host_share = 0"),
        (CLUSTER_FILE.replace("memory_mb", "memmory_mb"), "Did you mean 'memory_mb'?"),
        (CLUSTER_FILE.replace("host_share = 0.5", 'host_share = 0.5\naddress = "pi.local"'), "alpha has an address"),
        (CLUSTER_FILE.replace("host_share = 0.4", ""), "beta has no host_share"),
    ],
)
def test_clusters_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    error = refused("run", "--cluster", str(tmp_path / "mine.toml"), "--model", "tiny-bert")
    assert said in " ".join(error.values())


def test_datasets_that_hold_nothing(tmp_path: Path) -> None:
    empty = write_data(tmp_path / "empty", train=0)
    assert "train split has 0 samples" in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(empty))["found"]
    (empty / "SST-2" / "train.tsv").write_text("")
    assert "train split has 0 samples" in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(empty))["found"]
    assert "train.tsv" in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(tmp_path / "none"))["found"]


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.cli.app._run", lambda *_, **__: pytest.fail("the run began"))
    assert "It is a folder" in refused("run", "--report", str(tmp_path))["found"]
    (tmp_path / "file").touch()
    assert "cannot be written to" in refused("simulate", "--report", str(tmp_path / "file" / "report.json"))["found"]


def test_a_full_disk_elsewhere_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("workbench.experiment.plan", fails)
    assert refused("plan")["found"] == "No space left on device: '/somewhere'."


def test_unknown_commands() -> None:
    told = CliRunner().invoke(app, ["simulat"])
    assert (told.exit_code, told.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'simulate'?" in told.stderr


# Real processes


class Command:
    """`workbench run` of a small job, as a process of its own with a temporary folder of its own."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.work, self.report = folder, folder / "work", folder / "report.json"
        self.temporary = folder / "t"  # a short name: paths of sockets in it must stay short
        self.temporary.mkdir()
        # Slow devices: an epoch takes long enough to be interrupted in, and costs the host nothing.
        (folder / "two.toml").write_text(CLUSTER_FILE.replace("0.5", "0.1").replace("0.4", "0.08"))
        self.process: subprocess.Popen[str] | None = None
        self.words = [sys.executable, "-m", "workbench", "run", "--model", "tiny-bert", "--task", "sst2", "--data", str(data)]
        self.words += ["--cluster", str(folder / "two.toml"), "--epochs", "20", "--batch-size", "8", "--fidelity", "paced"]
        self.words += ["--workdir", str(self.work), "--report", str(self.report)]
        self.environment = os.environ | {"TMPDIR": str(self.temporary), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

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

    def survivors(self) -> list[str]:
        """Return what still runs or lies there of it, some seconds after its end."""
        deadline = time.monotonic() + 10
        left = ["not looked yet"]
        while left and time.monotonic() < deadline:
            mark = str(self.temporary)
            # torch makes itself an empty folder when it is imported.
            left = [str(path) for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
            for process in psutil.process_iter():
                try:
                    left += [" ".join(process.cmdline())] if any(mark in word for word in process.cmdline()) else []
                except psutil.Error:
                    continue
            time.sleep(0.1)
        return left


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Command]:
    made = Command(tmp_path_factory.mktemp("c"), data)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate(timeout=60)


def test_control_c_then_a_kill_then_the_end(command: Command) -> None:
    """Ctrl-C in the terminal, SIGKILL of the resumed run, and the third call finishes: nothing is left behind any of them."""
    process = command.start()
    command.wait_for_an_epoch(process)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == "Interrupted. To go on where it stopped, give the same command with --resume."
    assert command.survivors() == []

    process = command.start("--resume")
    before = command.wait_for_an_epoch(process)
    assert any(line.startswith("Resumed after epoch ") for line in before)
    process.kill()
    process.communicate(timeout=60)
    assert command.survivors() == []

    process = command.start("--resume")
    said, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "Resumed after epoch " in told
    assert command.survivors() == []
    report = Report.read(command.report)
    assert [epoch.epoch for epoch in report.epochs] == list(range(20))
    assert f"Adapter     {command.work / 'adapter'}" in said


def test_no_port_of_ours_can_be_busy(command: Command) -> None:
    """Every port that devices listen on was chosen by the kernel; the controller listens on none, so none can be taken."""
    process = command.start()
    command.wait_for_an_epoch(process)
    listening = []
    family = [child for child in psutil.process_iter() if _belongs(child, command.temporary)]
    assert len(family) >= 4  # controller, two engines, janitor
    for child in family:
        name = next((word for word in child.cmdline() if word.startswith(("workbench.", "ipyparallel."))), "")
        listening += [(name, other.laddr.port) for other in child.net_connections("tcp") if other.status == psutil.CONN_LISTEN]
    process.kill()
    process.communicate(timeout=60)
    assert {name for name, _ in listening} <= {"workbench.runtime.engine"}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(low <= port <= high for _, port in listening)
    assert command.survivors() == []


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.privileged
@pytest.mark.parametrize("loopback", [True, False])
def test_without_any_network(loopback: bool, command: Command) -> None:
    """In a network namespace of its own: loopback alone suffices, and its absence is told at once."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    process = command.start("--epochs", "2", before=(unshare, "-n", *((sys.executable, "-c", LOOPBACK_UP) if loopback else ())))
    said, told = process.communicate(timeout=120)
    if loopback:
        assert process.returncode == 0, told
        assert "accuracy" in said
    else:
        assert process.returncode == 2
        assert "ip link set lo up" in told.splitlines()[-1]
    assert command.survivors() == []


@pytest.mark.privileged
def test_as_an_unprivileged_user(monkeypatch: pytest.MonkeyPatch) -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("becoming another user needs root")
    nobody = (setpriv, "--reuid=65534", "--regid=65534", "--clear-groups")
    # The tests' own folder is closed to other users.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        folder = Path(name)
        monkeypatch.setenv("WORKBENCH_CACHE", str(folder / "cache"))
        monkeypatch.setenv("HOME", "/nonexistent")
        command = Command(folder, write_data(folder / "data"))
        for place in (folder, command.temporary):
            place.chmod(0o777)
        if subprocess.run([*nobody, "env", sys.executable, "-c", "import torch"], capture_output=True, env=command.environment).returncode:
            pytest.skip("this Python is closed to other users")
        process = command.start("--epochs", "2", before=nobody)
        said, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        assert "accuracy" in said
        assert command.survivors() == []
