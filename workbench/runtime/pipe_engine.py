"""A device's engine, emulated or real: it serves calls from stdin, and sends events and results to stdout.

An emulated device shares the laptop's file system.  A real one sends the files that it writes into the run's folder to
the laptop along with its events, so that the two share nothing but this connection.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from workbench import __version__
from workbench.assets.fetch import cache_folder
from workbench.core.errors import MissingDataError, RuntimeSetupError
from workbench.core.schedule import paused_collector
from workbench.core.threads import in_background
from workbench.models.stored_tensors import MISSING_WEIGHTS
from workbench.runtime import commands as c
from workbench.runtime.context import Channel, RankContext
from workbench.runtime.frames import (
    FILE_CHUNK,
    KEPT,
    KEPT_NAME,
    TO_ENGINE,
    WORK,
    Asked,
    FilePart,
    Kind,
    Message,
    Messages,
)
from workbench.runtime.health import Health
from workbench.runtime.memory import lift_all_budgets, read_memory
from workbench.runtime.messages import (
    AnswerMessage,
    Call,
    CallMessage,
    CallTable,
    Moved,
    decode,
    decode_message,
    encode,
    encode_message,
    is_ping,
)
from workbench.runtime.process_group import close_group

_MOST_MESSAGE_BYTES = 1 << 32
"""This machine's commands are the user's own: a job may hold any data."""
_SWITCH_S = 2e-4
"""For how long a thread of Python goes on while others wait.  The default, 5 ms, is as long as a short operation."""


class ChannelStore(dist.Store):
    """The leading process's torch.distributed.Store, reached through the engine's own pipes: no port, no pickling. gloo
    uses set, wait and get; the roll call before it uses check.
    """

    def __init__(self, ask: Callable[[Asked, float | None], bytes]) -> None:
        super().__init__()
        self._ask, self._timeout_s = ask, 300.0

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of `get` and `wait`."""
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(Asked("set", (key,), value.encode() if isinstance(value, str) else bytes(value)), None)

    def get(self, key: str) -> bytes:
        """Return a key's value once it has one."""
        return self._ask(Asked("get", (key,)), self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._ask(Asked("wait", tuple(keys)), self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask(Asked("check", tuple(keys)), None))


class _Upward:
    """Sends the files that a rank has written into the run's folder since the last time."""

    def __init__(self, folder: Path, send: Callable[[Kind, bytes], None]) -> None:
        self._folder, self._send = folder, send
        self._sent: dict[str, tuple[int, int]] = {}
        self.forget()

    def forget(self) -> None:
        """Mark the existing files as already sent."""
        self._sent = {name: self._state(name) for name in self._files_in(KEPT)}

    def _files_in(self, places: tuple[str, ...]) -> list[str]:
        names = [f"{place}/{path.name}" for place in places for path in sorted((self._folder / place).glob("*"))]
        return [name for name in names if re.match(KEPT_NAME, name) and not name.endswith(".part")]

    def _state(self, name: str) -> tuple[int, int]:
        status = (self._folder / name).stat()
        return status.st_size, status.st_mtime_ns

    def logs(self) -> None:
        """Send the step log and the snapshots taken at the end of epochs."""
        for name in self._files_in(("steps",)):
            begin, size = self._sent.get(name, (0, 0))[0], self._state(name)[0]
            if size < begin:
                begin = 0
            if size > begin or name not in self._sent:  # an empty log is sent, too
                self._sent[name] = (self._send_from(name, begin), 0)
        self._snapshots("-step-0-")

    def everything(self) -> None:
        """Send all new files."""
        self.logs()
        self._snapshots("")

    def _snapshots(self, part: str) -> None:
        """Send the files whose names have a part."""
        for name in (name for name in self._files_in(("snapshots",)) if part in name):
            with suppress(FileNotFoundError):  # one that is no longer needed
                state = self._state(name)
                if state != self._sent.get(name):
                    self._send_from(name, 0)
                    self._sent[name] = state

    def _send_from(self, name: str, offset: int) -> int:
        """Send a file's bytes from an offset on, at least one message, and return where they end."""
        with open(self._folder / name, "rb") as file:
            file.seek(offset)
            data = file.read(FILE_CHUNK)
            while True:
                following = file.read(FILE_CHUNK)
                self._send("file", encode(FilePart(name, offset, data, not following)))
                offset += len(data)
                if not following:
                    return offset
                data = following


class PipeChannel(Channel):
    """Connects a job to the leading process.

    call: the called function.  context: the job's context.
    moved: the run's folder there and here; None if both are the same.
    """

    def __init__(self, engine: Engine, number: int, call: Call, context: RankContext, moved: Moved | None) -> None:
        self._engine, self._number, self._call, self._context, self._moved = engine, number, call, context, moved
        self._footprint_bytes = read_memory().anonymous_bytes
        self._lock, self._arriving = threading.Lock(), threading.Lock()
        self.upward = None if moved is None else _Upward(Path(moved[1]), engine.send)
        self._take: Callable[[Any], None] | None = None
        self._early: list[Any] = []

    def send(self, event: Any) -> None:
        """Send the files that an event refers to, and then the event."""
        with self._lock:
            if self.upward is not None and isinstance(event, c.StepDone):
                self.upward.logs()
            elif self.upward is not None and isinstance(event, c.Ended):
                self.upward.everything()
            self._engine.send("event", encode_message(event), self._number)

    def store(self) -> ChannelStore:
        """Return the store of the process that leads."""
        return self._engine.store

    def should_stop(self) -> bool:
        """Return whether this job has to end early."""
        return self._engine.stopped >= self._number

    def listen(self, take: Callable[[Any], None]) -> None:
        """Pass every command to `take`, in the reading thread."""
        with self._arriving:
            self._take = take
            for command in self._early:
                self._hand_on(command)
            self._early.clear()

    def command(self, data: bytes) -> None:
        """Handle a command.  Pings are answered here, even while the job is busy."""
        if is_ping(data):
            self._engine.send(
                "event", encode_message(self._engine.health.reply(self._context, self._footprint_bytes)), self._number
            )
            return
        command = decode_message(data, self._call, f"A command for {self._call.name}", self._moved)
        with self._arriving:
            if self._take is None:
                self._early.append(command)
            else:
                self._hand_on(command)

    def _hand_on(self, command: Any) -> None:
        assert self._take is not None
        if self.upward is not None and isinstance(command, c.Train):
            self.upward.forget()
        self._take(command)


class Engine:
    """Serves calls from one pipe and replies through another.

    inward, outward: their descriptors.
    ended(engine): called in the reading thread when the pipe has ended.  stopped: number of the last job that was asked
    to end early.
    """

    def __init__(self, table: CallTable, inward: int, outward: int, ended: Callable[[Engine], None]) -> None:
        self._table, self._in, self._out, self._ended = table, inward, outward, ended
        self._writing = threading.Lock()
        self._calls: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: dict[int, queue.SimpleQueue[bytes]] = {}
        self._num_requests, self._fetching = 0, threading.Lock()
        self._channel: PipeChannel | None = None
        self._next: tuple[int, RankContext] | None = None  # the number and context of the last call that came
        self._laptop_folder: Path | None = None
        self.stopped, self.health = -1, Health()
        self.store = ChannelStore(self.ask)  # torch keeps only its C++ half, which does not work without this object

    def send(self, kind: Kind, data: bytes, number: int = 0) -> None:
        """Send a message."""
        frame = memoryview(Message(kind, number, data).framed())
        with self._writing:
            while frame:
                frame = frame[os.write(self._out, frame) :]

    def ask(self, request: Asked, timeout_s: float | None) -> bytes:
        """Send a request to the store and return its reply.  Raises RuntimeError if there is none in time."""
        mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with self._writing:
            self._num_requests += 1
            number = self._num_requests
            self._replies[number] = mine
        self.send("store", encode(request), number)
        try:
            return mine.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(
                f"The store on the laptop had no {', '.join(request.keys)} within {timeout_s:g} s."
            ) from None
        finally:
            self._replies.pop(number, None)

    def fetch(self, paths: Sequence[Path]) -> None:
        """Request missing weight files of a model from the laptop.  Raises MissingDataError."""
        with self._fetching:
            places = tuple(path.relative_to(cache_folder()).as_posix() for path in paths if not path.exists())
            error = self.ask(Asked("fetch", places), None)
        if error:
            raise MissingDataError(
                f"Weights of a model ('{places[0]}') were to be sent to this device.", error.decode(), "Run again."
            )

    def read(self) -> None:
        """Read messages until the pipe closes."""
        messages = Messages(TO_ENGINE, _MOST_MESSAGE_BYTES)
        buffer = memoryview(
            bytearray(FILE_CHUNK)
        )  # once: a job may have used up its memory budget when a message comes
        try:
            while size := os.readv(self._in, [buffer]):
                for message in messages.of(buffer[:size]):
                    self._take(message)
        except Exception:  # any error: without its laptop an engine cannot work
            traceback.print_exc()
        self._ended(self)

    def _take(self, message: Message) -> None:
        channel, waiting = self._channel, self._replies.get(message.number)  # once: the job may end meanwhile
        match message.kind:
            case "hello":
                self._laptop_folder = Path(message.data.decode())
                MISSING_WEIGHTS.fetch = self.fetch
            case "call":
                with suppress(RuntimeSetupError):  # its error is reported when its turn comes
                    self._next = message.number, decode(message.data, CallMessage, "A call").context
                self._calls.put(message)
            case "command" if channel is not None:
                channel.command(message.data)
            case "command" if self._next is not None and is_ping(message.data):
                # The libraries of a call are still being imported, which takes a slow or a busy device half a minute.
                number, context = self._next
                self.send("event", encode_message(self.health.reply(context, read_memory().anonymous_bytes)), number)
            case "stop":
                self.stopped = message.number
            case "reply" if waiting is not None:
                waiting.put(message.data)

    @property
    def is_busy(self) -> bool:
        """Return whether a job is running."""
        return self._channel is not None

    def finish(self) -> None:
        """Let `work` return after the current job."""
        self._calls.put(None)

    def work(self) -> None:
        """Read messages in another thread, and run one call after the other in this one, until `finish` is called."""
        in_background(self.read, name="leader")
        self.send("ready", __version__.encode())
        with paused_collector():  # collections would take a fifth of the imports' time, and find nothing
            # While the leading process prepares the job that needs them.
            for name in os.environ.get("WORKBENCH_IMPORTS", "").split():
                importlib.import_module(name)
        gc.freeze()  # the libraries' hundreds of thousands of objects live as long as the process: none looks at them
        while (message := self._calls.get()) is not None:
            answer = self._answer(message)
            if self._channel is not None and self._channel.upward is not None:
                self._channel.upward.everything()
            self._channel = None  # before the answer: whoever has it may close the pipe at once
            self.send("answer", encode(answer), message.number)

    def _answer(self, message: Message) -> AnswerMessage:
        try:
            call_message = decode(message.data, CallMessage, "A call")
            call = self._table.named(call_message.function)
            moved = None if self._laptop_folder is None else (self._laptop_folder, Path.cwd() / WORK)
            payload = decode(call_message.payload, call.payload, f"What {call.name} is given", moved)
            channel = self._channel = PipeChannel(self, message.number, call, call_message.context, moved)
            context = replace(call_message.context, channel=channel)
            if moved is not None:
                moved[1].mkdir(exist_ok=True)
                context = replace(context, interface=context.interface or _own_interface())
                if context.cluster.data == "wireguard":
                    require_wireguard(context.interface)
            return AnswerMessage(result=encode(call.function(context, payload)))
        except BaseException as error:  # reported to the laptop, which chooses the cause among all devices' errors
            return AnswerMessage.of_error(error)
        finally:
            lift_all_budgets()
            close_group()


def _own_interface() -> str:
    """Return the network interface at whose address the laptop has logged in, or the loopback."""
    ends = os.environ.get("SSH_CONNECTION", "").split()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    return (interface_at(ends[2]) if len(ends) == 4 else "") or loopback


def interface_at(address: str) -> str:
    """Return the network interface of this machine that has an address, '' if none has."""
    every = psutil.net_if_addrs().items()
    return next((name for name, entries in every if any(entry.address == address for entry in entries)), "")


def require_wireguard(interface: str) -> None:
    """Raise RuntimeSetupError unless `interface` is a WireGuard interface, of the kernel (recognised by its type) or
    outside it (a tunnel).
    """
    place = Path("/sys/class/net") / interface
    if "DEVTYPE=wireguard" not in (place / "uevent").read_text() and not (place / "tun_flags").exists():
        raise RuntimeSetupError(
            "Tensors between devices were to travel by WireGuard.",
            f"The laptop reaches this device at its interface '{interface}', which is none of WireGuard.",
            "Write the devices' WireGuard addresses into the kit's file, or leave data out.",
        )


def serve(table: CallTable) -> None:
    """Serve calls until stdin closes.  Other writes to stdout go to the log, and other reads of stdin get nothing."""
    inward, outward = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.setswitchinterval(_SWITCH_S)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(psutil.cpu_count(logical=False) or 1)
    os.environ["WORKBENCH_THREADS"] = str(torch.get_num_threads())  # a device is measured as it runs
    Engine(table, inward, outward, _end_all).work()


def _end_all(engine: Engine) -> None:
    """End this process and all processes that it has started, because an engine cannot work without its laptop."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
