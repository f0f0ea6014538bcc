"""Messages between machines: sealed msgpack with tensors as safetensors, over torchrun's store.  Decoding never executes code."""

from __future__ import annotations

import hmac
import os
import threading
import traceback
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed as dist

from workbench.core import errors
from workbench.core.errors import ConfigError, RuntimeSetupError, WorkbenchError
from workbench.core.methods import Parts, attribute
from workbench.core.serial import plain, shown
from workbench.runtime import commands as c
from workbench.runtime.context import Channel, RankContext
from workbench.runtime.frames import decode_packed
from workbench.runtime.jobs import Outcome, tells_of_peer
from workbench.runtime.memory import as_memory_error

Moved = tuple[PurePath, PurePath]


def encode(value: Any, paths: list[PurePath] | None = None) -> bytes:
    """Encode a value as bytes: dataclasses, named tuples, builtins, paths, tensors and arrays.  Raises ConfigError for other types.

    paths: a list to which the paths in the value are added.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=partial(_encode_other, paths))
    except (TypeError, OverflowError, NotImplementedError) as error:
        raise ConfigError("A message was to be sent.", f"It cannot be encoded: {error}.", "Send data, not live objects.") from error


def decode(data: bytes, kind: Any, what: str, moved: Moved | None = None) -> Any:
    """Decode a value of the type `kind`.  Raises MessageError, which says that `what` was expected, if the bytes do not fit.

    moved: a folder of the sender, and the corresponding folder here.
    """
    return decode_packed(data, kind, what, partial(_decode_other, moved))


_OWN = {"Train": "job", "Prepare": "job", "Ended": "ended", "StepDone": "done", "Probe": "probe"}
_FIELDS = {"job": "job", "ended": "part", "done": "content", "probe": "detail"}
"""Method-specific parts by message name: the field of Parts, and the message field that carries it."""
_TOLD = {name: kind for name, kind in vars(c).items() if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")}


class Told(NamedTuple):
    """The encoded form of a message of runtime.commands; name '': a dict.  part: the method-specific data."""

    name: str
    body: bytes
    part: bytes


def encode_told(value: Any, paths: list[PurePath] | None = None) -> bytes:
    """Encode a command, an event or a dict as bytes (see encode)."""
    name = "" if isinstance(value, dict) else type(value).__name__
    part = b""
    if name in _OWN:
        field = _FIELDS[_OWN[name]]
        part, value = encode(getattr(value, field), paths), value._replace(**{field: None})
    return encode(Told(name, encode(value), part))


def decode_told(data: bytes, call: Call, what: str, moved: Moved | None = None) -> Any:
    """Decode a command, an event or a dict.  Raises RuntimeSetupError, which says that `what` was expected, for anything else."""
    told = decode(data, Told, what)
    kind = call.event
    if told.name and call.parts is not None:
        own = next((name for name in call.parts.events if name.endswith(f":{told.name}")), None)
        kind = attribute(own) if own else _TOLD.get(told.name)
    value = decode(told.body, kind, what) if kind is not None else decode(b"", Told, what)
    if told.name in _OWN and call.parts is not None:
        part = _OWN[told.name]
        value = value._replace(**{_FIELDS[part]: decode(told.part, call.parts.kind(part), what, moved)})
    return value


class Call(NamedTuple):
    """A function that other machines may call, with the types of its payload, events and result.

    parts: the method-specific types in commands and events, for a function that serves a coordinator (see Parts).
    """

    name: str
    function: Callable[[Any, Any], Any]
    payload: Any
    event: Any
    result: Any
    parts: Parts | None = None


class CallTable:
    """The callable functions, by name.

    events: 'module:function' -> 'module:class' of the events that it publishes besides dicts, '' for none; Parts for a function that
    serves a coordinator.  The other types come from the function's annotations.
    """

    def __init__(self, events: Mapping[str, str | Parts]) -> None:
        self._events = events

    def named(self, name: str) -> Call:
        """Return a function by name.  Raises RuntimeSetupError, without importing anything, if the name is not in the table."""
        if name not in self._events:
            raise RuntimeSetupError(
                f"The function '{shown(name)}' was to be called on another device.",
                "It is not in the table of functions that may be.",
                "Start the same version of the workbench on every device; let nobody else reach the port of rank 0.",
            )
        function, event = attribute(name), self._events[name]
        parts, event = (event, "") if isinstance(event, Parts) else (None, event)
        types = typing.get_type_hints(function)
        result = types.pop("return")
        payload = list(types.values())[1]
        return Call(name, function, payload, c.Progress | attribute(event) if event else c.Progress, result, parts)

    def call(self, function: Callable[[Any, Any], Any]) -> Call:
        """Return the table entry of a function.  Raises RuntimeSetupError if the function is not in the table."""
        return self.named(f"{function.__module__}:{function.__qualname__}")


def _encode_other(paths: list[PurePath] | None, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return safetensors.torch.save({"": value.detach().contiguous()})
    if isinstance(value, np.ndarray):
        return safetensors.numpy.save({"": np.ascontiguousarray(value)})
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        if paths is not None:
            paths.append(value)
        return str(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode_other(moved: Moved | None, kind: type, value: Any) -> Any:
    if kind is torch.Tensor:
        return safetensors.torch.load(value)[""]
    if kind is np.ndarray:
        return safetensors.numpy.load(value)[""]
    if issubclass(kind, PurePath) and isinstance(value, str):
        path = kind(value)
        return moved[1] / path.relative_to(moved[0]) if moved is not None and path.is_relative_to(moved[0]) else path
    raise TypeError(f"a {kind.__name__} does not travel")


SILENT_S = 60.0
"""A process that is silent for this long is given up."""

_PULSE_S = 1.0
_LISTEN_S = 0.1
_ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WorkbenchError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMessage:
    """A request to a rank; the default asks it to end.  function: a name in the table.  payload: encoded."""

    function: str = ""
    context: RankContext | None = None
    payload: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMessage:
    """The answer to a CallMessage.  result: encoded.  text: the traceback, '' if the function returned.

    error: the class of a WorkbenchError with the given `parts`; '' for another error, whose text is the first part.
    """

    result: bytes = b""
    error: str = ""
    parts: tuple[str, str, str] = ("", "", "")
    text: str = ""

    @classmethod
    def of_error(cls, error: BaseException) -> AnswerMessage:
        """Return the answer for an exception."""
        text = "".join(traceback.format_exception(error))
        if isinstance(error, WorkbenchError):
            name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
            return cls(error=name, parts=(error.asked, error.found, error.todo), text=text)
        return cls(parts=(f"{type(error).__name__}: {error}", "", ""), text=text)

    def outcome(self, rank: int, call: Call, device: str) -> Outcome:
        """Convert to an Outcome with the original result or error, or that a device's system refused it memory.

        Raises RuntimeSetupError for a result of the wrong type.
        """
        if not self.text:
            result = decode(self.result, call.result, f"What device '{device}' returns from {call.name}")
            return Outcome(rank=rank, result=result)
        if self.error in _ERRORS:
            return Outcome(rank=rank, error=_ERRORS[self.error](*map(plain, self.parts)), text=plain(self.text))
        other = RuntimeError(plain(self.parts[0]))
        error = None if tells_of_peer(other) else as_memory_error(other, device, None)
        return Outcome(rank=rank, error=error or other, text=plain(self.text))


class StoreMail:
    """Stores the messages of one call, each under a key and sealed for that key."""

    def __init__(self, store: dist.Store, generation: int) -> None:
        self._store, self._generation = store, generation
        self._secret = os.environ.get("WORKBENCH_SECRET", "").encode()

    def put(self, key: str, message: Any) -> None:
        """Store a message.  Raises ConfigError if it cannot be encoded."""
        data, name = encode(message), f"{self._generation}/{key}"
        self._store.set(name, self._seal(name, data) + data)

    def has(self, key: str) -> bool:
        """Return whether a message is stored under a key."""
        return self._store.check([f"{self._generation}/{key}"])

    def take(self, key: str, kind: Any, what: str) -> Any:
        """Remove and return a message of the type `kind`.  Raises RuntimeSetupError, naming `what` was expected, if it does not fit."""
        name = f"{self._generation}/{key}"
        data = self._store.get(name)
        self._store.delete_key(name)
        size = len(self._seal(name, b""))
        if not hmac.compare_digest(self._seal(name, data[size:]), data[:size]):
            raise RuntimeSetupError(
                f"{what} was expected.", "What came does not carry this run's seal.", "Set the same WORKBENCH_SECRET on every device."
            )
        return decode(data[size:], kind, what)

    def _seal(self, name: str, data: bytes) -> bytes:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return hmac.digest(self._secret, f"{run}/{name}/".encode() + data, "sha256")


class StoreChannel(Channel):
    """A rank's end of the progress channel.  Each event is a separate message, which rank 0 removes from the store."""

    def __init__(self, mail: StoreMail, rank: int, silent: Callable[[], list[int]]) -> None:
        self._mail, self._rank, self._count, self._silent = mail, rank, 0, silent
        self._lock = threading.Lock()

    def send(self, kind: str, event: Any) -> None:
        """Send an event."""
        with self._lock:
            self._mail.put(_event_key(self._rank, self._count), event)
            self._count += 1

    def silent_peers(self) -> list[int]:
        """Return the ranks known to be silent."""
        return self._silent()


class Pulse:
    """Sends heartbeats for this process and watches those of the others, in a thread with a separate connection."""

    def __init__(self, connect: Callable[[], dist.Store], rank: int, world_size: int) -> None:
        self._connect, self._rank, self._peers = connect, rank, [other for other in range(world_size) if other != rank]
        self._beats: dict[int, bytes] = {}
        self._missed = dict.fromkeys(self._peers, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        """Start the heartbeat thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat thread."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)  # it may hang if the store has gone

    def silent(self) -> list[int]:
        """Return the ranks that were alive and have sent no heartbeat for SILENT_S."""
        return [rank for rank, missed in self._missed.items() if missed * _PULSE_S >= SILENT_S]

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store has gone; the caller will notice
            store, count = self._connect(), 0
            while not self._over.wait(_PULSE_S):
                count += 1
                store.set(f"pulse/{self._rank}", str(count))
                for rank in self._peers:
                    if not store.check([f"pulse/{rank}"]):
                        continue  # it has not started yet
                    beat = store.get(f"pulse/{rank}")
                    # We count rounds, not seconds: if this process was frozen, that does not make the others silent.
                    self._missed[rank] = self._missed[rank] + 1 if beat == self._beats.get(rank) else 0
                    self._beats[rank] = beat


class Listener:
    """Receives the ranks' events from the store, in a thread with a separate connection.  failure: the error of an invalid message."""

    def __init__(self, mail: StoreMail, world_size: int, call: Call, on_event: Callable[[int, Any], None]) -> None:
        self._mail, self._call, self._on_event = mail, call, on_event
        self.failure: WorkbenchError | None = None
        self._next = [0] * world_size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="torchrun events", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Receive the remaining events and end."""
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._over.wait(_LISTEN_S):
                self._take()
            self._take()
        except WorkbenchError as error:
            self.failure = error
        except RuntimeError:
            pass  # the store has gone; the caller will notice

    def _take(self) -> None:
        for rank in range(len(self._next)):
            while self._mail.has(key := _event_key(rank, self._next[rank])):
                event = self._mail.take(key, self._call.event, f"An event of rank {rank} in {self._call.name}")
                self._next[rank] += 1
                self._on_event(rank, event)


def _event_key(rank: int, number: int) -> str:
    return f"event/{rank}/{number}"
