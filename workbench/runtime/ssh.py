"""A connection to a real device: the system's ssh, an agent at its other end (see ssh_agent), frames between them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.cluster import Device
from workbench.core.errors import RuntimeSetupError
from workbench.fetch import cache_folder
from workbench.runtime import ssh_agent
from workbench.runtime.ssh_agent import CHUNK, DATA, ENGINE, HEADER, JSON, MAGIC

SILENCE_S = 4.0
"""After so many seconds without a sign of life the agent ends everything on its device."""
_PING_EVERY_S = 1.0
_GONE_S = 10.0
"""After so many seconds without an answer a device is given up; ssh itself notices a dead connection after 6."""
_CLOCK_ROUNDS = 20
_READ = 1 << 20
Span = tuple[int, int]
_LOADER = "import os;r=lambda n:(lambda c:c+r(n-len(c)) if c and n>len(c) else c)(os.read(0,n));exec(r(int(r(8))))"
"""Reads the agent's length, then the agent, and runs it."""


def known_hosts() -> Path:
    """Return the file of the host keys that were trusted."""
    return cache_folder() / "kit" / "known_hosts"


def agent_command(device: Device, *, trusts_new: bool = False) -> list[str]:
    """Return the command that logs in and starts the agent's loader.  trusts_new: a host key that is not known yet is taken."""
    if trusts_new:
        known_hosts().parent.mkdir(parents=True, exist_ok=True)
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "3",
        "StrictHostKeyChecking": "accept-new" if trusts_new else "yes",
        "UserKnownHostsFile": f'"{known_hosts()}"',
        "GlobalKnownHostsFile": "none",
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
    }
    words = ["ssh", "-T", *(f"-o{name}={value}" for name, value in options.items())]
    if device.port is not None:
        words += ["-p", str(device.port)]
    if device.key:
        words += ["-i", str(Path(device.key).expanduser())]
    return [*words, "--", device.address or device.name, f"exec python3 -I -c '{_LOADER}'"]


def fingerprints(device: Device) -> tuple[str, ...]:
    """Return the fingerprints of a device's trusted host keys."""
    said = _keygen(device, "-l").splitlines()
    return tuple(" ".join(line.split()[1:2] + line.split()[-1:]) for line in said if line and not line.startswith("#"))


def forget_host(device: Device) -> None:
    """Forget a device's host keys."""
    _keygen(device, "-R")
    known_hosts().with_suffix(".old").unlink(missing_ok=True)


def _keygen(device: Device, what: str) -> str:
    host = (device.address or device.name).rpartition("@")[2]
    name = host if device.port in (None, 22) else f"[{host}]:{device.port}"
    words = ["ssh-keygen", "-f", str(known_hosts()), *(("-R", name) if what == "-R" else ("-l", "-F", name))]
    return subprocess.run(words, capture_output=True, text=True).stdout if known_hosts().exists() else ""


class Failure(NamedTuple):
    """Why a device cannot be used, and what to do about it."""

    found: str
    todo: str


def failure_of(said: str, code: int | None) -> Failure:
    """Return what ssh's words mean.  code: with which it ended, None if it did not."""
    for marks, found, todo in _MEANINGS:
        if any(mark in said for mark in marks):
            return Failure(found, todo)
    if code == 127:
        return Failure("It has no python3.", "Install Python 3.11 or later there: sudo apt install python3.")
    last = (said.strip().splitlines() or ["it said nothing"])[-1]
    return Failure(
        f"ssh ended with status {code}: {last}." if code is not None else f"It did not answer: {last}.", "See `workbench kit check`."
    )


_MEANINGS = (
    (("REMOTE HOST IDENTIFICATION HAS CHANGED",), "Its host key is not the one that was trusted.",
     "If you installed it again, remove its old key: workbench kit check --forget; if not, find out who answers there."),
    (("Host key verification failed", "host key is known"), "Its host key is not known yet.",
     "Compare and accept it: workbench kit check --trust."),
    (("Permission denied", "Too many authentication failures"), "It does not accept the key.",
     "Copy your public key there: ssh-copy-id USER@HOST."),
    (("Connection refused",), "Nothing listens at its SSH port.", "Switch SSH on there: sudo systemctl enable --now ssh."),
    (("Could not resolve", "Name or service not known"), "Its name is not known in this network.",
     "Check the address, or give its number."),
    (("timed out", "No route to host", "Network is unreachable"), "It cannot be reached.", "Check power, cable and address."),
    (("identity file", "Load key"), "The key file cannot be read.", "Name your private key with key = in the kit's file."),
)  # fmt: skip


class Connection:
    """A device's agent.  name: the device's.  command: starts the agent's loader (see agent_command).

    take(kind, content): called in the reading thread with 'engine' (bytes), 'started', 'ended' (their fields), and once 'lost' (a Failure).
    """

    def __init__(self, name: str, command: Sequence[str], take: Callable[[str, Any], None] = lambda kind, content: None) -> None:
        self.name, self._take = name, take
        self.greeting: dict[str, Any] = {}
        self.health: dict[str, Any] = {}
        self.clock_offset_s, self.clock_bound_s, self.cpu_s = 0.0, float("inf"), 0.0
        self.lost: Failure | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the connection)
        self._queue: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._urgent: deque[bytes] = deque()
        self._answers: dict[int, Future[Any]] = {}
        self._pings: dict[int, float] = {}
        self._files: set[Future[Any]] = set()
        self._number, self._lock = 0, threading.Lock()
        self._heard_s = time.monotonic()
        self._ready, self._closing = threading.Event(), threading.Event()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            self._errors.close()
            raise RuntimeSetupError(self._asked, f"ssh cannot be started: {error.strerror}.", "Install OpenSSH's client.") from error
        source = inspect.getsource(ssh_agent).encode()
        self._queue.put((b"%8d" % len(source) + source,))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write, self._ping)]
        for thread in self._threads:
            thread.start()

    @property
    def _asked(self) -> str:
        return f"Device '{self.name}' was to be reached over SSH."

    def open(self, owner: str = "", timeout_s: float = 20.0) -> None:
        """Wait for the agent and greet it.  owner: who takes the device for a run.  Raises RuntimeSetupError, which says what to do."""
        if not self._ready.wait(timeout_s) or self.lost is not None:
            failure = self.lost or failure_of(self._said(), None)
            self.close()
            raise RuntimeSetupError(self._asked, failure.found, failure.todo)
        try:
            self.greeting = self.ask("hello", silence_s=SILENCE_S, owner=owner)
            for _ in range(_CLOCK_ROUNDS):
                self.ask("ping")
        except BaseException:
            self.close()
            raise

    def ask(self, operation: str, timeout_s: float = 60.0, **fields: Any) -> Any:
        """Have the agent do something and return what it says.  Raises RuntimeSetupError."""
        try:
            return self.post(operation, **fields).result(timeout_s)
        except TooLate:
            raise RuntimeSetupError(f"Device '{self.name}' was asked to {operation}.", "It did not answer in time.", "Check it.") from None

    def post(self, operation: str, frames: Iterable[bytes] = (), **fields: Any) -> Future[Any]:
        """Have the agent do something; return where its answer will be.  frames: follow the request."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = future
            if operation == "begin_file":
                self._files.add(future)
                future.add_done_callback(self._files.discard)
        if self.lost is not None:
            self._fail(number, self.lost.found)
        request = _frame(JSON, json.dumps({"id": number, "op": operation, **fields}).encode())
        if operation == "ping":
            self._pings[number] = 0.0  # noted when it is written
            self._urgent.append(request)
            self._queue.put(())
        else:
            self._queue.put(_joined(request, frames))
        return future

    @property
    def is_sending(self) -> bool:
        """Return whether files are on their way, behind which everything but this connection's own pings waits."""
        return bool(self._files)

    def send_file(self, path: Path, place: str) -> Future[Any]:
        """Send a file, which is there whole or not at all; return where the agent says so.  Raises OSError for one that cannot be read."""
        file = open(path, "rb")  # noqa: SIM115 (closed by whoever sends it; it may be removed meanwhile)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
        file.seek(0)
        return self.post("begin_file", _frames_of(file, size), path=place, size=size, sha256=digest)

    def lacks(self, path: Path, place: str, span: Span | None = None) -> int | None:
        """Return None if the device has a file, else how many of its bytes.  span: the bytes of it that are meant, all by default."""
        begun: int | None = self._has(path, place, span or (0, path.stat().st_size)).result(600.0)
        return begun

    def bring(self, path: Path, place: str, span: Span | None = None) -> bool:
        """Send a file, or what a broken transfer left of it, unless the device has it; return whether.  Raises RuntimeSetupError."""
        return self.bring_all([(path, place, span)]) == 1

    def bring_all(self, files: Sequence[tuple[Path, str, Span | None]]) -> int:
        """Send files (see bring) without waiting for one before the next; return how many were sent.  Raises RuntimeSetupError."""
        whole = [(path, place, span or (0, path.stat().st_size)) for path, place, span in files]
        asked = [self._has(*file) for file in whole]
        sent = []
        for (path, place, (begin, end)), answer in zip(whole, asked, strict=True):
            begun = answer.result(600.0)
            if begun is not None:
                frames, digest = _frames_from(path, begin + begun, end), digest_of(path, (begin, end))
                sent.append(self.post("begin_file", frames, path=place, size=end - begin, sha256=digest, offset=begun))
        for future in sent:
            future.result()
        return len(sent)

    def _has(self, path: Path, place: str, span: Span) -> Future[Any]:
        return self.post("has", path=place, size=span[1] - span[0], sha256=digest_of(path, span))

    def to_engine(self, data: bytes) -> None:
        """Send bytes to the engine."""
        self._queue.put(_frame(ENGINE, data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))

    def close(self) -> None:
        """End the connection, and with it everything on the device."""
        self._closing.set()
        self._queue.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    # Threads.

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (frames := self._queue.get()) is not None:
                for frame in frames:
                    self._flush_urgent()
                    self._process.stdin.write(frame)
                self._flush_urgent()
                self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _flush_urgent(self) -> None:
        assert self._process.stdin is not None
        while self._urgent:
            request = self._urgent.popleft()
            self._pings[json.loads(request[HEADER.size :])["id"]] = time.monotonic()
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def _ping(self) -> None:
        while not self._closing.wait(_PING_EVERY_S):
            if self._ready.is_set():
                self.post("ping", health=True)
                if time.monotonic() - self._heard_s > _GONE_S:
                    self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        stream: Any = self._process.stdout
        try:
            _skip_to_magic(stream.read1)
            self._heard_s = time.monotonic()
            self._ready.set()
            while header := _exactly(stream.read, HEADER.size):
                length, kind = HEADER.unpack(header)
                payload = _exactly(stream.read, length)
                self._heard_s = time.monotonic()
                if kind == ENGINE:
                    self._take("engine", payload)
                else:
                    self._hear(json.loads(payload))
        except (OSError, EOFError, ValueError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)  # its status may tell why
        self._process.kill()
        self.lost = failure_of(self._said(), self._process.wait())
        self._errors.close()
        stream.close()
        for number in list(self._answers):
            self._fail(number, self.lost.found)
        self._ready.set()
        if not self._closing.is_set():
            self._take("lost", self.lost)

    def _hear(self, said: dict[str, Any]) -> None:
        if "event" in said:
            self._take(said["event"], said)
            return
        future = self._answers.pop(said["id"], None)
        sent_s = self._pings.pop(said["id"], None)
        if sent_s is not None:
            now_s = time.monotonic()
            self.cpu_s, self.health = said["cpu_s"], said["health"] or self.health
            if (now_s - sent_s) / 2 < self.clock_bound_s:
                self.clock_bound_s = (now_s - sent_s) / 2
                self.clock_offset_s = (sent_s + now_s) / 2 - said["clock_s"]
        if future is None:
            return
        if "error" in said:
            todo = said["todo"] or "See `workbench kit check`."
            future.set_exception(RuntimeSetupError(f"Device '{self.name}' was being used.", said["error"], todo))
        else:
            future.set_result(said.get("found"))

    def _fail(self, number: int, why: str) -> None:
        future = self._answers.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(RuntimeSetupError(f"Device '{self.name}' was being used.", f"The connection ended: {why}", "Check it."))

    def _said(self) -> str:
        """Return what ssh has said."""
        with contextlib.suppress(ValueError):
            return os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace")
        return ""


def digest_of(path: Path, span: Span | None = None) -> str:
    """Return the digest of a file or of a span of its bytes, computed once for all devices."""
    with _DIGESTING:
        return _digest(path, span or (0, path.stat().st_size), path.stat().st_mtime_ns)


_DIGESTING = threading.Lock()


@functools.lru_cache(1 << 14)
def _digest(path: Path, span: Span, changed_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(span[0])
        while data := file.read(min(_READ, span[1] - file.tell())):
            digest.update(data)
    return digest.hexdigest()


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def _joined(request: bytes, frames: Iterable[bytes]) -> Iterator[bytes]:
    yield request
    yield from frames


def _frames_of(file: Any, size: int) -> Iterator[bytes]:
    """Yield a file's bytes as frames, exactly `size` of them."""
    with file:
        while size > 0:
            data = file.read(min(CHUNK, size)) or bytes(min(CHUNK, size))  # one that was cut meanwhile has another digest
            size -= len(data)
            yield _frame(DATA, data)


def _frames_from(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Yield a span of a file as frames; it is open only meanwhile."""
    with open(path, "rb") as file:
        file.seek(begin)
        yield from _frames_of(file, end - begin)


def _skip_to_magic(read: Callable[[int], bytes]) -> None:
    """Read until the agent begins: a .bashrc may print first.  Raises EOFError if it never does."""
    window = b""
    while not window.endswith(MAGIC):
        byte = read(1)
        if not byte:
            raise EOFError
        window = (window + byte)[-len(MAGIC) :]


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = read(count)
    if len(data) < count:
        raise EOFError
    return data
