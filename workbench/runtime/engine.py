"""The process of an emulated device, which becomes an engine (see pipe_engine), and the template from which it is
forked.

Importing torch and transformers takes seconds of processor time, the same for every engine.  A fork takes milliseconds,
and the imported libraries are in memory only once.  The template starts no thread, so that its children can enter
namespaces and start threads.
An engine enters its namespace and ends with its owner.  Where the system cannot fork it is started by --folder FOLDER
--rank RANK.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from workbench.core.processes import ProcessId
from workbench.core.schedule import paused_collector
from workbench.core.serial import from_json, to_json
from workbench.core.threads import in_background
from workbench.runtime.memory import take_small_stacks
from workbench.runtime.network import Endpoint

SETTINGS_FILE = "engines.json"
START_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of all engines in a run folder.  endpoints: one per rank, or empty."""

    owner_pid: int
    owner_started: float
    endpoints: tuple[Endpoint, ...] = ()


def become_engine(folder: Path, rank: int) -> None:
    """Run the engine of a run folder until its owner ends it.  Its stdin and stdout are one end of a socket pair.

    The order matters: enter namespaces before starting threads, import torch afterwards.
    """
    settings = from_json((folder / SETTINGS_FILE).read_text(), EngineSettings, source=SETTINGS_FILE)
    if settings.endpoints:
        settings.endpoints[rank].enter()
    take_small_stacks()
    owner = ProcessId(settings.owner_pid, settings.owner_started)
    in_background(_die_with, owner, name="owner watch")

    import torch
    import torch.distributed  # counts as footprint, not towards a job's budget

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    from workbench.runtime.messages import calls_of_emulated
    from workbench.runtime.pipe_engine import serve

    serve(calls_of_emulated())


def _die_with(owner: ProcessId) -> None:
    # PR_SET_PDEATHSIG would fire when the *thread* that started us ends, which can happen in a notebook.
    owner.wait()
    os.killpg(os.getpgrp(), signal.SIGKILL)


LIBRARIES = ("torch.distributed", "workbench.methods.calls", "workbench.runtime.pipe_engine")
"""Modules that every engine imports."""
IMPORT_ONLY = -1
"""Used instead of a rank: import the modules and answer 0."""
_LOOK_S = 0.2
_MOST_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request for an engine.

    modules: modules that the template imports, for this engine and all later ones.  log: path of its log file.
    """

    folder: str
    rank: int
    log: str
    working_folder: str
    search_path: tuple[str, ...]
    environment: dict[str, str]
    modules: tuple[str, ...] = ()

    def data(self) -> bytes:
        """Return the request as a message."""
        return to_json(self, indent=-1).encode()


def serve_template(owner: int) -> tuple[EngineRequest, int] | None:
    """Fork an engine for each request on stdin (a socket) and reply with its process number, until stdin ends or our
    parent dies.

    A request comes with the descriptor of the engine's end of a socket pair.  Return both in the engine, None at the
    end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("workbench engine template")
    with _watching(owner):
        _import(LIBRARIES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    requests = socket.socket(fileno=0)
    while os.getppid() == owner:
        if not select.select([requests], [], [], _LOOK_S)[0]:
            continue
        received, ends, *_ = socket.recv_fds(requests, _MOST_REQUEST_BYTES, 1)
        if not received:
            break
        request = from_json(received.decode(), EngineRequest, source="a request for an engine")
        with _watching(owner):
            _import(request.modules)
        child = 0
        if request.rank != IMPORT_ONLY:
            child = os.fork()
            if child == 0:
                requests.detach()  # collected, it would close the descriptor 0, which the log would then take
                return request, ends[0]
        for end in ends:
            os.close(end)
        requests.send(b"%d" % child)
    return None


@contextlib.contextmanager
def _watching(owner: int) -> Iterator[None]:
    """Exit if the owner dies during the block.  On other platforms the end of stdin shows this."""

    def look(*_: Any) -> None:
        if os.getppid() != owner:
            os._exit(1)

    former = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


def _import(modules: tuple[str, ...]) -> None:
    missing = [name for name in modules if name not in sys.modules]
    with paused_collector():  # collections in between would take a fifth of the time, and find nothing
        for name in missing:
            try:
                importlib.import_module(name)
            except Exception:  # the engine that needs the module reports the error
                traceback.print_exc()
    if missing:
        gc.collect()


def _run_engine(request: EngineRequest, end: int) -> None:
    """Become the engine, as if a new interpreter had been started.  Never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        setproctitle(f"{sys.executable} -m workbench.runtime.engine --folder {request.folder} --rank {request.rank}")
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((end, 0), (end, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, max(end, log) + 1)
        os.chdir(request.working_folder)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[:] = request.search_path
        become_engine(Path(request.folder), request.rank)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        if (started := serve_template(int(sys.argv[1]))) is not None:
            _run_engine(*started)
    else:
        become_engine(Path(sys.argv[2]), int(sys.argv[4]))
