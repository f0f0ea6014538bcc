"""The context of a job function on its engine: its rank, its peers, how to report progress and when to stop."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import zmq

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import RuntimeSetupError

STOP_FILE = "stop"
DEVICES = "devices"
"""Subfolder of a run folder that holds each emulated device's disk."""


class Channel(Protocol):
    """Connects a rank to the process that leads the run."""

    def send(self, kind: str, event: Any) -> None:
        """Send one progress event."""

    def silent_peers(self) -> Sequence[int]:
        """Return the ranks known to be silent.  Empty where the parent process watches the engines and ends the job."""
        return ()

    def store(self) -> Any:
        """Return the torch.distributed.Store for the rendezvous.  None if the ranks share a folder or torchrun provides one."""
        return None

    def listen(self, address: str, take: Callable[[Any], None]) -> Callable[[], None]:
        """Pass every command to `take`, in another thread.  Returns a function that stops listening."""
        raise RuntimeSetupError("A rank was to take commands.", "It does one job as one of all ranks.", "Start its devices from here.")


class EventChannel(Channel):
    """The engine's end of the progress channel to the parent (zmq PUSH).  It is thread safe and never blocks."""

    def __init__(self, address: str, rank: int, generation: int) -> None:
        self._rank = rank
        self._generation = generation
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = 1000  # ms; a parent that has exited must not block us
        self._socket.sndhwm = 100_000  # messages
        self._socket.connect(address)

    def send(self, kind: str, event: Any) -> None:
        """Send one event.  It is dropped if the parent cannot keep up."""
        message = pickle.dumps((self._rank, self._generation, kind, event))
        with self._lock:
            if self._socket.closed:
                return
            try:
                self._socket.send(message, zmq.DONTWAIT)
            except zmq.Again:
                return

    def listen(self, address: str, take: Callable[[Any], None]) -> Callable[[], None]:
        """Listen on the parent's command socket."""
        context, over = zmq.Context(), threading.Event()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IDENTITY, listener_name(self._rank, self._generation))
        socket.connect(address)

        def hear() -> None:
            while not over.is_set():
                if socket.poll(100):
                    take(pickle.loads(socket.recv()))

        thread = threading.Thread(target=hear, name="commands", daemon=True)
        thread.start()

        def stop() -> None:
            over.set()
            thread.join()
            socket.close()
            context.term()

        return stop

    def close(self) -> None:
        """Send the remaining events and close."""
        with self._lock:
            self._socket.close()
        self._context.term()


def listener_name(rank: int, generation: int) -> bytes:
    """Return the name under which a rank's job listens for commands."""
    return f"{rank}-{generation}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The context of one rank in a run.

    interface, address: where gloo binds ('' lets gloo choose).  rendezvous: a folder that is new in every run and the same for all
    ranks ('' under torchrun, whose environment provides the rendezvous).  generation: number of the run.
    clock_offset_s: added to this rank's monotonic clock, it gives rank 0's clock.  local_folder: where this rank stores large private
    files ('' uses the job's folder).  dilation: all emulated devices and links run this many times slower, so that this machine can
    keep up; reported times are in emulated seconds (`now_s`).
    """

    rank: int
    world_size: int
    device: Device
    cluster: Cluster
    fidelity: Literal["kernel", "paced", "real"]
    interface: str = ""
    address: str = ""
    rendezvous: str = ""
    generation: int = 0
    clock_offset_s: float = 0.0
    local_folder: str = ""
    dilation: float = 1.0
    channel: Channel | None = field(default=None, repr=False, compare=False)

    def own_folder(self, shared: Path) -> Path:
        """Return the folder for this device's large private files: on the device's disk, or in the shared folder."""
        name = quote(self.device.name, safe="").replace(".", "%2E")
        return Path(self.local_folder or shared) / DEVICES / name

    def now_s(self) -> float:
        """Return the monotonic clock in emulated seconds."""
        return time.monotonic() / self.dilation

    def publish(self, event: Any) -> None:
        """Send an event to the parent.  Dict events may contain 'epoch' and 'step', which a later DeviceLostError reports."""
        if self.channel is not None:
            self.channel.send("event", event)

    def silent_peers(self) -> Sequence[int]:
        """Return the ranks known to be silent."""
        return () if self.channel is None else self.channel.silent_peers()

    def should_stop(self) -> bool:
        """Return whether the parent wants to end the run early."""
        return bool(self.rendezvous) and os.path.exists(Path(self.rendezvous) / STOP_FILE)


def torchrun_rank() -> tuple[int, int]:
    """Return this process's (rank, world size) under torchrun.  Raises RuntimeSetupError if torchrun did not start it."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise RuntimeSetupError(
            "A rank of torchrun was asked for.", "RANK and WORLD_SIZE are not in the environment.", "Start the program with torchrun."
        ) from None
