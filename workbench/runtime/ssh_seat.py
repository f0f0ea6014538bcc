"""A real device in a run over SSH (connection, engine, current job), and what all devices of a run share: key-value store and relays.

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench import __version__
from workbench.core.cluster import Device
from workbench.core.errors import DeviceLostError, RuntimeSetupError, WorkbenchError
from workbench.core.files import whole_file
from workbench.runtime.commands import Pong
from workbench.runtime.messages import Call, decode
from workbench.runtime.pipe_engine import KEPT, KEPT_NAME, WORK, Asked, FilePart, Message, Messages
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_agent import LOWEST
from workbench.runtime.ssh_setup import bring_code, environment_python

if TYPE_CHECKING:
    from workbench.runtime.ssh_devices import SshEngines

_START_TIMEOUT_S = 90.0
"""A device imports torch from its card: 10 to 40 s."""
_ENGINE = "workbench.methods.calls"
_PASSED_ON = ("OMP_NUM_THREADS", "WORKBENCH_TINY")
_SIZE = struct.Struct("<Q")
_STORAGE_BYTES = 136
"""Sizes in gloo's address: a sockaddr_storage and a number."""
_LOOPBACK = socket.inet_aton("127.0.0.1")
_NEVER = ("127.0.0.2", 9)


class KeyStore:
    """The rendezvous store of one run, in memory: devices form their process group through it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Asked, Callable[[bytes], None]]] = []
        self._lock = threading.Lock()

    def ask(self, asked: Asked, reply: Callable[[bytes], None]) -> None:
        """Reply at once, or when the keys are there."""
        with self._lock:
            if asked.operation == "set":
                self._values[asked.keys[0]] = asked.value
            is_there = all(key in self._values for key in asked.keys)
            if asked.operation in ("wait", "get") and not is_there:
                self._waiting.append((asked, reply))
                return
            due = [(asked, reply)]
            if asked.operation == "set":
                due += [one for one in self._waiting if all(key in self._values for key in one[0].keys)]
                self._waiting = [one for one in self._waiting if one not in due]
            answers = [(say, self._values[one.keys[0]] if one.operation == "get" else b"1" if is_there else b"") for one, say in due]
        for say, answer in answers:
            say(answer)


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
    """The relays of one run.  failed(rank, error): called with errors of a relay."""

    def __init__(self, failed: Callable[[int, BaseException], None]) -> None:
        self._failed = failed
        self._exposed: dict[str, _Exposed] = {}

    def told(self, rank: int, connection: Connection, key: str, value: bytes) -> None:
        """Process a value that a device sets.  If it is an address, make it reachable for the other devices."""
        port = gloo_port(value)
        if port is not None:
            self._exposed[key] = _Exposed(rank, connection.post("expose", port=port))

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
        if (error := exposed.exception()) is not None:
            self._failed(rank, error)
            return
        host, port = exposed.result()
        connection.post("reach", host=host, port=port).add_done_callback(functools.partial(self._say, rank, say, value))

    def _say(self, rank: int, say: Callable[[bytes], None], value: bytes, reached: Future[Any]) -> None:
        if (error := reached.exception()) is not None:
            self._failed(rank, error)
        else:
            say(with_address(value, LOWEST, reached.result()))


class Seat:
    """One device: its connection, its engine and its current job."""

    def __init__(self, rank: int, device: Device, engines: SshEngines) -> None:
        self.rank, self.device, self._engines = rank, device, engines
        self.connection: Connection | None = None
        self.ready = threading.Event()
        self.call: Call | None = None
        self.number = 0
        self.why = ""
        self.killed_s: float | None = None
        self.pong = Pong()
        self._messages, self._parts = Messages(), dict[str, bytearray]()

    @property
    def link(self) -> Connection:
        """Return the connection.  Raises DeviceLostError without one."""
        if self.connection is None:
            raise DeviceLostError(
                f"Device '{self.device.name}' was being used.", f"It is lost: {self.why or 'no connection'}", "Run again."
            )
        return self.connection

    def open(self) -> None:
        """Connect, unless it is connected, and start the engine anew, which is not waited for.  Raises RuntimeSetupError."""
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

    def wait(self) -> None:
        """Wait for the engine.  Raises RuntimeSetupError."""
        asked = f"The engine of device '{self.device.name}' was to be started."
        if not self.ready.wait(_START_TIMEOUT_S) or self.why:
            raise RuntimeSetupError(
                asked, f"It did not come up: {self.why or 'it is too slow'}", "Run `workbench kit setup`, or see its log."
            )

    def send(self, kind: str, data: bytes, number: int = 0) -> None:
        """Send a message to the engine."""
        self.link.to_engine(Message(kind, number, data).framed())

    def bring(self, paths: Sequence[Path]) -> None:
        """Send the run's files that a job names, in place of older ones.  They arrive before any message that follows."""
        folder, link = self._engines.folder, self.link
        for name in KEPT:
            link.post("empty", path=f"run/{WORK}/{name}")
        wanted = [path for path in folder.glob("*") if folder in paths and path.is_file()]
        wanted += [path for path in paths if path.is_relative_to(folder) and path.is_file()]
        for path in wanted:
            self.link.send_file(path, f"run/{WORK}/{path.relative_to(folder).as_posix()}").add_done_callback(self._brought)

    def _fetched(self, places: Sequence[str], reply: Callable[[bytes], None]) -> None:
        try:
            self._engines.bring_weights(self.link, places)
        except (WorkbenchError, OSError) as error:
            reply(str(error).encode())
        else:
            reply(b"")

    def _brought(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._engines.tell(self.rank, "failed", error)

    def close(self) -> None:
        """End everything there."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    # In the thread that reads.

    def _take(self, kind: str, content: Any) -> None:
        match kind:
            case "started":
                self._messages, self.why, self.killed_s = Messages(), "", None
                self.ready.clear()
            case "engine":
                try:
                    for message in self._messages.of(content):
                        self._hear(message)
                except (WorkbenchError, OSError) as error:
                    self._engines.tell(self.rank, "failed", error)
            case "ended":
                last = (content["log"].strip().splitlines() or ["it said nothing"])[-1]
                why = f"its engine ended with status {content['code']} ({last})."
                if content["code"] == -9 and self.killed_s is None:  # SIGKILL, and not from us
                    why = "its engine was killed there, as a system does that has no memory left."
                self._gone(why)
            case "lost":
                self._gone(content.found)

    def _gone(self, why: str) -> None:
        self.why, self.killed_s = why, None
        self.ready.set()
        self._engines.tell(self.rank, "died", why)

    def _hear(self, message: Message) -> None:
        match message.kind:
            case "ready":
                if message.data.decode() != __version__:
                    self.why = f"its workbench is {message.data.decode()}, this one {__version__}."
                self.ready.set()
            case "store":
                asked = decode(message.data, Asked, "What a device asks of the store")
                self._ask(asked, functools.partial(self._reply, message.number))
            case "file":
                self._keep(decode(message.data, FilePart, "A file of a device"))
            case "event" | "answer" if message.number == self.number:
                self._engines.tell(self.rank, message.kind, message.data)

    def _ask(self, asked: Asked, reply: Callable[[bytes], None]) -> None:
        """Ask the store for this device, or send it weights."""
        if asked.operation == "fetch":  # it takes time, and this thread hears the device's answers
            threading.Thread(target=self._fetched, args=(asked.keys, reply), daemon=True).start()
            return
        relays, connection = self._engines.relays, self.connection
        if relays is not None and connection is not None:
            if asked.operation == "set":
                relays.told(self.rank, connection, asked.keys[0], asked.value)
            elif asked.operation == "get":
                reply = functools.partial(relays.reply, self.rank, connection, asked.keys[0], reply)
        self._engines.store.ask(asked, reply)

    def _reply(self, number: int, data: bytes) -> None:
        if self.connection is not None:
            self.connection.to_engine(Message("reply", number, data).framed())

    def _keep(self, part: FilePart) -> None:
        """Write a file of the device into the run's folder."""
        if not KEPT_NAME.fullmatch(part.path):
            raise RuntimeSetupError(f"Device '{self.device.name}' sent a file.", "Its place is none of a run's.", "Set it up again.")
        path = self._engines.folder / part.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            with open(path, "r+b" if part.offset else "wb") as log:
                log.seek(part.offset)
                log.write(part.data)
                log.truncate()
            return
        if not part.offset:
            self._parts[part.path] = bytearray()
        self._parts[part.path] += part.data
        if part.is_last:
            with whole_file(path) as file:
                file.write_bytes(self._parts.pop(part.path))
