"""Use the ranks that torchrun started as devices: each runs the same engine as any other device, and rank 0 also leads.

Frames travel as bytes through one gloo group of all ranks, separate from the groups that runs form.  Messages are
decoded into declared types with limits, and a rank calls only functions of its table.  torchrun's key-value store has
no authentication and may listen on all interfaces, so it holds nothing but gloo's addresses of that one group.  With
the same WORKBENCH_SECRET in every rank's environment, an intruder is refused before the first frame.  Neither frames
nor tensors are encrypted.

A rank that is lost ends the run, with an error that names it: torchrun ends or restarts all ranks, and `--resume`
continues the run.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, DeviceLostError, MessageError, RuntimeSetupError
from workbench.core.threads import in_background
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines
from workbench.runtime.engine_session import PipeSlot
from workbench.runtime.frames import FILE_CHUNK, foreign
from workbench.runtime.messages import CallTable
from workbench.runtime.pipe_engine import Engine, interface_at

BEAT_S, SILENT_S = 5.0, 60.0
"""An idle rank sends a sign of life after some seconds; one that is silent for longer is lost."""
LOADING_S = 300.0
"""How long a rank waits for a silent one, which may need this time to load its layers.  A lost connection is detected
at once."""
_END_S = 10.0
_CLOCK_ROUNDS = 10
_END = -1
"""Sent instead of the size of what follows."""


class Peer:
    """Another rank in the gloo group of all ranks.  A rank that does not take or send for SILENT_S raises
    RuntimeError.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor, and wait until the other rank takes it."""
        self._group.send([tensor], self._rank, 0).wait(timedelta(seconds=SILENT_S))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for the values of a tensor of this shape and type, and return it."""
        self._group.recv([tensor], self._rank, 0).wait(timedelta(seconds=SILENT_S))
        return tensor


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Line:
    """Forwards the bytes of a socket to another rank, and that rank's bytes into the socket.

    lost(why): called if the other rank is gone or silent.
    """

    def __init__(self, group: Any, peer: int, end: socket.socket, lost: Callable[[str], None]) -> None:
        self._peer, self._end, self._lost = Peer(group, peer), end, lost
        self._threads = [in_background(work) for work in (self._send, self._receive)]

    def join(self) -> None:
        """Wait until both sides have ended, for a while; close the socket."""
        for thread in self._threads:
            thread.join(_END_S)
        self._end.close()

    def _send(self) -> None:
        with suppress(RuntimeError, OSError):  # the receiving thread reports why
            size = 0
            while size != _END:
                waiting = select.select([self._end], [], [], BEAT_S)[0]
                data = self._end.recv(FILE_CHUNK) if waiting else b""
                size = _END if waiting and not data else len(data)
                self._peer.send(torch.tensor([size]))
                if data:
                    self._peer.send(_as_tensor(data))

    def _receive(self) -> None:
        try:
            while (size := int(self._peer.receive(torch.zeros(1, dtype=torch.int64)))) != _END:
                if not 0 <= size <= FILE_CHUNK:
                    raise foreign("a part of a frame", f"it has {size:,} bytes, at most {FILE_CHUNK:,} are allowed")
                if size:  # otherwise a sign of life
                    self._end.sendall(self._peer.receive(torch.empty(size, dtype=torch.uint8)).numpy())
        except MessageError as error:
            self._lost(error.found)
        except (RuntimeError, OSError) as error:
            silent = "imed out" in str(error)
            self._lost(f"It showed no sign of life for {SILENT_S:g} s." if silent else "Its process has ended.")
        finally:
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)


class RankSlot(PipeSlot):
    """A rank of torchrun.  This process cannot start, end or restart it."""

    def open(self) -> None:
        """Do nothing, because torchrun has started the engine."""

    def wait(self) -> None:
        """Wait for the engine.  Raises DeviceLostError."""
        if not self.ready.wait(LOADING_S):
            self.lost(f"Its engine did not come up within {LOADING_S:g} s.")
        self.look()

    def kill(self) -> None:
        """Give the rank up."""
        self.lost("It was given up: it gave no sign of life.")

    def freeze(self) -> None:
        """Do nothing, because no faults are injected here."""

    def look(self) -> None:
        """Raise DeviceLostError if the rank is lost."""
        if self.why:
            request = f"Device '{self.device.name}' (rank {self.rank}) was in a run."
            raise DeviceLostError(
                request, f"It is lost. {self.why}", "See its own output; start all ranks again, with --resume."
            )

    def lost(self, why: str) -> None:
        """Record that the rank is lost; may be called from any thread."""
        self._gone(why, why)

    def _gone(self, why: str, reason: str | None) -> None:
        if not self.why:  # the first reason is the cause
            super()._gone(why, reason)


class TorchrunEngines(Engines):
    """All ranks of a torchrun job.

    rank 0: call `lead`, then use them as any other engines, then `end`.  Other ranks: call `serve`.  calls: the
    functions that may be run.
    local_folder: where each rank stores large private files ('' uses the job's folder).
    """

    fidelity = "real"
    loses_devices = False
    silence_s = SILENT_S
    timeout_s = LOADING_S

    def __init__(self, rank: int, world_size: int, group: Any, calls: CallTable) -> None:
        self.rank, self.world_size = rank, world_size
        self._group, self.table = group, calls
        self._lines: list[Line] = []
        self.slots: list[RankSlot] = []
        self._local_folder = ""
        peers = range(1, world_size) if rank == 0 else (0,)
        self._offsets_s = {peer: _met(Peer(group, peer), rank, peer) for peer in peers}

    @classmethod
    def join(cls, calls: CallTable, timeout_s: float = 60.0) -> TorchrunEngines:
        """Connect this process to its job.  Raises RuntimeSetupError if torchrun did not start it, or if the other
        ranks cannot be reached.
        """
        rank, world_size = torchrun_rank()
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        if interface := _interface_towards(address):
            # gloo then does not guess an interface from the host's name, and listens on no other interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            listening: dict[str, Any] = {}
            if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # Our socket listens only at that address; torch's own would listen at every address of the machine.
                listening = {"is_master": True, "master_listen_fd": socket.create_server((address, port)).detach()}
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(address, port, world_size, timeout=timeout, wait_for_workers=False, **listening)
            prefix = f"workbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, world_size, timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise RuntimeSetupError(
                f"Rank {rank} of {world_size} tried to reach the others through rank 0 at {address}:{port}.",
                f"{str(error).splitlines()[0]}.",
                "Check --master-addr and the network between the machines.",
            ) from error
        return cls(rank, world_size, group, calls)

    def lead(self, cluster: Cluster, local_folder: str = "") -> None:
        """Give each rank a device of a cluster (rank 0).  Raises ConfigError if the numbers of ranks and devices
        differ.
        """
        if cluster.world_size != self.world_size:
            raise ConfigError(
                f"Cluster '{cluster.name}' with {cluster.in_words} was asked for.",
                f"torchrun started {self.world_size} processes.",
                "Describe one device for each process (--nnodes times --nproc-per-node).",
            )
        super().__init__(cluster)
        self._local_folder = local_folder
        for rank, device in enumerate(cluster.devices):
            slot, (ours, theirs) = RankSlot(rank, device, self.inbox), socket.socketpair()
            slot.connect(ours)
            self.slots.append(slot)
            if rank == 0:
                in_background(self._work, theirs, name="rank 0's engine")
            else:
                self._lines.append(Line(self._group, rank, theirs, slot.lost))

    def _work(self, end: socket.socket) -> None:
        """Run rank 0's engine until the connection closes."""
        with end:
            Engine(self.table, end.fileno(), end.fileno(), Engine.finish).work()

    def serve(self) -> None:
        """Serve as a device until rank 0 ends (all ranks but 0).  Ends this process if rank 0 is lost, or ends during a
        job.
        """
        ours, theirs = socket.socketpair()

        def lost(why: str) -> None:
            error = DeviceLostError(
                f"Rank {self.rank} did what rank 0 asks for.", f"Rank 0 is lost. {why}", "See its own output."
            )
            sys.stderr.write(f"{error}\n")
            os._exit(1)

        def ended(engine: Engine) -> None:
            if engine.is_busy:
                os._exit(1)
            engine.finish()

        engine = Engine(self.table, ours.fileno(), ours.fileno(), ended)
        line = Line(self._group, 0, theirs, lost)
        with ours:
            engine.work()
            ours.shutdown(socket.SHUT_WR)
        line.join()

    def end(self) -> None:
        """Make the other ranks return from `serve` (rank 0)."""
        for slot in self.slots:
            slot.close()
        for line in self._lines:
            line.join()

    def context(self, rank: int) -> RankContext:
        """Return the context of a rank's next job."""
        return RankContext(
            rank=rank,
            world_size=self.world_size,
            device=self.cluster.devices[rank],
            cluster=self.cluster,
            fidelity="real",
            generation=self.number,
            clock_offset_s=self._offsets_s.get(rank, 0.0),
            local_folder=self._local_folder,
        )

    def now_s(self) -> float:
        """Return the monotonic clock of rank 0."""
        return time.monotonic()

    def _prepare(self) -> None:
        for slot in self.slots:
            slot.wait()

    def _finish(self, busy: Sequence[int]) -> None:
        for rank in busy:
            self.slots[rank].lost("It did not end its job.")

    def _give_up(self) -> None:
        """Continue with the same processes, because this process cannot start others."""


def torchrun_rank() -> tuple[int, int]:
    """Return this process's (rank, world size) under torchrun.  Raises RuntimeSetupError if torchrun did not
    start it.
    """
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise RuntimeSetupError(
            "A rank of torchrun was asked for.",
            "RANK and WORLD_SIZE are not in the environment.",
            "Start the program with torchrun.",
        ) from None


def _met(other: Peer, rank: int, peer: int) -> float:
    """Meet another rank; one of the two is rank 0.  Check that the other knows the secret, and compare clocks.

    Return, on rank 0, the offset from the other's monotonic clock to rank 0's, in seconds, from the fastest of several
    round trips.
    Raises RuntimeSetupError.
    """

    def exchanged(content: bytes) -> bytes:
        received = torch.empty(len(content), dtype=torch.uint8)
        if rank:
            other.receive(received)
        other.send(_as_tensor(content))
        if not rank:
            other.receive(received)
        return received.numpy().tobytes()

    secret = os.environ.get("WORKBENCH_SECRET", "").encode()
    mine = secrets.token_bytes(32)
    yours = exchanged(mine)
    answer = exchanged(hmac.digest(secret, f"rank {rank}/".encode() + yours, "sha256"))
    if not hmac.compare_digest(answer, hmac.digest(secret, f"rank {peer}/".encode() + mine, "sha256")):
        request = f"Rank {rank} met rank {peer}."
        raise RuntimeSetupError(
            request, "It does not know this run's secret.", "Set the same WORKBENCH_SECRET on every device."
        )
    clock, offset_s, shortest_s = torch.zeros(1, dtype=torch.float64), 0.0, float("inf")
    for _ in range(_CLOCK_ROUNDS):
        if rank:
            other.receive(clock)
            other.send(clock.fill_(time.monotonic()))
            continue
        begin_s = time.monotonic()
        other.send(clock)
        other.receive(clock)
        end_s = time.monotonic()
        if end_s - begin_s < shortest_s:
            shortest_s, offset_s = end_s - begin_s, (begin_s + end_s) / 2 - clock.item()
    return offset_s


def sees_file(context: RankContext, path: Path) -> bool:
    """Return whether this rank can see a file written by rank 0.  A network folder may show it with a delay."""
    deadline_s = time.monotonic() + 5.0
    while not path.is_file():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def remove_own_files(context: RankContext, payload: None) -> None:
    """Remove this rank's files from its local folder."""
    folder = context.own_folder(Path(context.local_folder))
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # only the last rank of a machine finds them empty
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _interface_towards(address: str) -> str:
    """Return the network interface from which this machine reaches an address, '' if unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return interface_at(probe.getsockname()[0])
    return ""
