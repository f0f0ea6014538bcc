"""The messages between this machine and its devices, each declared once: those of the agents and those of the engines.

A device may be broken, or somebody else's.  Whatever it sends is decoded into one of these types, which state ranges
and largest sizes.
Anything else raises MessageError, and the reader then drops only that device.  No torch is imported.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from workbench.core.errors import MessageError
from workbench.core.serial import NOT_JSON, shown
from workbench.core.units import with_capital
from workbench.runtime.ssh_agent import CHUNK, ENGINE, HEADER, JSON

MIB = 1 << 20
MOST_FRAME_BYTES = CHUNK
LENGTH = struct.Struct(">I")
WORK = "work"
"""A device's copy of the run's folder, in its own run folder."""
KEPT = ("snapshots", "steps")
"""The subfolders of it that are brought to this machine."""
KEPT_NAME = rf"\A(?:{'|'.join(KEPT)})/[\w-][\w.-]{{0,199}}\Z"
FILE_CHUNK = 1 << 18
"""Bytes of a file in one message."""

Number = Annotated[int, Meta(ge=0, le=2**53)]
Pid = Annotated[int, Meta(ge=1, le=2**31)]
Size = Annotated[int, Meta(ge=0, le=2**50)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Place = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
Words = Annotated[str, Meta(max_length=4000)]
"""Text of a device.  It is shown on one line, without control characters (see shown)."""


# From the agent, as JSON.


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's temperature, free memory and what slows it down ('' for nothing), and the resident memory of its
    engine.
    """

    temperature_c: Annotated[float, Meta(ge=-100, le=200)] | None
    throttled: Annotated[str, Meta(pattern=r"\A[a-z ,]{0,100}\Z")]
    free_memory_bytes: Size
    rss_bytes: Size


class Facts(Health, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts for `kit check`.  environment: the folder of the libraries that `kit setup` installed, '' without them.

    torch: its version there, '' without.  has_atomics: whether an ARM processor has the instructions of ARMv8.1, None
    if not known.
    """

    cores: Annotated[int, Meta(ge=1, le=100_000)]
    memory_bytes: Size
    free_disk_bytes: Size
    time_s: Annotated[float, Meta(ge=-1e11, le=1e11)]
    libc: Annotated[str, Meta(pattern=r"\A[\w.-]{0,40}\Z")]
    torch: Annotated[str, Meta(pattern=r"\A[\w.+!-]{0,60}\Z")]
    has_atomics: bool | None
    environment: Annotated[str, Meta(pattern=r"\A(env-[0-9a-f]{1,16})?\Z")]


class Greeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent's first answer.

    run, kit: its folders on the device.  swept: run folders that dead agents had left and that it removed.
    """

    run: Place
    kit: Place
    swept: Number
    python: Annotated[str, Meta(pattern=r"\A[0-9]{1,3}\.[0-9]{1,3}[\w.+]{0,20}\Z")]
    machine: Annotated[str, Meta(pattern=r"\A[\w.-]{1,40}\Z")]


class _AgentMessage(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of an agent."""


class Answer(_AgentMessage, tag="answer", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of an operation.

    found: the result, of the type that ANSWERS names for the operation with this number.
    """

    id: Number
    found: msgspec.Raw


class Refusal(_AgentMessage, tag="refusal", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent refuses an operation.  todo: the remedy; '' if this machine knows it."""

    id: Number
    error: Words
    todo: Words


class Echo(_AgentMessage, tag="echo", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a ping.  clock_s: the device's monotonic clock.  cpu_s: processor seconds that its engine
    has used.
    """

    id: Number
    clock_s: Seconds
    cpu_s: Seconds
    health: Health | None


class Started(_AgentMessage, tag="started", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine was started."""

    pid: Pid


class EngineEnded(_AgentMessage, tag="ended", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine has ended.  code: its status, minus the signal that killed it.  log: the end of its log."""

    pid: Pid
    code: Annotated[int, Meta(ge=-255, le=255)]
    log: Words


AgentMessage = Answer | Refusal | Echo | Started | EngineEnded
Address = tuple[Annotated[str, Meta(pattern=r"\A[0-9a-fA-F.:]{2,45}(%\w{1,15})?\Z")], Port]
ANSWERS: Mapping[str, Any] = {
    "hello": Greeting,
    "facts": Facts,
    "has": Size | None,
    "begin_file": Literal[True],
    "start": Pid,
    "signal_engine": None,
    "expose": Address,
    "reach": Port,
    "holds": bool,
    "unpack": Place,
    "tries": None,
    "empty": None,
    "clean": bool,
}
"""For each operation of the agent: what it answers."""


def read_frame(read: Callable[[int], bytes]) -> tuple[int, bytes] | None:
    """Return the kind and the payload of an agent's next frame; None at the end of the stream.

    Raises EOFError if the stream ends within a frame, MessageError for a frame that no agent sends, before its payload
    is read.
    """
    header = read(HEADER.size)
    if not header:
        return None
    if len(header) < HEADER.size:
        raise EOFError
    length, kind = HEADER.unpack(header)
    if kind not in (JSON, ENGINE):
        raise foreign("an agent's frame", f"its kind is {kind}")
    if length > MOST_FRAME_BYTES:
        raise foreign("an agent's frame", f"it has {length:,} bytes, at most {MOST_FRAME_BYTES:,} are allowed")
    payload = read(length)
    if len(payload) < length:
        raise EOFError
    return kind, payload


_noted: set[Any] = set()
_noting = threading.Lock()


def _note_fields(kind: Any) -> None:
    """Let msgspec note a type's fields, in one thread at a time.

    It notes a class's fields when it first meets the class, and ends the process if two threads do that at once.
    """
    with _noting:
        if kind not in _noted:
            msgspec.msgpack.Decoder(kind)
            _noted.add(kind)


def decode_json(data: bytes | msgspec.Raw, kind: Any, expected: str) -> Any:
    """Decode an agent's JSON.  Raises MessageError, which names `expected`."""
    try:
        _note_fields(kind)
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise foreign(expected, str(error)) from error


def foreign(expected: str, why: str) -> MessageError:
    """Return the error for bytes that are not what the message should hold (`expected`)."""
    return MessageError(
        f"{with_capital(expected)} was expected.",
        f"What came is something else than {expected[:1].lower()}{expected[1:]}: {shown(why, 200)}.",
        "Start the same version of the workbench on every device, and let nobody else take part.",
    )


# To and from the engine, as msgpack.


Kind = Literal["hello", "call", "command", "stop", "reply", "ready", "event", "answer", "store", "file"]


class Message(NamedTuple):
    """A message between this machine and an engine.  number: the number of the run, or of a request to the store."""

    kind: Kind
    number: Number
    data: bytes

    def framed(self) -> bytes:
        """Return the message as bytes for the stream."""
        data = msgspec.msgpack.encode(self)
        return LENGTH.pack(len(data)) + data


FROM_ENGINE: Mapping[str, int | None] = {
    "ready": 100,
    "store": 8 * MIB,
    "file": FILE_CHUNK + 1000,
    "event": None,
    "answer": None,
}
"""The kinds of messages that an engine sends, each with the most bytes of its data; None: as many as a message may
have."""
TO_ENGINE: Mapping[str, int | None] = {"hello": 4096, "call": None, "command": None, "stop": 0, "reply": 8 * MIB}


class Messages:
    """Cuts a stream of bytes into messages.

    kinds: the kinds that are allowed.  most_bytes: the largest size of a message, and so the memory that it may take.
    """

    def __init__(self, kinds: Mapping[str, int | None], most_bytes: int) -> None:
        self._kinds, self.most_bytes = kinds, most_bytes
        self._buffer = bytearray()

    def of(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take more bytes and yield the messages that are now complete.  Raises MessageError."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            length = LENGTH.unpack_from(self._buffer)[0]
            if length > self.most_bytes:
                raise foreign(_MESSAGE, f"it has {length:,} bytes, at most {self.most_bytes:,} are allowed")
            if len(self._buffer) < LENGTH.size + length:
                return
            message = decode_packed(bytes(self._buffer[LENGTH.size : LENGTH.size + length]), Message, _MESSAGE)
            del self._buffer[: LENGTH.size + length]
            most = self._kinds.get(message.kind, 0)
            if message.kind not in self._kinds or (most is not None and len(message.data) > most):
                raise foreign(_MESSAGE, f"'{message.kind}' with {len(message.data):,} bytes")
            yield message


_MESSAGE = "A message between laptop and device"


def decode_packed(data: bytes, kind: Any, expected: str, hook: Callable[[type, Any], Any] | None = None) -> Any:
    """Decode msgpack as a value of the type `kind`.  Raises MessageError, which names `expected`.

    hook: converts values of types that msgpack does not have.
    """
    try:
        _note_fields(kind)
        return msgspec.msgpack.decode(data, type=kind, dec_hook=hook)
    except Exception as error:  # the bytes may come from anybody; decoding them never runs code
        raise foreign(expected, str(error)) from error


class Asked(NamedTuple):
    """A request to the store on the laptop, for one key ('set', 'get') or several ('wait', 'check').

    'fetch' is for the laptop itself: it sends the weight files that the keys name; the reply is an error message, or
    b''.
    """

    operation: Literal["set", "wait", "get", "check", "fetch"]
    keys: Annotated[tuple[Annotated[str, Meta(max_length=500)], ...], Meta(min_length=1, max_length=20_000)]
    value: Annotated[bytes, Meta(max_length=MIB)] = b""


class FilePart(NamedTuple):
    """Bytes of a file in the run's folder, from `offset` on.

    is_last: whether the file is then complete; always true for a log, which only grows.
    """

    path: Annotated[str, Meta(pattern=KEPT_NAME)]
    offset: Size
    data: Annotated[bytes, Meta(max_length=FILE_CHUNK)]
    is_last: bool
