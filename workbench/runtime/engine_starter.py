"""Start engines for a run folder: forked from one template where forking is safe (Linux), each by itself elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from workbench.core.errors import RuntimeSetupError
from workbench.runtime.engine_template import EngineRequest
from workbench.runtime.processes import ProcessId

_SHARED = ("transformers.modeling_utils",)
"""Libraries that the template imports once this process has: then the jobs will need them too."""
_OF_A_RUN = ("IPYTHONDIR", "PYTEST_CURRENT_TEST")
"""Variables that no library reads when it is imported; another value of any other makes a new template."""


class EnginesLate(RuntimeSetupError):
    """Engines that did not all come up in time."""


class EngineStarter:
    """Starts a run folder's engines, the first as well as those that take a dead one's place; from any thread.

    environment: theirs.  forks: by default where the platform allows it.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *, forks: bool = sys.platform == "linux") -> None:
        self._folder, self._environment, self._forks = folder, environment, forks
        self._logs = folder / "profile" / "log"
        self._started: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> None:
        """Let the template begin with its imports, if it has not; returns at once."""
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._forks:
            _template().open(self._environment)

    def start(self, rank: int, timeout_s: float) -> ProcessId:
        """Start a rank's engine.  Raises RuntimeSetupError, EnginesLate after timeout_s."""
        if self._forks:
            request = EngineRequest(
                folder=str(self._folder),
                rank=rank,
                log=str(self.log(rank)),
                working_folder=os.getcwd(),
                search_path=tuple(path for path in dict.fromkeys(sys.path) if path),
                environment=self._environment,
                modules=tuple(name for name in _SHARED if name in sys.modules),
            )
            return ProcessId.of(_template().fork(request, timeout_s))
        self._started = [process for process in self._started if process.poll() is None]
        with open(self.log(rank), "ab") as output:
            process = _open(self._environment, "workbench.runtime.engine", output, "--folder", str(self._folder), "--rank", str(rank))
        self._started.append(process)
        return ProcessId.of(process.pid)

    def log(self, rank: int) -> Path:
        """Return where a rank's engine writes."""
        return self._logs / f"engine-{rank}.log"

    def close(self) -> None:
        """End the engines that are this process's children; forked ones are the session's to end."""
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()


class _Template:
    """The engine template of a process: ends with it, and is started anew when it has died or the environment has changed."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._errors: IO[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def open(self, environment: dict[str, str]) -> None:
        """Start the template unless it is there."""
        with self._one_at_a_time:
            self._open(environment)

    def fork(self, request: EngineRequest, timeout_s: float) -> int:
        """Return the process number of a new engine.  Raises RuntimeSetupError, EnginesLate after timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        with self._one_at_a_time:
            process = self._open(request.environment)
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request.line())
                process.stdin.flush()
            answer = b""
            while not answer.endswith(b"\n"):
                ready = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]
                received = os.read(process.stdout.fileno(), 64) if ready else b""
                if not received:
                    raise self._failed(request, timeout_s if not ready else None)
                answer += received
            return int(answer)

    def _open(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        lasting = {name: value for name, value in environment.items() if name not in _OF_A_RUN}
        if self._process is None or self._process.poll() is not None or lasting != self._environment:
            self._close()
            self._environment, self._errors = lasting, tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
            atexit.unregister(self._close)
            atexit.register(self._close)
            self._process = _open(environment, "workbench.runtime.engine_template", self._errors, pipe=True)
        return self._process

    def _failed(self, request: EngineRequest, timeout_s: float | None) -> RuntimeSetupError:
        """Close the template, whose later answer would be taken for another engine's, and return what to raise."""
        asked = f"The engine of rank {request.rank} was asked for."
        if timeout_s is not None:
            self._close()
            return EnginesLate(asked, f"The process that starts engines was not ready after {timeout_s:.0f} s.", "Close other programs.")
        assert self._errors is not None
        self._errors.seek(0)
        said = " | ".join(self._errors.read().decode(errors="replace").splitlines()[-5:]) or "it said nothing"
        self._close()
        return RuntimeSetupError(asked, f"The process that starts engines ended: {said}", "Run workbench doctor.")

    def _close(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout, self._errors) if process is not None else ():
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _template() -> _Template:
    """Return the template of this process, which a forked child has not inherited."""
    return _template_of(os.getpid())


@functools.cache
def _template_of(pid: int) -> _Template:
    return _Template()


def _open(environment: dict[str, str], module: str, output: IO[bytes], *arguments: str, pipe: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
        stdout=subprocess.PIPE if pipe else output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
