"""Use ranks started by torchrun, on one machine or several, instead of emulated engines: rank 0 calls, the others serve.

Calls, answers and events go through torchrun's key-value store as typed messages (see messages); tensors go through gloo.
Neither is encrypted.  Anyone who can reach rank 0's port can disturb a run, but cannot make a rank run functions outside the table.
With the same WORKBENCH_SECRET in every rank's environment, messages from others are refused.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError, WorkbenchError
from workbench.runtime.context import RankContext, torchrun_rank
from workbench.runtime.jobs import Outcome, error_of, only_peers_blamed, root_cause
from workbench.runtime.memory import lift_all_budgets
from workbench.runtime.messages import AnswerMessage, Call, CallMessage, CallTable, decode, encode
from workbench.runtime.process_group import close_group, group
from workbench.runtime.store_mail import SILENT_S, Listener, Pulse, StoreChannel, StoreMail

_POLL_S = 0.05
_GRACE_S = 5.0
"""After the first failure, the other ranks get this long to report theirs, which may be the cause."""
_CLOCK_ROUNDS = 10


class TorchrunEngines:
    """All ranks of a torchrun job: the counterpart of EngineCluster, which runs emulated devices.

    rank 0: call `run` any number of times, then `end`.  Other ranks: call `serve`.  calls: the functions that may be run.
    cluster: known only on rank 0.  local_folder: where each rank stores large private files ('' uses the job's folder).
    """

    fidelity: Literal["real"] = "real"

    def __init__(self, rank: int, world_size: int, connect: Callable[[], dist.Store], calls: CallTable) -> None:
        self.rank, self.world_size = rank, world_size
        self.cluster: Cluster | None = None
        self.local_folder = ""
        self._connect, self._table = connect, calls
        self._store = connect()
        self._pulse = Pulse(connect, rank, world_size)
        self._generation = 0
        self._clock_offsets_s = (0.0,) * world_size

    @classmethod
    def join(cls, calls: CallTable, timeout_s: float = 60.0) -> TorchrunEngines:
        """Connect this process to its job.  Raises RuntimeSetupError if torchrun did not start it, or its store is unreachable."""
        rank, world_size = torchrun_rank()
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        if interface := _interface_towards(address):
            # gloo then does not guess an interface from the host's name, and listens on no other interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        prefix = f"workbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        hosts = [rank == 0 and not agent]  # the first connection may need to open the store

        def connect() -> dist.Store:
            timeout = timedelta(seconds=timeout_s)
            listening: dict[str, Any] = {}
            if hosts and hosts.pop():
                # Our socket listens only at that address; torch's own would listen at every address of the machine.
                listening = {"is_master": True, "master_listen_fd": socket.create_server((address, int(port))).detach()}
            store = dist.TCPStore(address, int(port), world_size, timeout=timeout, wait_for_workers=False, **listening)
            return dist.PrefixStore(prefix, store)

        try:
            engines = cls(rank, world_size, connect, calls)
        except (RuntimeError, ValueError, OSError) as error:
            raise RuntimeSetupError(
                f"Rank {rank} of {world_size} tried to reach rank 0 at {address}:{port}.",
                f"{str(error).splitlines()[0]}.",
                "Check --master-addr and the network between the machines.",
            ) from error
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # process groups reuse the open store
        return engines

    def lead(self, cluster: Cluster, local_folder: str = "") -> None:
        """Prepare rank 0 for calls: assign the devices to the ranks, and align the ranks' clocks.

        Raises ConfigError if the number of devices differs from the number of ranks.
        """
        if cluster.world_size != self.world_size:
            raise ConfigError(
                f"Cluster '{cluster.name}' with {cluster.size_words} was asked for.",
                f"torchrun started {self.world_size} processes.",
                "Describe one device for each process (--nnodes times --nproc-per-node).",
            )
        self.cluster, self.local_folder = cluster, local_folder
        self._pulse.start()
        self._clock_offsets_s = tuple(self.run(measure_clock_offset, [None] * self.world_size))

    def run(
        self, function: Callable[[Any, Any], Any], payloads: Sequence[Any], *, on_event: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Run function(context, payloads[rank]) on every rank at once; return the results by rank.

        function: must be in the table.  on_event(rank, event): called in another thread.
        Raises the error of the root-cause rank, with the device named, or DeviceLostError if a rank does not answer.
        """
        cluster = self.cluster
        assert cluster is not None and self.rank == 0, "only rank 0 calls, after lead()"
        assert len(payloads) == self.world_size
        call = self._table.call(function)
        self._generation += 1
        mail = StoreMail(self._store, self._generation)
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
        encoded = {id(payload): encode(payload) for payload in payloads}  # usually all ranks get the same payload
        for context, payload in zip(contexts[1:], payloads[1:], strict=True):
            mail.put(f"call/{context.rank}", CallMessage(function=call.name, context=context, payload=encoded[id(payload)]))
        listener = None
        if on_event is not None:
            listener = Listener(StoreMail(self._connect(), self._generation), self.world_size, call, on_event)
        names = [device.name for device in cluster.devices]
        try:
            own = _answer(lambda: call.function(self._joined(contexts[0], mail), payloads[0]))
            outcomes = {0: own.outcome(0, call, names[0])}
            self._collect(mail, call, names, outcomes)
        finally:
            if listener is not None:
                listener.finish()
        failures = {rank: error_of(outcome, names[rank]) for rank, outcome in outcomes.items() if outcome.error is not None}
        missing = [rank for rank in range(self.world_size) if rank not in outcomes]
        if missing and only_peers_blamed(failures):
            silent = [rank for rank in self._pulse.silent() if rank in missing]
            rank = (silent or missing)[0]
            raise DeviceLostError(
                f"Device '{names[rank]}' (rank {rank}) was running {call.name}.",
                f"It showed no sign of life for {SILENT_S:g} s." if silent else "It did not answer.",
                "See its own output; run again.",
            )
        if failures:
            raise failures[root_cause(failures)]
        if listener is not None and listener.failure is not None:
            raise listener.failure
        return [outcomes[rank].result for rank in range(self.world_size)]

    def serve(self) -> None:
        """Answer rank 0's calls until it ends them (all ranks but 0).  Raises DeviceLostError if rank 0 ends early or becomes silent.

        A message that is not a valid call is answered with an error, and nothing is run.
        """
        self._pulse.start()
        try:
            while self._serve_one():
                pass
        finally:
            self._pulse.stop()

    def _serve_one(self) -> bool:
        """Answer the next call.  Returns False if no more calls follow."""
        self._generation += 1
        mail, key = StoreMail(self._store, self._generation), f"call/{self.rank}"
        asked, todo = f"Rank {self.rank} waited for rank 0's calls.", "See its own output."
        ends = False

        def work() -> Any:
            nonlocal ends
            message = mail.take(key, CallMessage, f"A call of rank {self.rank}")
            if ends := not message.function:
                return None
            call = self._table.named(message.function)
            payload = decode(message.payload, call.payload, f"What {call.name} is given")
            assert message.context is not None
            return call.function(self._joined(message.context, mail), payload)

        try:
            while not mail.has(key):
                if 0 in self._pulse.silent():
                    raise DeviceLostError(asked, f"Rank 0 showed no sign of life for {SILENT_S:g} s.", todo)
                time.sleep(_POLL_S)
            answer = _answer(work)
            if not ends:
                mail.put(f"answer/{self.rank}", answer)
        except (RuntimeError, ConnectionError) as error:
            raise DeviceLostError(asked, "Rank 0 has gone.", todo) from error
        return not ends

    def end(self) -> None:
        """Make the other ranks return from `serve` (rank 0)."""
        self._generation += 1
        mail = StoreMail(self._store, self._generation)
        for rank in range(1, self.world_size):
            mail.put(f"call/{rank}", CallMessage())
        self._pulse.stop()
        time.sleep(4 * _POLL_S)  # if rank 0 hosts the store, the others must read this before it closes

    def _joined(self, context: RankContext, mail: StoreMail) -> RankContext:
        return replace(context, channel=StoreChannel(mail, context.rank, self._pulse.silent))

    def _collect(self, mail: StoreMail, call: Call, names: Sequence[str], outcomes: dict[int, Outcome]) -> None:
        """Collect the other ranks' answers until all are present or one is silent.  After a failure, the rest get a short grace time."""
        deadline_s = None
        while missing := [rank for rank in range(self.world_size) if rank not in outcomes]:
            for rank in missing:
                if mail.has(f"answer/{rank}"):
                    try:
                        answer = mail.take(f"answer/{rank}", AnswerMessage, f"The answer of device '{names[rank]}'")
                        outcomes[rank] = answer.outcome(rank, call, names[rank])
                    except WorkbenchError as error:
                        outcomes[rank] = Outcome(rank=rank, error=error, text=str(error))
            if deadline_s is None and any(outcome.error is not None for outcome in outcomes.values()):
                deadline_s = time.monotonic() + _GRACE_S
            if (deadline_s is not None and time.monotonic() > deadline_s) or set(missing).intersection(self._pulse.silent()):
                return
            time.sleep(_POLL_S)


def measure_clock_offset(context: RankContext, payload: None) -> float:
    """Return the offset from this rank's monotonic clock to rank 0's, in seconds, from the fastest of several round trips."""
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
    """Return whether this rank can see a file written by rank 0.  A network folder may show it with a delay."""
    deadline_s = time.monotonic() + patience_s
    while not path.is_file():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def remove_own_files(context: RankContext, payload: None) -> None:
    """Remove this rank's files from its local folder."""
    own = context.own_folder(Path(context.local_folder))
    shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):  # only the last rank of a machine finds them empty
        own.parent.rmdir()
        own.parent.parent.rmdir()


def _answer(work: Callable[[], Any]) -> AnswerMessage:
    """Do the work and return its result or error as a message."""
    try:
        return AnswerMessage(result=encode(work()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # rank 0 finds the cause among all ranks' errors
        return AnswerMessage.of_error(error)
    finally:
        lift_all_budgets()
        close_group()


def _interface_towards(address: str) -> str | None:
    """Return the network interface from which this machine reaches an address.  None if unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        return next((name for name, ends in psutil.net_if_addrs().items() if any(end.address == own for end in ends)), None)
    return None
