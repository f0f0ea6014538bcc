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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from workbench import __version__
from workbench.core.cluster import Device
from workbench.core.errors import DeviceLostError, RuntimeSetupError, WorkbenchError, WriteError
from workbench.core.serial import shown
from workbench.runtime.commands import Pong
from workbench.runtime.frames import FROM_ENGINE, KEPT, WORK, Asked, FilePart, Message, Messages, decode_packed, foreign
from workbench.runtime.jobs import Outcome
from workbench.runtime.kept_files import KeptFiles
from workbench.runtime.messages import AnswerMessage, Call, decode, decode_told
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_agent import LOWEST
from workbench.runtime.ssh_login import Failure
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
        self._owners: dict[str, int] = {}
        self._num_keys: Counter[int] = Counter()
        self._waiting: list[tuple[int, Asked, Callable[[bytes], None]]] = []
        self._lock = threading.Lock()

    def ask(self, rank: int, asked: Asked, reply: Callable[[bytes], None]) -> None:
        """Reply at once, or when the keys are there.  Raises MessageError for a question that no device asks."""
        what = "a question to the store"
        if asked.operation in ("set", "get") and len(asked.keys) != 1:
            raise foreign(what, f"{asked.operation} with {len(asked.keys)} keys")
        with self._lock:
            if asked.operation == "set":
                [key] = asked.keys
                self._num_keys[rank] += key not in self._owners
                if self._owners.setdefault(key, rank) != rank:
                    raise foreign(what, f"it sets '{key}' of another device")
                if self._num_keys[rank] > _MOST_KEYS:
                    raise foreign(what, f"more than {_MOST_KEYS:,} keys")
                self._values[key] = asked.value
            is_there = all(key in self._values for key in asked.keys)
            if asked.operation in ("wait", "get") and not is_there:
                if sum(other == rank for other, *_ in self._waiting) >= _MOST_WAITING:
                    raise foreign(what, f"more than {_MOST_WAITING:,} at once")
                self._waiting.append((rank, asked, reply))
                return
            due = [(rank, asked, reply)]
            if asked.operation == "set":
                due += [one for one in self._waiting if all(key in self._values for key in one[1].keys)]
                self._waiting = [one for one in self._waiting if one not in due]
            found = b"1" if is_there else b""
            answers = [(say, self._values[one.keys[0]] if one.operation == "get" else found) for _, one, say in due]
        for say, answer in answers:
            say(answer)

    def drop(self, rank: int) -> None:
        """Forget the questions of a device that is lost."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one[0] != rank]


_MOST_KEYS, _MOST_WAITING = 100_000, 1000
"""Of one device in one run."""


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


class Seat:
    """One device: its connection, its engine and its current job.

    What it sends is decoded in the thread that reads, so that an error there ends the connection and loses this device alone.
    unread_bytes: of its messages that nobody has taken from SshEngines.told yet.
    """

    def __init__(self, rank: int, device: Device, engines: SshEngines) -> None:
        self.rank, self.device, self._engines = rank, device, engines
        self.connection: Connection | None = None
        self.ready = threading.Event()
        self.call: Call | None = None
        self.number = 0
        self.why = ""
        self.killed_s: float | None = None
        self.pong = Pong()
        self.unread_bytes = 0
        self._messages = Messages(FROM_ENGINE, engines.most_bytes)
        self._files = KeptFiles(engines.folder, engines.most_bytes)
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

    def send(self, kind: Literal["hello", "call", "command"], data: bytes, number: int = 0) -> None:
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

    def _fetched(self, places: Sequence[str], reply: Callable[[bytes], None]) -> None:
        said = b""
        try:
            self._engines.bring_weights(self.link, places)
        except (WorkbenchError, OSError) as error:
            said = str(error).encode()
        self._is_fetching = False
        reply(said)

    def close(self) -> None:
        """End everything there."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._files.close()

    # In the thread that reads.

    def _take(self, kind: str, content: Any) -> None:
        match kind:
            case "started":
                self._messages, self.why, self.killed_s = Messages(FROM_ENGINE, self._engines.most_bytes), "", None
                self.ready.clear()
            case "engine":
                self._messages.most_bytes = self._files.most_bytes = self._engines.most_bytes
                for message in self._messages.of(content):
                    self._hear(message)
            case "ended":
                last = shown((content.log.strip().splitlines() or ["it said nothing"])[-1], 200)
                why = f"its engine ended with status {content.code} ({last})."
                if content.code == -9 and self.killed_s is None:  # SIGKILL, and not from us
                    why = "its engine was killed there, as a system does that has no memory left."
                self._gone(why)
            case "lost":
                self._gone(content.found)

    def _gone(self, why: str) -> None:
        self.why, self.killed_s = why, None
        self._files.close()
        self._engines.store.drop(self.rank)
        self.ready.set()
        self._engines.tell(self.rank, "died", why)

    def _hear(self, message: Message) -> None:
        name = self.device.name
        match message.kind:
            case "ready":
                version = shown(message.data.decode(errors="replace"))
                if version != __version__:
                    self.why = f"its workbench is {version}, this one {__version__}."
                self.ready.set()
            case "store":
                asked = decode_packed(message.data, Asked, "a question to the store")
                self._ask(asked, functools.partial(self._reply, message.number))
            case "file":
                part = decode_packed(message.data, FilePart, "a part of a file")
                try:
                    self._files.take(part)
                except (WriteError, OSError) as error:  # of this machine, where the run's folder is
                    self._engines.tell(self.rank, "ended", Outcome(rank=self.rank, error=error, text=str(error)))
            case "event" | "answer" if message.number == self.number and self.call is not None:
                self.unread_bytes += len(message.data)
                if self.unread_bytes > 2 * self._engines.most_bytes:
                    raise foreign("an event", f"{self.unread_bytes:,} bytes that nobody has read yet")
                content: Any
                if message.kind == "event":
                    content = decode_told(message.data, self.call, f"An event of device '{name}'")
                    self.pong = content if isinstance(content, Pong) else self.pong
                    self._engines.tell(self.rank, "event", content, len(message.data))
                else:
                    answer = decode(message.data, AnswerMessage, f"The answer of device '{name}'")
                    content = answer.outcome(self.rank, self.call, name)
                    self._engines.tell(self.rank, "ended", content, len(message.data))

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
        self._engines.store.ask(self.rank, asked, reply)

    def _reply(self, number: int, data: bytes) -> None:
        if self.connection is not None:
            self.connection.to_engine(Message("reply", number, data).framed())
