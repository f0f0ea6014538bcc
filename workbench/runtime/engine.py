"""The process of an emulated device, which becomes an ipyparallel engine, and the template from which it is forked (python -m ... OWNER).

Importing torch and transformers takes seconds of processor time, the same for every engine.  A fork takes milliseconds, and the
imported libraries are in memory only once.  The template starts no thread, so that its children can enter namespaces and start threads.
An engine enters its namespace and ends with its owner.  Where the system cannot fork it is started by --folder FOLDER --rank RANK.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from workbench.core.run_folder import ProcessId
from workbench.core.serial import from_json, to_json
from workbench.runtime.memory import take_small_stacks
from workbench.runtime.network import Endpoint

SETTINGS_FILE = "engines.json"
START_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of all engines in a run folder.  endpoints: one per rank, or empty."""

    owner_pid: int
    owner_started: float
    profile: str
    connection_file: str
    endpoints: tuple[Endpoint, ...] = ()


def become_engine(folder: Path, rank: int) -> None:
    """Run the engine of a run folder until it is stopped.

    The order matters: enter namespaces before starting threads, import torch afterwards.
    """
    settings = from_json((folder / SETTINGS_FILE).read_text(), EngineSettings, source=SETTINGS_FILE)
    if settings.endpoints:
        settings.endpoints[rank].enter()
    take_small_stacks()
    owner = ProcessId(settings.owner_pid, settings.owner_started)
    threading.Thread(target=_die_with, args=(owner,), daemon=True, name="owner watch").start()

    import torch
    import torch.distributed  # counts as footprint, not towards a job's budget

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    gc.freeze()  # the libraries' hundreds of thousands of objects live as long as the process: collections skip them
    _serve(rank, settings)


def _die_with(owner: ProcessId) -> None:
    # PR_SET_PDEATHSIG would fire when the *thread* that started us ends, which can happen in a notebook.
    owner.wait()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(rank: int, settings: EngineSettings) -> None:
    from ipyparallel.engine.app import IPEngine

    deadline_s = time.monotonic() + START_TIMEOUT_S
    connection = Path(settings.connection_file)
    while not connection.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    here, app = os.getcwd(), IPEngine.instance()
    app.initialize(
        [
            f"--work-dir={settings.profile}",
            f"--file={connection}",
            f"--profile-dir={settings.profile}",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={START_TIMEOUT_S}",
            "--IPEngine.enable_nanny=False",  # the owner and the janitor watch the processes
            "--IPEngine.max_heartbeat_misses=0",
        ]
    )
    # ipyparallel imports from the current folder, whatever options the interpreter was started with.
    sys.path[:] = [path for path in sys.path if path]
    os.chdir(here)
    app.start()


LIBRARIES = ("torch.distributed", "ipyparallel.engine.app", "workbench.runtime.jobs")
"""Modules that every engine imports."""
IMPORT_ONLY = -1
"""Used instead of a rank: import the modules and answer 0."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request for an engine.  modules: imported by the template, for this engine and all later ones; log: path of its log file."""

    folder: str
    rank: int
    log: str
    working_folder: str
    search_path: tuple[str, ...]
    environment: dict[str, str]
    modules: tuple[str, ...] = ()

    def line(self) -> bytes:
        """Return the request as one line of bytes."""
        return to_json(self, indent=-1).encode() + b"\n"


def serve_template(owner: int) -> None:
    """Fork an engine for each request on stdin and answer with its process number, until stdin ends or the owner (our parent) dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("workbench engine template")
    with _watching(owner):
        _import(LIBRARIES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    buffered = b""
    while os.getppid() == owner:
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        received = os.read(0, 1 << 20)
        if not received:
            return
        *lines, buffered = (buffered + received).split(b"\n")
        for line in lines:
            wanted = from_json(line.decode(), EngineRequest, source="a request for an engine")
            with _watching(owner):
                _import(wanted.modules)
            child = 0
            if wanted.rank != IMPORT_ONLY:
                child = os.fork()
                if child == 0:
                    _run_engine(wanted)
            os.write(1, b"%d\n" % child)


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
    for name in missing:
        try:
            importlib.import_module(name)
        except Exception:  # the engine that needs the module reports the error
            traceback.print_exc()
    if missing:
        gc.collect()


def _run_engine(wanted: EngineRequest) -> None:
    """Become the engine, as if a new interpreter had been started.  Never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        setproctitle(f"{sys.executable} -m workbench.runtime.engine --folder {wanted.folder} --rank {wanted.rank}")
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(wanted.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, max(nothing, output) + 1)
        os.chdir(wanted.working_folder)
        os.environ.clear()
        os.environ.update(wanted.environment)
        sys.path[:] = wanted.search_path
        become_engine(Path(wanted.folder), wanted.rank)
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
        serve_template(int(sys.argv[1]))
    else:
        become_engine(Path(sys.argv[2]), int(sys.argv[4]))
