"""The messages of torchrun's ranks, sealed, in torchrun's key-value store; and the ranks' signs of life there."""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from workbench.core.errors import RuntimeSetupError, WorkbenchError
from workbench.runtime.context import Channel
from workbench.runtime.messages import Call, decode, encode

SILENT_S = 60.0
"""A process that is silent for this long is given up."""

_PULSE_S = 1.0
_LISTEN_S = 0.1


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

    def send(self, event: Any) -> None:
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
