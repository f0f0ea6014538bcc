"""One running set of emulated devices: an engine for each, their links, run folder and janitor, all started and ended
together.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import MessageError, RuntimeSetupError
from workbench.core.processes import ProcessId, note_process, remove_run_folder
from workbench.core.run_folder import make_run_folder, start_janitor
from workbench.core.serial import write_json
from workbench.core.threads import in_background
from workbench.runtime.engine import SETTINGS_FILE, START_TIMEOUT_S, EngineSettings
from workbench.runtime.engine_slots import EngineSlot, Inbox
from workbench.runtime.engine_starter import EnginesLate, engine_environment, log_of, start_engine
from workbench.runtime.frames import FILE_CHUNK, Asked, FilePart, foreign
from workbench.runtime.memory import MemoryReading, read_memory
from workbench.runtime.network import EmulatedNetwork, Endpoint, Fidelity, require_loopback
from workbench.runtime.work_folder import is_full_disk

OnReady = Callable[[int, int], None]
"""Called with the number of engines that are ready and the number of all engines."""


def unheard(done: int, count: int) -> None:
    """Ignore the numbers."""


_LOG_TAIL_LINES = 15


class _Pipe:
    """Our end of an engine's socket pair.  One thread reads and one writes, so that an engine that does not read blocks
    nobody else.

    hear(data): called with the received bytes.  ended(error): called once, with the error of `hear` if there was one.
    """

    def __init__(
        self, end: socket.socket, hear: Callable[[memoryview], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._end, self._hear, self._ended = end, hear, ended
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [in_background(work) for work in (self._read, self._write)]

    def write(self, data: bytes) -> None:
        """Send bytes, without waiting."""
        self._unsent.put(data)

    def hang_up(self) -> None:
        """Ask both threads to end."""
        self._unsent.put(None)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        self.hang_up()
        for thread in self._threads:
            thread.join()
        self._end.close()

    def _read(self) -> None:
        buffer, error = memoryview(bytearray(FILE_CHUNK)), None
        try:
            while size := self._end.recv_into(buffer):
                self._hear(buffer[:size])
        except OSError:
            pass  # it was killed, or we have hung up
        except Exception as failure:  # any error in its messages: the other devices continue
            error = failure
        self._ended(error)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._unsent.get()) is not None:
                self._end.sendall(data)


class PipeSlot(EngineSlot):
    """A device whose engine is at the other end of a socket pair and sees the run's files."""

    _pipe: _Pipe | None = None

    def connect(self, end: socket.socket) -> None:
        """Connect to a new engine.  end: our end of the socket pair."""
        self._renew()
        self._pipe = _Pipe(end, self._hear, self._ended)

    def close(self) -> None:
        """Close the connection."""
        pipe, self._pipe = self._pipe, None  # at once: it may be called in two threads
        if pipe is not None:
            pipe.close()

    def bring(self, paths: Sequence[Path]) -> None:
        """Do nothing, because the device sees the run's files."""

    def _write(self, data: bytes) -> None:
        pipe = self._pipe
        if pipe is not None:
            pipe.write(data)

    # In the reading thread.

    def _ended(self, error: Exception | None) -> None:
        self.kill()
        reason = (
            None
            if error is None
            else error.found
            if isinstance(error, MessageError)
            else f"What it sent led to: {error}."
        )
        self._gone(reason or "its engine was killed or crashed.", reason)

    def _ask(self, request: Asked, reply: Callable[[bytes], None]) -> None:
        if request.operation == "fetch":
            raise foreign("a question to the store", "weights, which this device has itself")
        self.inbox.store.ask(self.rank, request, reply)

    def _keep(self, part: FilePart) -> None:
        raise foreign("a message of an engine", "a file, which this device shares")


class LocalSlot(PipeSlot):
    """An emulated device: its engine is a process of this machine."""

    def __init__(self, rank: int, device: Device, inbox: Inbox, session: EngineSession) -> None:
        super().__init__(rank, device, inbox)
        self._session = session
        self.engine: ProcessId | None = None

    def open(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the engine, ending any remains of it, without waiting for it.  Raises RuntimeSetupError."""
        self.close()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.engine = self._session.start_engine(self.rank, theirs, timeout_s)
        except BaseException:
            ours.close()
            raise
        self.connect(ours)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the engine.  Raises RuntimeSetupError, or EnginesLate after the time-out."""
        if not self.ready.wait(timeout_s):
            raise self._session.late(self.rank)
        if self.why:
            raise RuntimeSetupError(
                f"The engine of device '{self.device.name}' was being started.",
                f"It ended: {self._session.log_tail(self.rank)}",
                "Run workbench doctor.",
            )

    def close(self) -> None:
        """End the engine."""
        self.kill()
        super().close()

    def kill(self) -> None:
        """End the engine at once."""
        if self.engine is not None:
            self.engine.kill()

    def freeze(self) -> None:
        """Suspend the engine without ending it."""
        if self.engine is not None and self.engine.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.engine.pid, signal.SIGSTOP)

    def look(self) -> None:
        """Notice the end of an engine whose own children hold the other end of the pipe."""
        pipe = self._pipe  # which a restart may close meanwhile
        if pipe is not None and not self.why and not self.is_alive:
            pipe.hang_up()

    @property
    def is_alive(self) -> bool:
        """Return whether the engine's process runs."""
        return self.engine is not None and self.engine.alive

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds that the engine has used.  0 if it is dead."""
        return 0.0 if self.engine is None else self.engine.cpu_s

    @property
    def memory(self) -> MemoryReading | None:
        """Return the engine's memory, read from outside.  None if it is dead."""
        return read_memory(self.engine.pid) if self.engine is not None and self.engine.alive else None


class EngineSession:
    """All processes of a cluster of emulated devices.  `close` ends all of them, also after a failed `open`."""

    def __init__(self, cluster: Cluster, fidelity: Fidelity, inbox: Inbox) -> None:
        self.cluster = cluster
        self.fidelity = fidelity
        self.endpoints: tuple[Endpoint, ...] = ()
        self.slots = [LocalSlot(rank, device, inbox, self) for rank, device in enumerate(cluster.devices)]
        self._owner_pid = os.getpid()
        self._timeout_s = START_TIMEOUT_S
        self._folder: Path | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._network: EmulatedNetwork | None = None
        self._environment: dict[str, str] | None = None  # of the engines, while they may be started
        self._starting = threading.Lock()

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        assert self._folder is not None
        return self._folder

    def shape_links(self, cluster: Cluster) -> None:
        """Set the emulated links to the rates of another cluster with the same devices."""
        if self._network is not None:
            self._network.shape(cluster)

    @property
    def healthy(self) -> bool:
        """Return whether every engine runs and the network exists."""
        runs = self._folder is not None and all(slot.is_alive and not slot.why for slot in self.slots)
        return runs and (self._network is None or ProcessId.of(self._network.holder_pid).alive)

    def open(self, timeout_s: float = START_TIMEOUT_S, *, on_ready: OnReady = unheard) -> None:
        """Start all processes.  The first time in a process this takes seconds.  on_ready: see OnReady.

        Raises RuntimeSetupError, or EnginesLate after timeout_s.  In both cases nothing is left running.
        """
        self._timeout_s = timeout_s
        try:
            self._open(time.monotonic() + timeout_s, on_ready)
        except OSError as error:
            self.close()
            raise RuntimeSetupError(
                f"Engines for cluster '{self.cluster.name}' were being started.",
                f"The system refused: {error}.",
                "Make room in the temporary folder, or set TMPDIR to another."
                if is_full_disk(error)
                else "Run workbench doctor.",
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, deadline_s: float, on_ready: OnReady) -> None:
        folder = self._folder = make_run_folder()
        self._janitor = start_janitor(folder)
        self._environment = engine_environment()
        try:
            self._network = EmulatedNetwork.create(self.cluster, folder, self.fidelity)
        except RuntimeSetupError:
            if self.fidelity == "kernel":
                raise
            require_loopback()  # it is this machine's then
        else:
            note_process(folder, ProcessId.of(self._network.holder_pid))
            self.endpoints = self._network.endpoints
        owner = ProcessId.of(os.getpid())
        settings = EngineSettings(owner_pid=owner.pid, owner_started=owner.started, endpoints=self.endpoints)
        write_json(folder / SETTINGS_FILE, settings)
        for slot in self.slots:
            slot.open(max(0.0, deadline_s - time.monotonic()))
        for number, slot in enumerate(self.slots):
            on_ready(number, len(self.slots))
            slot.wait(max(0.0, deadline_s - time.monotonic()))

    def start_engine(self, rank: int, end: socket.socket, timeout_s: float) -> ProcessId:
        """Start a rank's engine in its namespace.

        end: one end of a socket pair.  Raises RuntimeSetupError, or EnginesLate after timeout_s.
        """
        with self._starting:  # so that none is started during `close`
            if self._environment is None:
                raise RuntimeSetupError(
                    "An engine was to be started again.", "It was given up.", "Start the engines again."
                )
            try:
                return start_engine(self.folder, rank, end, self._environment, timeout_s)
            except EnginesLate as error:
                raise self.late(rank) from error

    def late(self, rank: int) -> EnginesLate:
        """Return the error for an engine that did not start in time."""
        return EnginesLate(
            f"Engines for cluster '{self.cluster.name}' were being started.",
            f"They were not up after {self._timeout_s:.0f} s: {self.log_tail(rank)}",
            "Close other programs and try again.",
        )

    def log_tail(self, rank: int) -> str:
        """Return the end of an engine's log."""
        log = log_of(self.folder, rank)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-_LOG_TAIL_LINES:]) or "it left no log"

    def close(self) -> None:
        """End every process and remove all files.  Safe to call repeatedly and in a forked child."""
        if os.getpid() != self._owner_pid or self._folder is None:
            return
        folder, janitor = self._folder, self._janitor
        with self._starting:
            self._environment = None
        for slot in self.slots:
            slot.close()
        for slot in self.slots:
            if slot.engine is not None:
                slot.engine.wait(1.0)
        if self._network is not None:
            self._network.close()
        remove_run_folder(folder, spare=(janitor.pid,) if janitor else ())
        if janitor is not None:
            janitor.kill()
            janitor.wait()
        remove_run_folder(folder)
        self._folder = self._network = None
