"""A connection to a real device: the system's ssh, an agent at its other end (see ssh_agent), frames between them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
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
from typing import Any

from workbench.core.errors import RuntimeSetupError, WorkbenchError
from workbench.core.serial import shown
from workbench.runtime import frames, ssh_agent
from workbench.runtime.ssh_agent import CHUNK, DATA, ENGINE, HEADER, JSON, MAGIC
from workbench.runtime.ssh_login import Failure, Login, failure_of, with_log

SILENCE_S = 4.0
"""After so many seconds without a sign of life the agent ends everything on its device."""
_PING_EVERY_S = 1.0
_GONE_S = 10.0
"""After so many seconds without an answer a device is given up; ssh itself notices a dead connection after 6."""
_CLOCK_ROUNDS = 20
_READ_BYTES = 1 << 20
_TAIL_BYTES = 4096
"""Length of the stored end of a device's output before its agent begins, and of its stderr."""
Span = tuple[int, int]


class Connection:
    """A connection to a device's agent.

    name: the device's name.  command: starts the agent's loader (see agent_command).
    take(kind, content): called in the reading thread with 'engine' (bytes), 'started' and 'ended' (see frames), and
    once 'lost' (a Failure).
    If `take` raises an error, or an invalid message arrives, the connection ends.  That loses only this device.
    """

    greeting: frames.Greeting
    """Known once the connection is open."""

    def __init__(
        self, name: str, command: Sequence[str], take: Callable[[str, Any], None] = lambda kind, content: None
    ) -> None:
        self.name, self._take = name, take
        self.health: frames.Health | None = None
        self.clock_offset_s, self.clock_bound_s, self.cpu_s = 0.0, float("inf"), 0.0
        self.lost: Failure | None = None
        self._given_up: Failure | None = None
        self._before, self._errors = bytearray(), bytearray()
        self._queue: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._urgent: deque[bytes] = deque()
        self._answers: dict[int, tuple[str, Future[Any]]] = {}
        self._pings: dict[int, float] = {}
        self._number, self._lock = 0, threading.Lock()
        self._heard_s = time.monotonic()
        self._ready, self._closing = threading.Event(), threading.Event()
        log, name = tempfile.mkstemp(prefix="workbench-ssh-")
        self._log, self._log_name = os.fdopen(log, "rb"), Path(name)
        self._command = with_log(command, name)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._log_name.unlink()
            self._log.close()
            problem = f"ssh cannot be started: {error.strerror}."
            raise RuntimeSetupError(self._request, problem, "Install OpenSSH's client.") from error
        source = Path(ssh_agent.__file__).read_bytes()  # not by `inspect`, whose cache of lines is not for threads
        self._queue.put((b"%8d" % len(source) + source,))
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._hear_errors, self._write, self._ping, self._read)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _request(self) -> str:
        return f"Device '{self.name}' was to be reached over SSH."

    def open(self, owner: str = "", timeout_s: float = 20.0) -> None:
        """Wait for the agent and exchange versions.

        owner: name of the run's owner, who reserves the device.  Raises RuntimeSetupError with the remedy.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._ready.wait(timeout_s) or self.lost is not None:
            failure = self.lost or failure_of(self._login(None), self._command)
            self.close()
            raise RuntimeSetupError(self._request, failure.found, failure.todo)
        try:
            self.greeting = self.ask("hello", timeout_s, silence_s=SILENCE_S, owner=owner)
            for _ in range(_CLOCK_ROUNDS):
                self.ask("ping", max(0.0, deadline_s - time.monotonic()))
        except BaseException:
            self.close()
            raise

    def ask(self, operation: str, timeout_s: float = 60.0, **fields: Any) -> Any:
        """Send a request to the agent and return its reply (see frames.ANSWERS).  Raises RuntimeSetupError."""
        try:
            return self.post(operation, **fields).result(timeout_s)
        except TooLate:
            request = f"Device '{self.name}' was asked to {operation}."
            raise RuntimeSetupError(request, "It did not answer in time.", "See what else it does.") from None

    def post(self, operation: str, frames: Iterable[bytes] = (), **fields: Any) -> Future[Any]:
        """Send a request to the agent and return a future for its reply.  frames: frames that follow the request."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = operation, future
        if self.lost is not None:
            self._fail(number, self.lost)
        request = _frame(JSON, json.dumps({"id": number, "op": operation, **fields}).encode())
        if operation == "ping":
            self._pings[number] = 0.0  # noted when it is written
            self._urgent.append(request)
            self._queue.put(())
        else:
            self._queue.put(itertools.chain((request,), frames))
        return future

    @property
    def is_sending(self) -> bool:
        """Return whether files are being sent.  Everything but this connection's own pings waits behind them."""
        return any(operation == "begin_file" for operation, _ in list(self._answers.values()))

    def send_file(self, path: Path, place: str) -> Future[Any]:
        """Send a file and return a future for the agent's confirmation.  An incomplete file never appears on the
        device.  Raises OSError for a file that cannot be read.
        """
        file = open(path, "rb")  # noqa: SIM115 (closed by whoever sends it; it may be removed meanwhile)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
        file.seek(0)
        return self.post("begin_file", _frames_of(file, size), path=place, size=size, sha256=digest)

    def lacks(self, path: Path, place: str) -> bool:
        """Return whether the device does not have a file."""
        return self._has(path, place, (0, path.stat().st_size)).result(600.0) is not None

    def bring(self, files: Sequence[tuple[Path, str, Span | None]]) -> int:
        """Send the files that the device does not have, or the rest of them after an interrupted transfer.  Each is a
        path here, one there, and the span of its bytes (None: all).  They follow each other without waiting for
        replies.  Returns how many were sent.  Raises RuntimeSetupError.
        """
        spans = [(path, place, span or (0, path.stat().st_size)) for path, place, span in files]
        answers = [self._has(*file) for file in spans]
        futures = []
        for (path, place, (begin, end)), answer in zip(spans, answers, strict=True):
            received_bytes = answer.result(600.0)
            if received_bytes is not None:
                frames, digest = _frames_from(path, begin + received_bytes, end), digest_of(path, (begin, end))
                futures.append(
                    self.post("begin_file", frames, path=place, size=end - begin, sha256=digest, offset=received_bytes)
                )
        for future in futures:
            future.result()
        return len(futures)

    def _has(self, path: Path, place: str, span: Span) -> Future[Any]:
        return self.post("has", path=place, size=span[1] - span[0], sha256=digest_of(path, span))

    def to_engine(self, data: bytes) -> None:
        """Send bytes to the engine."""
        self._queue.put(_frame(ENGINE, data[offset : offset + CHUNK]) for offset in range(0, len(data), CHUNK))

    def give_up(self, failure: Failure) -> None:
        """End the connection and record `failure` as the reason of the loss; may be called from any thread."""
        self._given_up = self._given_up or failure
        self._process.kill()

    def close(self) -> None:
        """End the connection and everything that it started on the device."""
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
            self._skip_to_magic(stream.read1)
            self._log_name.unlink()  # ssh has opened its log, so that nothing remains of it if this process is killed
            self._heard_s = time.monotonic()
            self._ready.set()
            while (frame := frames.read_frame(stream.read)) is not None:
                self._heard_s = time.monotonic()
                kind, payload = frame
                if kind == ENGINE:
                    self._take("engine", payload)
                else:
                    self._hear(frames.decode_json(payload, frames.AgentMessage, "a message of the agent"))
        except (OSError, EOFError):
            pass  # it ended, or was killed
        except WorkbenchError as error:
            self.give_up(Failure(error.found, error.todo))
        except Exception as error:  # any error in its messages: the other devices continue
            problem = shown(f"{type(error).__name__}: {error}", 200)
            self.give_up(Failure(f"What it sent led to an error here: {problem}.", "Report this."))
        if self._given_up is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)  # its status may tell why
        self._process.kill()
        code = self._process.wait()
        self._threads[0].join(0.5)  # what it wrote to stderr may tell why
        self.lost = self._given_up or failure_of(self._login(code), self._command)
        self._log_name.unlink(missing_ok=True)
        self._log.close()
        stream.close()
        for number in list(self._answers):
            self._fail(number, self.lost)
        self._ready.set()
        if not self._closing.is_set():
            self._take("lost", self.lost)

    def _skip_to_magic(self, read: Callable[[int], bytes]) -> None:
        """Read until the agent begins: a .bashrc may print first.  Raises EOFError if it never does."""
        while not self._before.endswith(MAGIC):
            byte = read(1)
            if not byte:
                raise EOFError
            self._before += byte
            del self._before[:-_TAIL_BYTES]

    def _hear(self, message: frames.AgentMessage) -> None:
        if isinstance(message, frames.Started):
            self._take("started", message)
            return
        if isinstance(message, frames.EngineEnded):
            self._take("ended", message)
            return
        operation, future = self._answers.get(message.id, ("", None))
        answers = frames.Echo if operation == "ping" else frames.Answer | frames.Refusal
        if future is None or not isinstance(message, answers):
            raise frames.foreign("an answer of the agent", f"number {message.id} was not asked for, or not so")
        reply, refusal = None, None
        match message:  # a future whose reply is invalid remains, and fails with the connection
            case frames.Echo():
                sent_s, now_s = self._pings.pop(message.id, 0.0), time.monotonic()
                if not sent_s:
                    raise frames.foreign("an answer of the agent", "it answers a ping that was not sent yet")
                self.cpu_s, self.health = message.cpu_s, message.health or self.health
                if (now_s - sent_s) / 2 < self.clock_bound_s:
                    self.clock_bound_s = (now_s - sent_s) / 2
                    self.clock_offset_s = (sent_s + now_s) / 2 - message.clock_s
            case frames.Refusal():
                todo = shown(message.todo, 500) or "See `workbench kit check`."
                request = f"Device '{self.name}' was being used."
                refusal = RuntimeSetupError(request, shown(message.error, 500), todo)
            case frames.Answer():
                expected = f"what device '{self.name}' answers to {operation}"
                reply = frames.decode_json(message.found, frames.ANSWERS[operation], expected)
        del self._answers[message.id]  # before: whoever has the reply may ask whether files are being sent
        if refusal is None:
            future.set_result(reply)
        else:
            future.set_exception(refusal)

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        stream: Any = self._process.stderr
        with stream:
            while data := stream.read1(_TAIL_BYTES):
                self._errors = (self._errors + data)[-_TAIL_BYTES:]

    def _fail(self, number: int, lost: Failure) -> None:
        _, future = self._answers.pop(number, ("", None))
        if future is not None and not future.done():
            future.set_exception(RuntimeSetupError(f"Device '{self.name}' was being used.", lost.found, lost.todo))

    def _login(self, code: int | None) -> Login:
        """Return the state of the login."""
        log = os.pread(self._log.fileno(), 1 << 16, 0).decode(errors="replace")
        output, errors = self._before.decode(errors="replace"), self._errors.decode(errors="replace")
        return Login(log, code, output, errors, self._before.endswith(MAGIC))


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
        while data := file.read(min(_READ_BYTES, span[1] - file.tell())):
            digest.update(data)
    return digest.hexdigest()


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def _frames_of(file: Any, size: int) -> Iterator[bytes]:
    """Yield a file's bytes as frames, exactly `size` of them."""
    with file:
        while size > 0:
            data = file.read(min(CHUNK, size)) or bytes(
                min(CHUNK, size)
            )  # one that was cut meanwhile has another digest
            size -= len(data)
            yield _frame(DATA, data)


def _frames_from(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Yield a span of a file as frames.  The file is open only during the iteration."""
    with open(path, "rb") as file:
        file.seek(begin)
        yield from _frames_of(file, end - begin)
