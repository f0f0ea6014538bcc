"""Ranks that torchrun started, on one machine or several, in the place of emulated engines: rank 0 calls, the others serve.

Calls, answers and live events go through torchrun's own key-value store; tensors go through gloo. Neither is encrypted, and
calls, answers and events are pickled: only for a network that is trusted.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError
from workbench.runtime.context import RankContext, torchrun_rank
from workbench.runtime.failures import error_of, root_cause
from workbench.runtime.jobs import Outcome, pickled_error
from workbench.runtime.memory import lift_all_budgets
from workbench.runtime.process_group import close_group, group

_POLL_S = 0.05
_GRACE_S = 5.0
"""After the first failure the other ranks get this long to tell theirs, which may be the cause."""
_CLOCK_ROUNDS = 10
_CALL_END = b""


class StoreChannel:
    """A rank's end of the live events: each is a key of its own, which rank 0 takes away."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank, self._count = store, rank, 0
        self._lock = threading.Lock()

    def send(self, kind: str, event: Any) -> None:
        """Send an event."""
        with self._lock:
            self._store.set(_event_key(self._rank, self._count), pickle.dumps(event))
            self._count += 1


class TorchrunEngines:
    """All ranks of a torchrun job; what EngineCluster is for emulated devices.

    rank 0: `run` as often as wanted, then `end`.  Every other rank: `serve`.
    cluster: known on rank 0 only.  local_folder: where each rank keeps large files of its own ('' in the job's folder).
    """

    fidelity: Literal["real"] = "real"

    def __init__(self, rank: int, world_size: int, connect: Callable[[], dist.Store]) -> None:
        self.rank, self.world_size = rank, world_size
        self.cluster: Cluster | None = None
        self.local_folder = ""
        self._connect = connect
        self._store = connect()
        self._generation = 0
        self._clock_offsets_s = (0.0,) * world_size

    @classmethod
    def join(cls, timeout_s: float = 60.0) -> TorchrunEngines:
        """Return this process's end.  Raises RuntimeSetupError where torchrun did not start it, or its store cannot be reached."""
        rank, world_size = torchrun_rank()
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        if address in ("localhost", "127.0.0.1", "::1") and os.path.isdir("/sys/class/net/lo"):
            # All ranks are here: then gloo need not guess an interface from the host's name, and listens to nobody else.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        prefix = f"workbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        hosts = [rank == 0 and not agent]  # the first connection may have to open the store

        def connect() -> dist.Store:
            is_master = hosts.pop(0) if hosts else False
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(address, int(port), world_size, is_master=is_master, timeout=timeout, wait_for_workers=False)
            return dist.PrefixStore(prefix, store)

        try:
            engines = cls(rank, world_size, connect)
        except (RuntimeError, ValueError) as error:
            raise RuntimeSetupError(
                f"Rank {rank} of {world_size} tried to reach rank 0 at {address}:{port}.",
                f"{str(error).splitlines()[0]}.",
                "Check --master-addr and the network between the machines.",
            ) from error
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # process groups shall use the store that there is now
        return engines

    def lead(self, cluster: Cluster, local_folder: str = "") -> None:
        """Make rank 0 ready to call: say which devices the ranks are, and lay their clocks beside each other.

        Raises ConfigError if there are not as many devices as ranks.
        """
        if cluster.world_size != self.world_size:
            raise ConfigError(
                f"Cluster '{cluster.name}' with {cluster.world_size} devices was asked for.",
                f"torchrun started {self.world_size} processes.",
                "Describe one device for each process (--nnodes times --nproc-per-node).",
            )
        self.cluster, self.local_folder = cluster, local_folder
        self._clock_offsets_s = tuple(self.run(measure_clock_offset, [None] * self.world_size))

    def run(
        self, function: Callable[[Any, Any], Any], payloads: Sequence[Any], *, on_event: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Run function(context, payloads[rank]) on every rank at once; return the results by rank.

        function: of a module that every rank can import.  on_event(rank, event): called by another thread.
        Raises the error of the rank that explains the others', with the device named, or DeviceLostError if a rank does not answer.
        """
        cluster = self.cluster
        assert cluster is not None and self.rank == 0, "only rank 0 calls, after lead()"
        assert len(payloads) == self.world_size
        self._generation += 1
        store = self._calls()
        contexts = [
            RankContext(
                rank=rank,
                world_size=self.world_size,
                device=device,
                cluster=cluster,
                fidelity="real",
                generation=self._generation,
                clock_offset_s=self._clock_offsets_s[rank],
                local_folder=self.local_folder,
            )
            for rank, device in enumerate(cluster.devices)
        ]
        store.set("call", pickle.dumps((function, contexts, list(payloads))))
        listener = _Listener(self._calls(self._connect()), self.world_size, on_event) if on_event is not None else None
        try:
            answers = {0: _answer(store, function, contexts[0], payloads[0])}
            self._collect(store, answers)
        finally:
            if listener is not None:
                listener.finish()
        names = [device.name for device in cluster.devices]
        outcomes = {rank: pickle.loads(answer) for rank, answer in answers.items()}
        failures = {rank: error_of(outcome, names[rank]) for rank, outcome in outcomes.items() if outcome.error is not None}
        silent = [name for rank, name in enumerate(names) if rank not in outcomes]
        if failures:
            raise failures[root_cause(failures)]
        if silent:
            raise DeviceLostError(
                f"Device '{silent[0]}' was running {getattr(function, '__name__', 'the job')}.",
                "It did not answer.",
                "See its own output; run again.",
            )
        return [outcomes[rank].result for rank in range(self.world_size)]

    def serve(self) -> None:
        """Answer rank 0's calls until it ends them (every rank but 0).  Raises DeviceLostError if rank 0 has gone."""
        while True:
            self._generation += 1
            store = self._calls()
            try:
                while not store.check(["call"]):
                    time.sleep(_POLL_S)
                call = store.get("call")
            except (RuntimeError, ConnectionError) as error:
                raise DeviceLostError(f"Rank {self.rank} waited for rank 0's calls.", "Rank 0 has gone.", "See its own output.") from error
            if call == _CALL_END:
                return
            function, contexts, payloads = pickle.loads(call)
            store.set(f"answer/{self.rank}", _answer(store, function, contexts[self.rank], payloads[self.rank]))

    def end(self) -> None:
        """Let the other ranks return from `serve` (rank 0)."""
        self._generation += 1
        self._calls().set("call", _CALL_END)
        time.sleep(4 * _POLL_S)  # where rank 0 holds the store, the others must have read this before it goes

    def _calls(self, store: dist.Store | None = None) -> dist.Store:
        """Return the keys of the call that is on now."""
        return dist.PrefixStore(str(self._generation), store or self._store)

    def _collect(self, store: dist.Store, answers: dict[int, bytes]) -> None:
        """Take the other ranks' answers; once one has failed, the rest has a little time left."""
        deadline_s = None
        while len(answers) < self.world_size:
            for rank in range(self.world_size):
                if rank not in answers and store.check([f"answer/{rank}"]):
                    answers[rank] = store.get(f"answer/{rank}")
            if deadline_s is None and any(pickle.loads(answer).error is not None for answer in answers.values()):
                deadline_s = time.monotonic() + _GRACE_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)


class _Listener:
    """Takes the ranks' events out of the store, in a thread of its own with a connection of its own."""

    def __init__(self, store: dist.Store, world_size: int, on_event: Callable[[int, Any], None]) -> None:
        self._store, self._on_event = store, on_event
        self._next = [0] * world_size
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="torchrun events", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Take what is left and end."""
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        with suppress(RuntimeError):  # a store that has gone; the caller finds out by itself
            while not self._over.wait(2 * _POLL_S):
                self._take()
            self._take()

    def _take(self) -> None:
        for rank in range(len(self._next)):
            while self._store.check([key := _event_key(rank, self._next[rank])]):
                event = pickle.loads(self._store.get(key))
                self._store.delete_key(key)
                self._next[rank] += 1
                self._on_event(rank, event)


def measure_clock_offset(context: RankContext, payload: None) -> float:
    """Return what must be added to this rank's monotonic clock to get rank 0's, in seconds: from the fastest of some round trips."""
    offset_s, shortest_s = 0.0, float("inf")
    clock = torch.zeros(1, dtype=torch.float64)
    with group(context, 60.0, "clock"):
        for peer in range(1, context.world_size):
            for _ in range(_CLOCK_ROUNDS):
                if context.rank == peer:
                    begin_s = time.monotonic()
                    dist.send(clock, 0)
                    dist.recv(clock, 0)
                    end_s = time.monotonic()
                    if end_s - begin_s < shortest_s:
                        shortest_s, offset_s = end_s - begin_s, clock.item() - (begin_s + end_s) / 2
                elif context.rank == 0:
                    dist.recv(clock, peer)
                    clock.fill_(time.monotonic())
                    dist.send(clock, peer)
    return offset_s


def sees_file(context: RankContext, path: Path, patience_s: float = 5.0) -> bool:
    """Return whether this rank sees a file that rank 0 wrote; a network folder may show it a little later."""
    deadline_s = time.monotonic() + patience_s
    while not path.is_file():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _answer(store: dist.Store, function: Callable[[Any, Any], Any], context: RankContext, payload: Any) -> bytes:
    """Run the function here and return its pickled Outcome."""
    try:
        result = function(replace(context, channel=StoreChannel(store, context.rank)), payload)
        return pickle.dumps(Outcome(rank=context.rank, result=result))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # told to rank 0, which chooses the cause among all ranks'
        return pickled_error(context.rank, error)
    finally:
        lift_all_budgets()
        close_group()


def _event_key(rank: int, number: int) -> str:
    return f"event/{rank}/{number}"
