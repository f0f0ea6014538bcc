"""`workbench run` as a process of its own: interrupted, resumed without a network, and nothing left behind either of
them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_command import EPOCHS, Command
from tiny_job import write_data

from tests.waiting import LIMIT_S
from workbench.core.report import Report

LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""
RESUMED = r"Resumed after (step \d+ of )?epoch \d"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a call ended.  survivors: what it left behind."""

    said: str = ""
    told: str = ""
    returncode: int | None
    survivors: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One job in two calls: Ctrl-C in the terminal, and the second finishes, with loopback as its network.  Of a user
    without rights, if is_nobody.

    test_killed_query_runs and runtime/test_engine_cleanup hold what SIGKILL leaves.
    """

    interrupted: End
    family: int
    ports: list[tuple[str, int]]
    finished: End
    report: Report
    work: Path
    is_nobody: bool


def without_network(*, loopback: bool) -> tuple[str, ...]:
    """Return what goes before a command to run it in a network namespace of its own; nothing where that cannot be."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True).returncode:
        return ()
    return (unshare, "-n", *((sys.executable, "-c", LOOPBACK_UP) if loopback else ()))


def as_nobody() -> tuple[str, ...]:
    """Return what goes before a command to run it as another user; nothing where that cannot be."""
    words = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    # This Python may be closed to other users.  setpriv keeps root's capabilities until it has started the command, so
    # only a Python that the other user's Python starts shows it.
    starts_another = "import msgspec, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', '']))"
    trial = [*words, sys.executable, "-c", starts_another]
    can = os.geteuid() == 0 and shutil.which(words[0]) and not subprocess.run(trial, capture_output=True).returncode
    return words if can else ()


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    # The tests' own folder is closed to other users.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        folder, nobody = Path(name), as_nobody()
        command = Command(folder, write_data(folder / "data"), folder / "cache")
        command.environment["HOME"] = "/nonexistent"
        for place in (folder, command.temporary):
            place.chmod(0o777)
        try:
            process = command.start(before=nobody)
            command.wait_for_an_epoch(process)
            os.killpg(process.pid, signal.SIGINT)
            text, message = process.communicate(timeout=LIMIT_S)
            interrupted = End(said=text, told=message, returncode=process.returncode, survivors=command.survivors())

            process = command.start("--resume", before=(*without_network(loopback=True), *nobody))
            lines = command.wait_for_an_epoch(process)
            os.killpg(process.pid, signal.SIGSTOP)  # so that it has not ended before all of it has been looked at
            family, ports = command.listening()
            os.killpg(process.pid, signal.SIGCONT)
            text, message = process.communicate(timeout=LIMIT_S)
            finished = End(
                said=text,
                told="\n".join([*lines, message]),
                returncode=process.returncode,
                survivors=command.survivors(),
            )
            assert process.returncode == 0, message
            yield Life(
                interrupted=interrupted,
                family=len(family),
                ports=ports,
                finished=finished,
                report=Report.read(command.report),
                work=command.work,
                is_nobody=bool(nobody),
            )
        finally:
            command.end()


def test_control_c_says_how_to_go_on(life: Life) -> None:
    assert life.interrupted.returncode == 130
    assert life.interrupted.told.splitlines()[-1] == "Interrupted. To continue, give the same command with --resume."
    assert life.interrupted.survivors == []


def test_no_port_of_ours_can_be_busy(life: Life) -> None:
    """Every port that devices listen on was chosen by the kernel, so none can be taken."""
    assert life.family >= 4  # command, two engines, janitor
    assert {name for name, _ in life.ports} <= {"workbench.runtime.engine"}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(low <= port <= high for _, port in life.ports)


def test_the_second_call_finishes(life: Life) -> None:
    assert re.search(RESUMED, life.finished.told)
    assert not re.search(
        "warning|deprecat|failed", life.finished.told + life.finished.said, re.IGNORECASE
    )  # of any library
    assert [epoch.epoch for epoch in life.report.epochs] == list(range(EPOCHS))
    assert f"Saved in    {life.work / 'adapter'}" in life.finished.said
    assert life.finished.survivors == []


@pytest.mark.privileged
def test_loopback_is_network_enough(life: Life) -> None:
    """The second call had a network namespace of its own."""
    if not without_network(loopback=True):
        pytest.skip("no network namespaces here")
    assert life.finished.returncode == 0
    assert "accuracy" in life.finished.said


@pytest.mark.privileged
def test_without_loopback_it_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = without_network(loopback=False)
    if not before:
        pytest.skip("no network namespaces here")
    folder = tmp_path_factory.mktemp("c")
    command = Command(folder, write_data(folder / "data"), folder / "cache")
    try:
        process = command.start(before=before)
        _, text = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 2
        assert "ip link set lo up" in text.splitlines()[-1]
        assert command.survivors() == []
    finally:
        command.end()


@pytest.mark.privileged
def test_as_an_unprivileged_user(life: Life) -> None:
    if not life.is_nobody:
        pytest.skip("becoming another user needs root, and a Python that is open to it")
    assert life.finished.returncode == 0 and "accuracy" in life.finished.said
