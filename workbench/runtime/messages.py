"""Messages between processes and machines: msgpack with tensors as safetensors.  Decoding never executes code, and
needs no torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy

from workbench.core import errors
from workbench.core.errors import ConfigError, RuntimeSetupError, WorkbenchError
from workbench.core.methods import Parts, attribute
from workbench.core.serial import plain, shown
from workbench.runtime import commands as c
from workbench.runtime.context import RankContext
from workbench.runtime.frames import decode_packed
from workbench.runtime.jobs import Outcome, tells_of_peer
from workbench.runtime.memory import as_memory_error
from workbench.runtime.own_calls import ONLY_EMULATED

Moved = tuple[PurePath, PurePath]


def encode(value: Any, paths: list[PurePath] | None = None) -> bytes:
    """Encode a value as bytes: dataclasses, named tuples, builtins, paths, tensors and arrays.  Raises ConfigError for
    other types.

    paths: a list to which the paths in the value are added.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=partial(_encode_other, paths))
    except (TypeError, OverflowError, NotImplementedError) as error:
        raise ConfigError(
            "A message was to be sent.", f"It cannot be encoded: {error}.", "Send data, not live objects."
        ) from error


def decode(data: bytes, kind: Any, expected: str, moved: Moved | None = None) -> Any:
    """Decode a value of the type `kind`.  Raises MessageError, which names `expected`, if the bytes do not fit.

    moved: a folder of the sender, and the corresponding folder here.
    """
    return decode_packed(data, kind, expected, partial(_decode_other, moved))


_METHOD_FIELDS = {
    "Train": "job",
    "Prepare": "job",
    "Ended": "ended",
    "StepDone": "done",
    "Probe": "probe",
    "Order": "order",
}
_FIELDS = {"job": "job", "ended": "part", "done": "content", "probe": "detail", "order": "content"}
"""Method-specific parts by message name: the field of Parts, and the message field that carries it."""
_MESSAGE_TYPES = {
    name: kind
    for name, kind in vars(c).items()
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
}


class EncodedMessage(NamedTuple):
    """The encoded form of a message of runtime.commands; name '': a dict.  part: the method-specific data."""

    name: str
    body: bytes
    part: bytes


def encode_message(value: Any, paths: list[PurePath] | None = None) -> bytes:
    """Encode a command, an event or a dict as bytes (see encode)."""
    name = "" if isinstance(value, dict) else type(value).__name__
    part = b""
    if name in _METHOD_FIELDS:
        field = _FIELDS[_METHOD_FIELDS[name]]
        part, value = encode(getattr(value, field), paths), value._replace(**{field: None})
    return encode(EncodedMessage(name, encode(value), part))


def is_ping(data: bytes) -> bool:
    """Return whether bytes are a ping, which every call understands.  Raises RuntimeSetupError for bytes that are no
    message.
    """
    return bool(decode(data, EncodedMessage, "A command").name == c.Ping.__name__)


def decode_message(data: bytes, call: Call, expected: str, moved: Moved | None = None) -> Any:
    """Decode a command, an event or a dict.  Raises RuntimeSetupError, which names `expected`, for anything else."""
    message = decode(data, EncodedMessage, expected)
    kind = {"Ping": c.Ping, "Pong": c.Pong}.get(message.name, call.event)  # of every call
    if message.name and call.parts is not None:
        event_name = next((name for name in call.parts.events if name.endswith(f":{message.name}")), None)
        kind = attribute(event_name) if event_name else _MESSAGE_TYPES.get(message.name)
    value = decode(message.body, kind, expected) if kind is not None else decode(b"", EncodedMessage, expected)
    if message.name in _METHOD_FIELDS and call.parts is not None:
        part = _METHOD_FIELDS[message.name]
        value = value._replace(**{_FIELDS[part]: decode(message.part, call.parts.kind(part), expected, moved)})
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

    events: 'module:function' -> 'module:class' of the events that it publishes besides dicts, '' for none; Parts for a
    function that serves a coordinator.  The other types come from the function's annotations.
    """

    def __init__(self, events: Mapping[str, str | Parts]) -> None:
        self._events = events

    def including(self, events: Mapping[str, str | Parts]) -> CallTable:
        """Return a table with more functions."""
        return CallTable({**self._events, **events})

    @property
    def modules(self) -> frozenset[str]:
        """Return the names of the modules that define the functions."""
        return frozenset(name.partition(":")[0] for name in self._events)

    def knows(self, function: Callable[..., Any]) -> bool:
        """Return whether a function is in the table."""
        return name_of(function) in self._events

    def named(self, name: str) -> Call:
        """Return a function by name.  Raises RuntimeSetupError, without importing anything, if the name is not in the
        table.
        """
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
        return self.named(name_of(function))


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name in a CallTable."""
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"


@functools.cache
def calls_of_emulated() -> CallTable:
    """Return the table of emulated devices: the methods' functions, and what a notebook defines itself."""
    return attribute("workbench.methods.calls:CALLS").including(ONLY_EMULATED)


def _encode_other(paths: list[PurePath] | None, value: Any) -> Any:
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return importlib.import_module("safetensors.torch").save({"": value.detach().contiguous()})
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
    if "torch" in sys.modules and kind is sys.modules["torch"].Tensor:
        return importlib.import_module("safetensors.torch").load(value)[""]
    if kind is np.ndarray:
        return safetensors.numpy.load(value)[""]
    if issubclass(kind, PurePath) and isinstance(value, str):
        path = kind(value)
        return moved[1] / path.relative_to(moved[0]) if moved is not None and path.is_relative_to(moved[0]) else path
    raise TypeError(f"a {kind.__name__} does not travel")


_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WorkbenchError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMessage:
    """A request to a rank.  function: a name in the table.  context: without its channel.  payload: encoded."""

    function: str
    context: RankContext
    payload: bytes


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
