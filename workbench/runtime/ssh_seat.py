"""A real device in a run over SSH: its connection, its engine and that engine's current job; and the relays between devices.

Relays pass tensors on between devices over TLS 1.3: gloo listens on the loopback, and the addresses that it publishes are rewritten.
Each device's agent relays (see ssh_agent).  Of the store's values only gloo's addresses are changed.  The address of a peer with a higher
rank is replaced by a port on the reader's own loopback, which leads to the peer.  An address of a lower rank is never connected to,
because of two addresses gloo connects to the lower one.
"""

from __future__ import annotations

import functools
import getpass
import os
import platform
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.core.cluster import Device
from workbench.core.errors import DeviceLostError, RuntimeSetupError, WorkbenchError, WriteError
from workbench.core.serial import shown
from workbench.runtime.frames import KEPT, WORK, Asked, FilePart, foreign
from workbench.runtime.jobs import Outcome
from workbench.runtime.kept_files import KeptFiles
from workbench.runtime.memory import MemoryReading
from workbench.runtime.seats import Seat
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_agent import LOWEST
from workbench.runtime.ssh_login import Failure
from workbench.runtime.ssh_setup import bring_code, environment_python

if TYPE_CHECKING:
    from workbench.runtime.ssh_devices import SshEngines

_KILL_S = 2.0
"""After a kill, a device that does not report its engine's end within this time is unreachable: its connection is closed."""
_START_TIMEOUT_S = 90.0
"""A device imports torch from its card: 10 to 40 s."""
_ENGINE = "workbench.methods.calls"
_PASSED_ON = ("OMP_NUM_THREADS", "WORKBENCH_TINY")
_SIZE = struct.Struct("<Q")
_STORAGE_BYTES = 136
"""Sizes in gloo's address: a sockaddr_storage and a number."""
_LOOPBACK = socket.inet_aton("127.0.0.1")
_NEVER = ("127.0.0.2", 9)


def make_certificate() -> bytes:
    """Return a key and a certificate for one run.  Raises RuntimeSetupError without openssl."""
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    asked = "Tensors between devices were to be encrypted."
    try:
        done = subprocess.run([*words, "-subj", "/CN=workbench", "-keyout", "-", "-out", "-"], capture_output=True)
    except OSError as error:
        found = f"openssl cannot be started: {error.strerror}."
        raise RuntimeSetupError(asked, found, 'Install it, or write data = "plain" for a network of your own.') from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise RuntimeSetupError(
            asked, f"openssl made no certificate: {said}.", 'Mend it, or write data = "plain" for a network of your own.'
        )
    return done.stdout


def gloo_port(value: bytes) -> int | None:
    """Return the loopback port at which gloo listens, from a value in the store.  None if the value is not an address of gloo."""
    at = _place(value)
    if at is None or value[at : at + 2] != struct.pack("=H", socket.AF_INET) or value[at + 4 : at + 8] != _LOOPBACK:
        return None
    return struct.unpack_from(">H", value, at + 2)[0]


def with_address(value: bytes, host: str, port: int) -> bytes:
    """Return gloo's value with the address replaced."""
    at = _place(value)
    assert at is not None
    return value[: at + 2] + struct.pack(">H", port) + socket.inet_aton(host) + value[at + 8 :]


def _place(value: bytes) -> int | None:
    """Return the offset of gloo's socket address, which follows a host's name and the address's size."""
    if len(value) < _SIZE.size or (at := 2 * _SIZE.size + _SIZE.unpack_from(value)[0]) + _STORAGE_BYTES > len(value):
        return None
    return at if _SIZE.unpack_from(value, at - _SIZE.size)[0] == _STORAGE_BYTES else None


class _Exposed(NamedTuple):
    rank: int
    at: Future[Any]


class Relays:
    """The relays of one run.  failed(rank, error): called with errors of a device's relay."""

    def __init__(self, failed: Callable[[int, BaseException], None]) -> None:
        self._failed = failed
        self._exposed: dict[str, _Exposed] = {}

    def told(self, rank: int, connection: Connection, key: str, value: bytes) -> None:
        """Process a value that a device sets.  If it is an address, make it reachable for the other devices."""
        port = gloo_port(value)
        if port is not None:
            at = connection.post("expose", port=port)
            self._exposed[key] = _Exposed(rank, at)
            at.add_done_callback(lambda exposed: self._failed(rank, error) if (error := exposed.exception()) is not None else None)

    def reply(self, rank: int, connection: Connection, key: str, say: Callable[[bytes], None], value: bytes) -> None:
        """Send a requested value to a device.  An address is first replaced by one at which the device reaches its peer."""
        exposed = self._exposed.get(key)
        if exposed is None or exposed.rank == rank or gloo_port(value) is None:
            say(value)
        elif exposed.rank < rank:
            say(with_address(value, *_NEVER))
        else:
            exposed.at.add_done_callback(functools.partial(self._reach, rank, connection, say, value))

    def _reach(self, rank: int, connection: Connection, say: Callable[[bytes], None], value: bytes, exposed: Future[Any]) -> None:
        if exposed.exception() is not None:  # the fault of the other device, which `told` reports
            return
        host, port = exposed.result()
        connection.post("reach", host=host, port=port).add_done_callback(functools.partial(self._say, rank, say, value))

    def _say(self, rank: int, say: Callable[[bytes], None], value: bytes, reached: Future[Any]) -> None:
        if (error := reached.exception()) is not None:
            self._failed(rank, error)
        else:
            say(with_address(value, LOWEST, reached.result()))


class SshSeat(Seat):
    """A real device: its connection, its engine and its current job."""

    return_s = 60.0
    """Whoever put its cable back sees the device take part, and whoever took it away does not wait for long."""

    def __init__(self, rank: int, device: Device, engines: SshEngines) -> None:
        super().__init__(rank, device, engines.inbox)
        self._engines = engines
        self.connection: Connection | None = None
        self.killed_s: float | None = None
        self._files = KeptFiles(engines.folder, engines.inbox.most_bytes)
        self._is_fetching = False

    @property
    def link(self) -> Connection:
        """Return the connection.  Raises DeviceLostError without one."""
        if self.connection is None:
            raise DeviceLostError(
                f"Device '{self.device.name}' was being used.", f"It is lost: {self.why or 'no connection'}", "Run again."
            )
        return self.connection

    def open(self) -> None:
        """Connect, unless it is connected, and start the engine, which is not waited for.  Raises RuntimeSetupError."""
        if self.connection is None or self.connection.lost is not None:
            command = self._engines.command_of(self.device)
            self.connection = Connection(self.device.name, command, self._take)
            self.connection.open(owner=f"{getpass.getuser()} on {platform.node()}")
            self._engines.certify(self.connection)
        environment = {"WORKBENCH_IMPORTS": " ".join(self._engines.imports)}
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = bring_code(self.connection)
        python = self.device.python or environment_python(self.connection)
        self.connection.ask("start", python=python, module=_ENGINE, environment=environment)
        self.send("hello", str(self._engines.folder).encode())

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the engine.  Raises RuntimeSetupError."""
        asked = f"The engine of device '{self.device.name}' was to be started."
        if not self.ready.wait(_START_TIMEOUT_S if timeout_s is None else timeout_s) or self.why:
            raise RuntimeSetupError(
                asked, f"It did not come up: {self.why or 'it is too slow'}", "Run `workbench kit setup`, or see its log."
            )

    def close(self) -> None:
        """End everything there."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._files.close()

    def kill(self) -> None:
        """End the engine at once; a device that does not report its end is given up (see look)."""
        if self.connection is not None:
            self.killed_s = self.killed_s or time.monotonic()
            self.connection.post("signal_engine", name="kill")

    def freeze(self) -> None:
        """Suspend the engine without ending it."""
        self.link.post("signal_engine", name="stop")

    def look(self) -> None:
        """Close the connection of a device that has not reported the end of its killed engine in time."""
        if self.killed_s is not None and time.monotonic() - self.killed_s > _KILL_S and self.connection is not None:
            threading.Thread(target=self.close, daemon=True).start()
            self.killed_s, self.why = None, "it cannot be reached."
            self.inbox.put(self.rank, "died", self.why)

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection."""
        return self.connection is not None

    @property
    def is_sending(self) -> bool:
        """Return whether files are on their way."""
        return self.connection is not None and self.connection.is_sending

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds that the engine has used, as the device last said."""
        return 0.0 if self.connection is None else self.connection.cpu_s

    @property
    def memory(self) -> MemoryReading | None:
        """Return the resident memory of the engine, as the device last said."""
        if self.connection is None:
            return None
        health = self.connection.health
        return MemoryReading(rss_bytes=0 if health is None else health.rss_bytes, peak_rss_bytes=0, data_bytes=0)

    def bring(self, paths: Sequence[Path]) -> None:
        """Send the run's files that a job names, in place of older ones.  They arrive before any message that follows."""
        folder, link = self._engines.folder, self.link
        for name in KEPT:
            link.post("empty", path=f"run/{WORK}/{name}")
        wanted = [path for path in folder.glob("*") if folder in paths and path.is_file()]
        wanted += [path for path in paths if path.is_relative_to(folder) and path.is_file()]
        for path in wanted:
            sent = self.link.send_file(path, f"run/{WORK}/{path.relative_to(folder).as_posix()}")
            sent.add_done_callback(self._give_up_for)

    def give_up(self, error: BaseException) -> None:
        """End the connection because of an error that is the device's alone."""
        if self.connection is not None:
            found, todo = (error.found, error.todo) if isinstance(error, WorkbenchError) else (str(error), "Check it.")
            self.connection.give_up(Failure(found, todo))

    def _give_up_for(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None:
            self.give_up(error)

    def _write(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.to_engine(data)

    # In the thread that reads.

    def _take(self, kind: str, content: Any) -> None:
        match kind:
            case "started":
                self._renew()
                self.killed_s = None
            case "engine":
                self._hear(content)
            case "ended":
                last = shown((content.log.strip().splitlines() or ["it said nothing"])[-1], 200)
                why = f"its engine ended with status {content.code} ({last})."
                if content.code == -9 and self.killed_s is None:  # SIGKILL, and not from us
                    why = "its engine was killed there, as a system does that has no memory left."
                self._lost(why)
            case "lost":
                self._lost(content.found)

    def _lost(self, why: str) -> None:
        self.killed_s = None
        self._files.close()
        self._gone(why, why)

    def _keep(self, part: FilePart) -> None:
        self._files.most_bytes = self.inbox.most_bytes
        try:
            self._files.take(part)
        except (WriteError, OSError) as error:  # of this machine, where the run's folder is
            self.inbox.put(self.rank, "ended", Outcome(rank=self.rank, error=error, text=str(error)))

    def _ask(self, asked: Asked, reply: Callable[[bytes], None]) -> None:
        """Ask the store for this device, or send it weights."""
        if asked.operation == "fetch":  # it takes time, and this thread hears the device's answers
            if self._is_fetching:
                raise foreign("a question to the store", "weights are asked for while others are on their way")
            self._is_fetching = True
            threading.Thread(target=self._fetched, args=(asked.keys, reply), daemon=True).start()
            return
        relays, connection = self._engines.relays, self.connection
        if relays is not None and connection is not None:
            if asked.operation == "set":
                relays.told(self.rank, connection, asked.keys[0], asked.value)
            elif asked.operation == "get":
                reply = functools.partial(relays.reply, self.rank, connection, asked.keys[0], reply)
        self.inbox.store.ask(self.rank, asked, reply)

    def _fetched(self, places: Sequence[str], reply: Callable[[bytes], None]) -> None:
        said = b""
        try:
            self._engines.bring_weights(self.link, places)
        except (WorkbenchError, OSError) as error:
            said = str(error).encode()
        self._is_fetching = False
        reply(said)
