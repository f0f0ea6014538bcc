"""`workbench run` as a process of its own, which a test may interrupt or kill, and what is left behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from tiny_job import CLUSTER_FILE

from tests.waiting import LIMIT_S

EPOCHS = 8
JOB = ("--model", "tiny-bert", "--epochs", str(EPOCHS), "--batch-size", "8")


class Command:
    """`workbench run` of a small job, as a process of its own with a temporary folder of its own.  job: None is JOB, by
    PAC+."""

    def __init__(self, folder: Path, data: Path, cache: Path, job: Sequence[str] | None = None) -> None:
        self.folder, self.work, self.report = folder, folder / "work", folder / "report.json"
        self.temporary = folder / "t"  # a short name: paths of sockets in it must stay short
        self.temporary.mkdir()
        # Slow devices: an epoch takes long enough to be interrupted in, and costs the host nothing.
        (folder / "two.toml").write_text(CLUSTER_FILE.replace("0.5", "0.1").replace("0.4", "0.08"))
        self.process: subprocess.Popen[str] | None = None
        self.words = [
            sys.executable,
            "-m",
            "workbench",
            "run",
            "--task",
            "sst2",
            "--data",
            str(data),
            *(JOB if job is None else job),
        ]
        self.words += ["--cluster", str(folder / "two.toml"), "--fidelity", "paced"]
        self.words += ["--workdir", str(self.work), "--report", str(self.report)]
        self.environment = os.environ | {
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "WORKBENCH_CACHE": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),  # the tests' own imports have set it
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
            name = next((word for word in child.cmdline() if word.startswith("workbench.")), "")
            ports += [
                (name, other.laddr.port) for other in child.net_connections("tcp") if other.status == psutil.CONN_LISTEN
            ]
        return family, ports

    def survivors(self) -> list[str]:
        """Return what still runs or lies there of it after its end, once that is nothing or the limit has passed."""
        deadline = time.monotonic() + LIMIT_S
        left = ["not looked yet"]
        while left and time.monotonic() < deadline:
            left = [str(path) for path in self.temporary.iterdir()]
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
            self.process.communicate(timeout=LIMIT_S)
