"""A cluster of real devices over SSH: their engines, started and ended with the run, lent to a coordinator like
emulated ones.
"""

from __future__ import annotations

import functools
import getpass
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError, WorkbenchError, WriteError
from workbench.core.serial import shown
from workbench.models.hub import brought_folder
from workbench.models.loading import is_tiny, local_folder
from workbench.models.partial_loading import HEADER, TENSORS, header_bytes
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines
from workbench.runtime.frames import KEPT, WORK, Asked, FilePart, foreign
from workbench.runtime.jobs import Outcome
from workbench.runtime.kept_files import KeptFiles
from workbench.runtime.memory import MemoryReading
from workbench.runtime.messages import CallTable
from workbench.runtime.relays import Relays, make_certificate
from workbench.runtime.seats import LEAST_LIMIT_BYTES, Seat
from workbench.runtime.ssh import Connection, Span, digest_of
from workbench.runtime.ssh_agent import CERTIFICATE
from workbench.runtime.ssh_login import Failure, agent_command
from workbench.runtime.ssh_setup import bring_code, environment_python

_DATA_WORDS = {"tls": "by TLS 1.3", "plain": "as plain TCP", "wireguard": "by WireGuard"}


_KILL_S = 2.0
"""After a kill, a device that does not report its engine's end within this time is unreachable: its connection is
closed."""
_START_TIMEOUT_S = 90.0
"""A device imports torch from its card: 10 to 40 s."""
_ENGINE = "workbench.methods.calls"
_PASSED_ON = ("OMP_NUM_THREADS", "WORKBENCH_TINY")


class SshSeat(Seat):
    """A real device: its connection, its engine and its current job."""

    return_s = 60.0
    """Whoever put its cable back sees the device take part, and whoever took it away does not wait for long."""

    def __init__(self, rank: int, device: Device, engines: SshEngines) -> None:
        super().__init__(rank, device, engines.inbox)
        self._engines = engines
        self.connection: Connection | None = None
        self.killed_s: float | None = None
        self._files = KeptFiles(engines.folder, engines.inbox.most_bytes)
        self._is_fetching = False

    @property
    def link(self) -> Connection:
        """Return the connection.  Raises DeviceLostError without one."""
        if self.connection is None:
            raise DeviceLostError(
                f"Device '{self.device.name}' was being used.",
                f"It is lost: {self.why or 'no connection'}",
                "Run again.",
            )
        return self.connection

    def open(self) -> None:
        """Connect, unless it is connected, and start the engine, which is not waited for.  Raises RuntimeSetupError."""
        if self.connection is None or self.connection.lost is not None:
            command = self._engines.command_of(self.device)
            self.connection = Connection(self.device.name, command, self._take)
            self.connection.open(owner=f"{getpass.getuser()} on {platform.node()}")
            self._engines.certify(self.connection)
        environment = {"WORKBENCH_IMPORTS": " ".join(self._engines.imports)}
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = bring_code(self.connection)
        python = self.device.python or environment_python(self.connection)
        self.connection.ask("start", python=python, module=_ENGINE, environment=environment)
        self.send("hello", str(self._engines.folder).encode())

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the engine.  Raises RuntimeSetupError."""
        asked = f"The engine of device '{self.device.name}' was to be started."
        if not self.ready.wait(_START_TIMEOUT_S if timeout_s is None else timeout_s) or self.why:
            raise RuntimeSetupError(
                asked,
                f"It did not come up: {self.why or 'it is too slow'}",
                "Run `workbench kit setup`, or see its log.",
            )

    def close(self) -> None:
        """End everything there."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._files.close()

    def kill(self) -> None:
        """End the engine at once; a device that does not report its end is given up (see look)."""
        if self.connection is not None:
            self.killed_s = self.killed_s or time.monotonic()
            self.connection.post("signal_engine", name="kill")

    def freeze(self) -> None:
        """Suspend the engine without ending it."""
        self.link.post("signal_engine", name="stop")

    def look(self) -> None:
        """Close the connection of a device that has not reported the end of its killed engine in time."""
        if self.killed_s is not None and time.monotonic() - self.killed_s > _KILL_S and self.connection is not None:
            threading.Thread(target=self.close, daemon=True).start()
            self.killed_s, self.why = None, "it cannot be reached."
            self.inbox.put(self.rank, "died", self.why)

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection."""
        return self.connection is not None

    @property
    def is_sending(self) -> bool:
        """Return whether files are on their way."""
        return self.connection is not None and self.connection.is_sending

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds that the engine has used, as the device last said."""
        return 0.0 if self.connection is None else self.connection.cpu_s

    @property
    def memory(self) -> MemoryReading | None:
        """Return the resident memory of the engine, as the device last said."""
        if self.connection is None:
            return None
        health = self.connection.health
        return MemoryReading(rss_bytes=0 if health is None else health.rss_bytes, peak_rss_bytes=0, data_bytes=0)

    def bring(self, paths: Sequence[Path]) -> None:
        """Send the run's files that a job names, in place of older ones.  They arrive before any message that
        follows.
        """
        folder, link = self._engines.folder, self.link
        for name in KEPT:
            link.post("empty", path=f"run/{WORK}/{name}")
        wanted = [path for path in folder.glob("*") if folder in paths and path.is_file()]
        wanted += [path for path in paths if path.is_relative_to(folder) and path.is_file()]
        for path in wanted:
            sent = self.link.send_file(path, f"run/{WORK}/{path.relative_to(folder).as_posix()}")
            sent.add_done_callback(self._give_up_for)

    def give_up(self, error: BaseException) -> None:
        """End the connection because of an error that is the device's alone."""
        if self.connection is not None:
            found, todo = (error.found, error.todo) if isinstance(error, WorkbenchError) else (str(error), "Check it.")
            self.connection.give_up(Failure(found, todo))

    def _give_up_for(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None:
            self.give_up(error)

    def _write(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.to_engine(data)

    # In the thread that reads.

    def _take(self, kind: str, content: Any) -> None:
        match kind:
            case "started":
                self._renew()
                self.killed_s = None
            case "engine":
                self._hear(content)
            case "ended":
                last = shown((content.log.strip().splitlines() or ["it said nothing"])[-1], 200)
                why = f"its engine ended with status {content.code} ({last})."
                if content.code == -9 and self.killed_s is None:  # SIGKILL, and not from us
                    why = "its engine was killed there, as a system does that has no memory left."
                self._lost(why)
            case "lost":
                self._lost(content.found)

    def _lost(self, why: str) -> None:
        self.killed_s = None
        self._files.close()
        self._gone(why, why)

    def _keep(self, part: FilePart) -> None:
        self._files.most_bytes = self.inbox.most_bytes
        try:
            self._files.take(part)
        except (WriteError, OSError) as error:  # of this machine, where the run's folder is
            self.inbox.put(self.rank, "ended", Outcome(rank=self.rank, error=error, text=str(error)))

    def _ask(self, asked: Asked, reply: Callable[[bytes], None]) -> None:
        """Ask the store for this device, or send it weights."""
        if asked.operation == "fetch":  # it takes time, and this thread hears the device's answers
            if self._is_fetching:
                raise foreign("a question to the store", "weights are asked for while others are on their way")
            self._is_fetching = True
            threading.Thread(target=self._fetched, args=(asked.keys, reply), daemon=True).start()
            return
        relays, connection = self._engines.relays, self.connection
        if relays is not None and connection is not None:
            if asked.operation == "set":
                relays.told(self.rank, connection, asked.keys[0], asked.value)
            elif asked.operation == "get":
                reply = functools.partial(relays.reply, self.rank, connection, asked.keys[0], reply)
        self.inbox.store.ask(self.rank, asked, reply)

    def _fetched(self, places: Sequence[str], reply: Callable[[bytes], None]) -> None:
        said = b""
        try:
            self._engines.bring_weights(self.link, places)
        except (WorkbenchError, OSError) as error:
            said = str(error).encode()
        self._is_fetching = False
        reply(said)


class SshEngines(Engines):
    """The engines of a cluster whose devices have addresses; the counterpart of EngineCluster.  Use it as a context
    manager.

    folder: of the run on this machine; devices have copies of what they need of it.  calls: what may be called.
    imports: modules that engines import while this machine prepares the run.
    command_of: returns what starts a device's agent; None: ssh.
    A message or a file of a device may have as many bytes as the model's weights with the optimizer's state, and 256 MB
    for all else.
    """

    fidelity: Literal["real"] = "real"
    dilation = 1.0

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        calls: CallTable,
        *,
        imports: Sequence[str] = (),
        command_of: Callable[[Device], Sequence[str]] | None = None,
    ) -> None:
        super().__init__(cluster)
        self.imports, self.folder, self.table = imports, folder.absolute(), calls
        self.command_of = command_of or agent_command
        self.relays: Relays | None = None
        self._certificate = b""
        self._weights: dict[str, dict[str, Path]] = {}
        self._seats = [SshSeat(rank, device, self) for rank, device in enumerate(cluster.devices)]

    @property
    def seats(self) -> Sequence[SshSeat]:
        """Return the devices by rank."""
        return self._seats

    def __enter__(self) -> SshEngines:
        if self.cluster.data == "tls":
            self._certificate = make_certificate()
        try:
            self._together(SshSeat.open)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything on all devices."""
        for seat in self.seats:
            seat.close()

    def certify(self, connection: Connection) -> None:
        """Give a device the run's certificate."""
        if self._certificate:
            with tempfile.NamedTemporaryFile() as file:
                file.write(self._certificate)
                file.flush()
                connection.send_file(Path(file.name), CERTIFICATE).result()

    def bring_model(self, name: str) -> None:
        """Bring a model to all devices, which keep it: its files, and of its weights the headers.  Raises
        RuntimeSetupError.

        Each device has the tensors that it reads sent when it reads them (see bring_weights).
        """
        if is_tiny(name):
            return
        folder = local_folder(name)
        if folder is None:
            raise RuntimeSetupError(
                f"The model '{name}' was to be brought to devices.", "It is not on this machine.", "Fetch it first."
            )
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        own = brought_folder(name, Path()).as_posix()
        self._weights[own] = {file: path for file, path in files.items() if path.suffix == ".safetensors"}
        self.inbox.most_bytes = LEAST_LIMIT_BYTES + 8 * sum(path.stat().st_size for path in self._weights[own].values())
        digests = "".join(f"{digest_of(path)} {file}\n" for file, path in files.items())

        def bring(seat: SshSeat) -> None:
            kept, link = f"kit/cache/{own}", seat.link
            with tempfile.NamedTemporaryFile("w") as mark:
                mark.write(digests)
                mark.flush()
                # A model that is not known may have another's tensors there, under the same name.
                is_known = link.lacks(Path(mark.name), f"{kept}/digests.txt") is None
                if not is_known:
                    link.ask("empty", path=kept)
                    link.bring(Path(mark.name), f"{kept}/digests.txt")
            weights = self._weights[own]
            link.bring_all(
                [
                    (path, f"{kept}/{file}{HEADER}", (0, header_bytes(path)))
                    if file in weights
                    else (path, f"{kept}/{file}", None)
                    for file, path in files.items()
                ]
            )

        self._together(bring)

    def bring_weights(self, connection: Connection, places: Sequence[str]) -> None:
        """Bring files of weights to a device, or single tensors.  places: in its cache folder, as partial_loading names
        them.

        Raises RuntimeSetupError, also for any other file.
        """
        files: list[tuple[Path, str, Span | None]] = []
        for place in places:
            found = re.fullmatch(rf"(brought/\w+)/([^/]+?)(?:{TENSORS}/(\d+)-(\d+))?", place)
            path = self._weights.get(found[1], {}).get(found[2]) if found else None
            if found is None or path is None:
                asked = f"Device '{connection.name}' asked for '{shown(place)}'."
                raise RuntimeSetupError(asked, "No model of this run has it.", "Run again.")
            files.append((path, f"kit/cache/{place}", (int(found[3]), int(found[4])) if found[3] else None))
        connection.bring_all(files)

    def _together(self, work: Callable[[SshSeat], None]) -> None:
        """Do something on all devices at once.  Raises the first one's error."""
        with ThreadPoolExecutor(len(self.seats)) as pool:
            try:
                for done in [pool.submit(work, seat) for seat in self.seats]:
                    done.result()
            except BaseException:
                self.close()  # what the others still wait for ends, too
                raise

    def now_s(self) -> float:
        """Return the monotonic clock of this machine."""
        return time.monotonic()

    @property
    def clock_bound_s(self) -> float:
        """Return how far a device's clock may be from where it is assumed to be."""
        return max(seat.connection.clock_bound_s if seat.connection is not None else 0.0 for seat in self.seats)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a report says of these devices."""
        return (
            "Real devices over SSH: commands, weights and snapshots travel through SSH, tensors between devices"
            f" {_DATA_WORDS[self.cluster.data]}.",
            f"The devices' clocks are laid beside this machine's to within {1000 * self.clock_bound_s:.2g} ms.",
        )

    def health(self, rank: int) -> str:
        """Return a device's temperature, free memory and what slows it down, as it last said; '' if it has said
        nothing.
        """
        connection = self.seats[rank].connection
        found = None if connection is None else connection.health
        if found is None:
            return ""
        heat = [] if found.temperature_c is None else [f"{found.temperature_c:.0f} °C"]
        return ", ".join(
            [*heat, f"{found.free_memory_bytes / 1e6:.0f} MB free", *([found.throttled] if found.throttled else [])]
        )

    def context(self, rank: int) -> RankContext:
        """Return the context of a rank's next job.  Raises DeviceLostError without a connection."""
        seat = self.seats[rank]
        return RankContext(
            rank=rank,
            world_size=self.cluster.world_size,
            device=seat.device,
            cluster=self.cluster,
            fidelity="real",
            interface="lo" if self.relays else "",
            generation=self.number,
            clock_offset_s=seat.link.clock_offset_s,
        )

    def _prepare(self) -> None:
        self.relays = Relays(lambda rank, error: self.seats[rank].give_up(error)) if self._certificate else None
        for seat in self.seats:
            if seat.connection is None or seat.why:
                seat.open()
        self._together(SshSeat.wait)

    def _finish(self, busy: Sequence[int]) -> None:
        for rank in busy:
            self.seats[rank].kill()
            self.seats[rank].why = "it did not end its job."

    def _give_up(self) -> None:
        for seat in self.seats:
            seat.why = "its group did not form."


def require_addresses(cluster: Cluster) -> None:
    """Raise ConfigError for a cluster of which some devices are real and some are not."""
    without = [device.name for device in cluster.devices if not device.address]
    if without:
        raise ConfigError(
            f"Running on cluster '{cluster.name}' was asked for.",
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no address, the others have.",
            "Give every device one to run on real devices, or none to emulate them.",
        )
