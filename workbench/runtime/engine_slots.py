"""A device's place in a cluster, emulated or real: its engine, that engine's current job, and what all devices of a
cluster share.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench import __version__
from workbench.core.cluster import Device
from workbench.core.serial import shown
from workbench.runtime.commands import Pong
from workbench.runtime.frames import FROM_ENGINE, MIB, Asked, FilePart, Message, Messages, decode_packed, foreign
from workbench.runtime.memory import MemoryReading
from workbench.runtime.messages import AnswerMessage, Call, decode, decode_message

LEAST_LIMIT_BYTES = 256 * MIB


class KeyStore:
    """The rendezvous store of one run, in memory: devices form their process group through it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._owners: dict[str, int] = {}
        self._num_keys: Counter[int] = Counter()
        self._waiting: list[tuple[int, Asked, Callable[[bytes], None]]] = []
        self._lock = threading.Lock()

    def ask(self, rank: int, request: Asked, reply: Callable[[bytes], None]) -> None:
        """Reply at once, or when the keys are set.  Raises MessageError for an invalid request."""
        expected = "a question to the store"
        if request.operation in ("set", "get") and len(request.keys) != 1:
            raise foreign(expected, f"{request.operation} with {len(request.keys)} keys")
        with self._lock:
            if request.operation == "set":
                [key] = request.keys
                self._num_keys[rank] += key not in self._owners
                if self._owners.setdefault(key, rank) != rank:
                    raise foreign(expected, f"it sets '{key}' of another device")
                if self._num_keys[rank] > _MOST_KEYS:
                    raise foreign(expected, f"more than {_MOST_KEYS:,} keys")
                self._values[key] = request.value
            is_there = all(key in self._values for key in request.keys)
            if request.operation in ("wait", "get") and not is_there:
                if sum(other == rank for other, *_ in self._waiting) >= _MOST_WAITING:
                    raise foreign(expected, f"more than {_MOST_WAITING:,} at once")
                self._waiting.append((rank, request, reply))
                return
            answerable = [(rank, request, reply)]
            if request.operation == "set":
                answerable += [
                    question for question in self._waiting if all(key in self._values for key in question[1].keys)
                ]
                self._waiting = [question for question in self._waiting if question not in answerable]
            presence = b"1" if is_there else b""
            answers = [
                (say, self._values[question.keys[0]] if question.operation == "get" else presence)
                for _, question, say in answerable
            ]
        for say, answer in answers:
            say(answer)

    def drop(self, rank: int) -> None:
        """Forget the requests of a lost device."""
        with self._lock:
            self._waiting = [question for question in self._waiting if question[0] != rank]


_MOST_KEYS, _MOST_WAITING = 100_000, 1000
"""Limits for one device in one run."""


class Inbox:
    """The unread messages of a cluster's engines, and the store through which they form groups.

    most_bytes: the largest size of a message.  The unread messages of one device may take twice as much.
    """

    def __init__(self, world_size: int) -> None:
        self.most_bytes = LEAST_LIMIT_BYTES
        self.store = KeyStore()
        self._items: queue.SimpleQueue[tuple[int, str, Any, int]] = queue.SimpleQueue()
        self._put_bytes, self._taken_bytes = (
            [0] * world_size,
            [0] * world_size,
        )  # by the reading thread; by the thread that takes

    def renew(self) -> None:
        """Forget everything, because another job begins."""
        self.take(0)
        self.store = KeyStore()

    def put(self, rank: int, kind: str, content: Any, nbytes: int = 0) -> None:
        """Add an event of a device; may be called from any thread.

        nbytes: size of the message.  Raises MessageError if too many bytes are unread.
        """
        unread_bytes = self._put_bytes[rank] - self._taken_bytes[rank] + nbytes
        if nbytes and unread_bytes > 2 * self.most_bytes:  # but the report of its loss is always accepted
            raise foreign("an event", f"{unread_bytes:,} bytes that nobody has read yet")
        self._put_bytes[rank] += nbytes
        self._items.put((rank, kind, content, nbytes))

    def take(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        """Return the rank, kind and content of all events since the last call.  Waits up to timeout_s for the first."""
        items: list[tuple[int, str, Any]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                waits = bool(timeout_s) and not items
                rank, kind, content, nbytes = self._items.get(waits, timeout_s if waits else None)
                self._taken_bytes[rank] += nbytes
                items.append((rank, kind, content))
        return items


class EngineSlot(ABC):
    """One device: its engine and the engine's current job.  The subclasses start, reach and end the engine.

    The reading thread decodes the engine's messages, so that an error there loses only this device.
    call, number: the job's function and number.  ready: set when the engine is up, or known to be lost.  why: the
    reason of the loss, or ''.
    pong: the last reply to a ping.
    """

    return_s = 0.0
    """How long it is tried again to start the engine of a lost device."""

    def __init__(self, rank: int, device: Device, inbox: Inbox) -> None:
        self.rank, self.device, self.inbox = rank, device, inbox
        self.ready = threading.Event()
        self.why = ""
        self.call: Call | None = None
        self.number = 0
        self.pong = Pong()
        self._messages = Messages(FROM_ENGINE, inbox.most_bytes)

    @abstractmethod
    def open(self) -> None:
        """Start the engine, ending any remains of it, without waiting for it.  Raises RuntimeSetupError."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the engine.  Raises RuntimeSetupError."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and everything that belongs to it."""

    @abstractmethod
    def kill(self) -> None:
        """End the engine at once."""

    @abstractmethod
    def freeze(self) -> None:
        """Suspend the engine without ending it."""

    @abstractmethod
    def look(self) -> None:
        """Detect a loss that the device itself does not report."""

    @property
    def is_connected(self) -> bool:
        """Return whether messages reach the device."""
        return True

    @property
    def is_sending(self) -> bool:
        """Return whether files are being sent to the device.  Every message waits behind them."""
        return False

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds that the engine has used.  0 if unknown."""
        return 0.0

    @property
    def memory(self) -> MemoryReading | None:
        """Return the engine's memory.  None if it is unknown, or the device is lost."""
        return None

    @abstractmethod
    def bring(self, paths: Sequence[Path]) -> None:
        """Send the run's files that a job names, unless the device sees the same ones."""

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Send bytes to the engine."""

    @abstractmethod
    def _ask(self, request: Asked, reply: Callable[[bytes], None]) -> None:
        """Answer the engine's request to the store."""

    @abstractmethod
    def _keep(self, part: FilePart) -> None:
        """Store a part of a file that the engine has written."""

    def send(
        self, kind: Literal["hello", "call", "command", "stop", "reply"], data: bytes = b"", number: int = 0
    ) -> None:
        """Send a message to the engine."""
        self._write(Message(kind, number, data).framed())

    # In the reading thread.

    def _renew(self) -> None:
        """Prepare for a new engine."""
        self.ready.clear()
        self.why, self._messages = "", Messages(FROM_ENGINE, self.inbox.most_bytes)

    def _gone(self, why: str, reason: str | None) -> None:
        """Record that the engine is lost.  reason: the reason for `news`, None if it is not known."""
        self.why = why
        self.inbox.store.drop(self.rank)
        self.ready.set()
        self.inbox.put(self.rank, "died", reason)

    def _hear(self, data: bytes | memoryview) -> None:
        """Process bytes from the engine.  Raises MessageError if they are invalid."""
        self._messages.most_bytes = self.inbox.most_bytes
        for message in self._messages.of(data):
            self._take_message(message)

    def _take_message(self, message: Message) -> None:
        name = self.device.name
        match message.kind:
            case "ready":
                version = shown(message.data.decode(errors="replace"))
                if version != __version__:
                    self.why = f"its workbench is {version}, this one {__version__}."
                self.ready.set()
            case "store":
                reply = functools.partial(self.send, "reply", number=message.number)
                self._ask(decode_packed(message.data, Asked, "a question to the store"), reply)
            case "file":
                self._keep(decode_packed(message.data, FilePart, "a part of a file"))
            case "event" if message.number == self.number and self.call is not None:
                event = decode_message(message.data, self.call, f"An event of device '{name}'")
                self.pong = event if isinstance(event, Pong) else self.pong
                self.inbox.put(self.rank, "event", event, len(message.data))
            case "answer" if message.number == self.number and self.call is not None:
                answer = decode(message.data, AnswerMessage, f"The answer of device '{name}'")
                self.inbox.put(self.rank, "ended", answer.outcome(self.rank, self.call, name), len(message.data))
