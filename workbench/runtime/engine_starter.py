"""Start engines for a run folder: forked from one template process on Linux, started separately elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from workbench.core.errors import RuntimeSetupError
from workbench.core.processes import ProcessId, note_process
from workbench.core.run_folder import child_environment
from workbench.core.threads import in_background
from workbench.runtime.engine import IMPORT_ONLY, EngineRequest
from workbench.runtime.messages import calls_of_emulated

_ENGINE_MODULE = "workbench.runtime.engine"
_SHARED = ("transformers.modeling_utils", "peft")
"""Libraries that the template imports once this process has imported them, because jobs will then need them, too."""
_FAMILY = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
"""Modules of model families, which the template imports likewise: about 0.1 s of processor time in each engine."""
_shared = dict[str, None]()
"""Modules whose functions run on devices (see share_module), in the order in which they were imported."""
_CAN_FORK = sys.platform == "linux"
_OF_A_RUN = ("PATH", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "WORKBENCH_CACHE", "WORKBENCH_DILATION")
"""Variables that change nothing in what libraries import.  A changed value of any other variable requires a new
template.

torch itself sets TORCHINDUCTOR_CACHE_DIR when this process imports its compiler.
"""


class EnginesLate(RuntimeSetupError):
    """Not all engines started in time."""


def engine_environment() -> dict[str, str]:
    """Return the environment variables for engines."""
    return {
        **child_environment(),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "2",  # the arenas of many threads would count towards the memory budget
    }


def warm_up(*, with_models: bool = True) -> None:
    """Import the engines' libraries in a separate process in the background.  with_models: those for models, too."""
    if _CAN_FORK:
        request = _request(engine_environment())
        _template().prepare(replace(request, modules=_SHARED[:1]) if with_models else request)


def share_module(module: str) -> None:
    """Let the template import a module whose functions run on devices.  Otherwise each new engine would import it."""
    _shared[module] = None


def settle(timeout_s: float = 60.0) -> None:
    """Wait until the imports of `warm_up` are done, so that they do not disturb measurements."""
    if _CAN_FORK:
        _template().settle(timeout_s)


def start_engine(
    folder: Path, rank: int, end: socket.socket, environment: dict[str, str], timeout_s: float
) -> ProcessId:
    """Start the engine of a rank in a run folder.  May be called from any thread.

    end: one end of a socket pair, which becomes the engine's stdin and stdout.
    Raises RuntimeSetupError, or EnginesLate after timeout_s.
    """
    log = log_of(folder, rank)
    if _CAN_FORK:
        request = _request(environment, folder=str(folder), rank=rank, log=str(log))
        engine = ProcessId.of(_template().fork(request, end, timeout_s))
    else:
        with open(log, "ab") as file:
            process = _open(environment, end, file, "--folder", str(folder), "--rank", str(rank))
        in_background(process.wait)  # otherwise it would remain as a zombie
        engine = ProcessId.of(process.pid)
    note_process(folder, engine)
    return engine


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log in a run folder."""
    return folder / f"engine-{rank}.log"


class _Template:
    """The engine template of this process.  It ends with the process, and is restarted if it died or the environment
    changed.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._answers_due = 0
        self._errors: IO[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def prepare(self, request: EngineRequest) -> None:
        """Start the template if needed and let it import the modules of a request.  Returns at once."""
        with self._one_at_a_time:
            self._open(request.environment)
            self._send(request)
            self._answers_due += 1

    def end(self) -> None:
        """End the template."""
        with self._one_at_a_time:
            self._close()

    def settle(self, timeout_s: float) -> None:
        """Wait until all imports are done, at most timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        with self._one_at_a_time, contextlib.suppress(RuntimeSetupError):
            while self._process is not None and self._answers_due:
                self._answer(self._process, deadline_s)
                self._answers_due -= 1

    def fork(self, request: EngineRequest, end: socket.socket, timeout_s: float) -> int:
        """Return the process number of a new engine (see start_engine)."""
        deadline_s = time.monotonic() + timeout_s
        with self._one_at_a_time:
            was_there = self._process is not None
            try:
                return self._fork(request, end, deadline_s)
            except EnginesLate:
                raise
            except RuntimeSetupError:
                if not was_there:
                    raise
                return self._fork(request, end, deadline_s)  # the template had been killed

    def _fork(self, request: EngineRequest, end: socket.socket, deadline_s: float) -> int:
        process = self._open(request.environment)
        self._send(request, end)
        self._answers_due += 1
        try:
            while True:
                number = self._answer(process, deadline_s)
                self._answers_due -= 1
                if not self._answers_due:
                    return number
        except RuntimeSetupError:
            self._close()  # otherwise a late answer would be mistaken for another engine's
            raise

    def _send(self, request: EngineRequest, end: socket.socket | None = None) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # the missing answer shows the failure
            socket.send_fds(self._socket, [request.data()], [] if end is None else [end.fileno()])

    def _answer(self, process: subprocess.Popen[bytes], deadline_s: float) -> int:
        """Return the next answer.  Raises RuntimeSetupError, or EnginesLate after the deadline."""
        assert self._errors is not None and self._socket is not None
        request, answer = "An engine was to be started.", b""
        if not select.select([self._socket], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise EnginesLate(
                request, "The process that starts engines was not ready in time.", "Close other programs and try again."
            )
        with contextlib.suppress(OSError):
            answer = self._socket.recv(100)
        if not answer:
            process.wait()
            self._errors.seek(0)
            errors = " | ".join(self._errors.read().decode(errors="replace").splitlines()[-5:]) or "it said nothing"
            raise RuntimeSetupError(
                request, f"The process that starts engines ended: {errors}.", "Run workbench doctor."
            )
        return int(answer)

    def _open(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        lasting = {name: value for name, value in environment.items() if name not in _OF_A_RUN}
        if self._process is None or self._process.poll() is not None or lasting != self._environment:
            self._close()
            self._answers_due = 0
            self._environment, self._errors = lasting, tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
            atexit.unregister(self._close)
            atexit.register(self._close)
            self._socket, theirs = socket.socketpair(
                type=socket.SOCK_SEQPACKET
            )  # each message whole, with its descriptor
            with theirs:
                self._process = _open(environment, theirs, self._errors, str(self._owner_pid))
        return self._process

    def _close(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for stream in (self._socket, self._errors) if process is not None else ():
            if stream is not None:
                stream.close()


def _template() -> _Template:
    """Return this process's template, which forked children do not inherit."""
    return _template_of(os.getpid())


@functools.cache
def _template_of(pid: int) -> _Template:
    return _Template()


def _open(environment: dict[str, str], end: socket.socket, log: IO[bytes], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _ENGINE_MODULE, *arguments],
        stdin=end.fileno(),
        stdout=end.fileno(),
        stderr=log,
        env=environment,
        start_new_session=True,
    )


def _request(environment: dict[str, str], *, folder: str = "", rank: int = IMPORT_ONLY, log: str = "") -> EngineRequest:
    families = [name for name in list(sys.modules) if _FAMILY.fullmatch(name)]
    return EngineRequest(
        folder=folder,
        rank=rank,
        log=log,
        working_folder=os.getcwd(),
        search_path=tuple(path for path in dict.fromkeys(sys.path) if path),
        environment=environment,
        modules=tuple(
            name for name in (*_SHARED, *families, *calls_of_emulated().modules, *_shared) if name in sys.modules
        ),
    )
