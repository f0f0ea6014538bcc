"""A cluster of real devices over SSH.  Their engines start and end with the run; a coordinator uses them like emulated
ones.
"""

from __future__ import annotations

import functools
import getpass
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError, WorkbenchError, WriteError
from workbench.core.serial import shown
from workbench.core.threads import in_background
from workbench.core.units import size_words
from workbench.core.waiting import as_finished
from workbench.models.configuration import is_tiny, local_folder
from workbench.models.hub import brought_folder
from workbench.models.stored_tensors import HEADER, TENSORS, header_bytes
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines
from workbench.runtime.engine_slots import LEAST_LIMIT_BYTES, EngineSlot
from workbench.runtime.frames import KEPT, WORK, Asked, FilePart, foreign
from workbench.runtime.jobs import Outcome
from workbench.runtime.kept_files import KeptFiles
from workbench.runtime.memory import MemoryReading
from workbench.runtime.messages import CallTable
from workbench.runtime.relays import Relays, make_certificate
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


class SshSlot(EngineSlot):
    """A real device: its connection, its engine and its current job."""

    return_s = 60.0
    """Whoever put its cable back sees the device take part, and whoever took it away does not wait for long."""

    def __init__(self, rank: int, device: Device, engines: SshEngines) -> None:
        super().__init__(rank, device, engines.inbox)
        self._engines = engines
        self.connection: Connection | None = None  # each method reads it once: another thread may close it meanwhile
        self.killed_s: float | None = None
        self._files = KeptFiles(engines.folder, engines.inbox.most_bytes)
        self._is_fetching = False

    @property
    def link(self) -> Connection:
        """Return the connection.  Raises DeviceLostError without one."""
        connection = self.connection
        if connection is None:
            raise DeviceLostError(
                f"Device '{self.device.name}' was being used.",
                f"It is lost: {self.why or 'no connection'}",
                "Run again.",
            )
        return connection

    def open(self) -> None:
        """Connect if necessary, and start the engine without waiting for it.  Raises RuntimeSetupError."""
        connection = self.connection
        if connection is None or connection.lost is not None:
            command = self._engines.command_of(self.device)
            connection = self.connection = Connection(self.device.name, command, self._take)
            connection.open(owner=f"{getpass.getuser()} on {platform.node()}")
            self._engines.certify(connection)
        environment = {"WORKBENCH_IMPORTS": " ".join(self._engines.imports)}
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = bring_code(connection)
        python = self.device.python or environment_python(connection)
        connection.ask("start", python=python, module=_ENGINE, environment=environment)
        self.send("hello", str(self._engines.folder).encode())

    def wait(self) -> None:
        """Wait for the engine.  Raises RuntimeSetupError."""
        if not self.ready.wait(_START_TIMEOUT_S) or self.why:
            raise RuntimeSetupError(
                f"The engine of device '{self.device.name}' was to be started.",
                f"It did not come up: {self.why or 'it is too slow'}",
                "Run `workbench kit setup`, or see its log.",
            )

    def close(self) -> None:
        """End everything on the device."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._files.close()

    def kill(self) -> None:
        """End the engine at once.  A device that does not report the engine's end counts as lost (see look)."""
        connection = self.connection
        if connection is not None:
            self.killed_s = self.killed_s or time.monotonic()
            connection.post("signal_engine", name="kill")

    def freeze(self) -> None:
        """Suspend the engine without ending it."""
        self.link.post("signal_engine", name="stop")

    def look(self) -> None:
        """Close the connection of a device that has not reported the end of its killed engine in time."""
        killed_s = self.killed_s
        if killed_s is not None and time.monotonic() - killed_s > _KILL_S and self.connection is not None:
            in_background(self.close)
            self.killed_s, self.why = None, "it cannot be reached."
            self.inbox.put(self.rank, "died", self.why)

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection."""
        return self.connection is not None

    @property
    def is_sending(self) -> bool:
        """Return whether files are on their way."""
        connection = self.connection
        return connection is not None and connection.is_sending

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds of the engine that the device last reported."""
        connection = self.connection
        return 0.0 if connection is None else connection.cpu_s

    @property
    def memory(self) -> MemoryReading | None:
        """Return the resident memory of the engine that the device last reported."""
        connection = self.connection
        if connection is None:
            return None
        health = connection.health
        return MemoryReading(rss_bytes=0 if health is None else health.rss_bytes, peak_rss_bytes=0, data_bytes=0)

    def bring(self, paths: Sequence[Path]) -> None:
        """Send the run's files that a job names; they replace older ones.  They arrive before any message
        that follows.
        """
        folder, link = self._engines.folder, self.link
        for name in KEPT:
            link.post("empty", path=f"run/{WORK}/{name}")
        files = [path for path in folder.glob("*") if folder in paths and path.is_file()]
        files += [path for path in paths if path.is_relative_to(folder) and path.is_file()]
        for path in files:
            future = self.link.send_file(path, f"run/{WORK}/{path.relative_to(folder).as_posix()}")
            future.add_done_callback(self._give_up_for)

    def give_up(self, error: BaseException) -> None:
        """End the connection because of an error that concerns only this device."""
        connection = self.connection
        if connection is not None:
            problem, todo = (
                (error.found, error.todo) if isinstance(error, WorkbenchError) else (str(error), "Check it.")
            )
            connection.give_up(Failure(problem, todo))

    def _give_up_for(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None:
            self.give_up(error)

    def _write(self, data: bytes) -> None:
        connection = self.connection
        if connection is not None:
            connection.to_engine(data)

    # In the reading thread.

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

    def _ask(self, request: Asked, reply: Callable[[bytes], None]) -> None:
        """Pass a request of this device to the store, or send it weights."""
        if (
            request.operation == "fetch"
        ):  # in another thread, because it takes time and this one reads the device's replies
            if self._is_fetching:
                raise foreign("a question to the store", "weights are asked for while others are on their way")
            self._is_fetching = True
            in_background(self._fetched, request.keys, reply)
            return
        relays, connection = self._engines.relays, self.connection
        if relays is not None and connection is not None:
            if request.operation == "set":
                relays.publish(self.rank, connection, request.keys[0], request.value)
            elif request.operation == "get":
                reply = functools.partial(relays.reply, self.rank, connection, request.keys[0], reply)
        self.inbox.store.ask(self.rank, request, reply)

    def _fetched(self, places: Sequence[str], reply: Callable[[bytes], None]) -> None:
        error_text = b""
        try:
            self._engines.bring_weights(self.link, places)
        except (WorkbenchError, OSError) as error:
            error_text = str(error).encode()
        self._is_fetching = False
        reply(error_text)


class SshEngines(Engines):
    """The engines of a cluster whose devices have addresses; the counterpart of EngineCluster.  Use it as a context
    manager.

    folder: the run's folder on this machine; devices have copies of the files that they need.  calls: the functions
    that may be called.
    imports: modules that engines import while this machine prepares the run.
    command_of: returns the command that starts a device's agent; None: ssh.
    A message or file from a device may be as large as the model's weights with the optimizer's state, plus 256 MB.
    """

    fidelity: Literal["real"] = "real"
    dilation = 1.0
    slots: Sequence[SshSlot]

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
        self.slots = [SshSlot(rank, device, self) for rank, device in enumerate(cluster.devices)]

    def __enter__(self) -> SshEngines:
        if self.cluster.data == "tls":
            self._certificate = make_certificate()
        try:
            self._together(SshSlot.open)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything on all devices."""
        for slot in self.slots:
            slot.close()

    def certify(self, connection: Connection) -> None:
        """Send a device the run's certificate."""
        if self._certificate:
            with tempfile.NamedTemporaryFile() as file:
                file.write(self._certificate)
                file.flush()
                connection.send_file(Path(file.name), CERTIFICATE).result()

    def bring_model(self, name: str) -> None:
        """Send a model to all devices, which keep it: its files, but only the headers of its weights.  Raises
        RuntimeSetupError.

        A device requests the tensors themselves when it reads them (see bring_weights).
        """
        if is_tiny(name):
            return
        folder = local_folder(name)
        if folder is None:
            raise RuntimeSetupError(
                f"The model '{name}' was to be brought to devices.", "It is not on this machine.", "Fetch it first."
            )
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        model_place = brought_folder(name, Path()).as_posix()
        self._weights[model_place] = {file: path for file, path in files.items() if path.suffix == ".safetensors"}
        sizes = (sum(path.stat().st_size for path in weights.values()) for weights in self._weights.values())
        self.inbox.most_bytes = LEAST_LIMIT_BYTES + 8 * max(sizes)
        digests = "".join(f"{digest_of(path)} {file}\n" for file, path in files.items())

        def bring(slot: SshSlot) -> None:
            model_folder, link = f"kit/cache/{model_place}", slot.link
            with tempfile.NamedTemporaryFile("w") as mark:
                mark.write(digests)
                mark.flush()
                # A model that is not known may have another's tensors there, under the same name.
                if link.lacks(Path(mark.name), f"{model_folder}/digests.txt"):
                    link.ask("empty", path=model_folder)
                    link.bring([(Path(mark.name), f"{model_folder}/digests.txt", None)])
            weights = self._weights[model_place]
            link.bring(
                [
                    (path, f"{model_folder}/{file}{HEADER}", (0, header_bytes(path)))
                    if file in weights
                    else (path, f"{model_folder}/{file}", None)
                    for file, path in files.items()
                ]
            )

        self._together(bring)

    def bring_weights(self, connection: Connection, places: Sequence[str]) -> None:
        """Send weight files or single tensors to a device.

        places: their paths in its cache folder, as stored_tensors names them.
        Raises RuntimeSetupError, also for any other file.
        """
        files: list[tuple[Path, str, Span | None]] = []
        for place in places:
            match = re.fullmatch(rf"(brought/\w+)/([^/]+?)(?:{TENSORS}/(\d+)-(\d+))?", place)
            path = self._weights.get(match[1], {}).get(match[2]) if match else None
            if match is None or path is None:
                request = f"Device '{connection.name}' asked for '{shown(place)}'."
                raise RuntimeSetupError(request, "No model of this run has it.", "Run again.")
            files.append((path, f"kit/cache/{place}", (int(match[3]), int(match[4])) if match[3] else None))
        connection.bring(files)

    def _together(self, work: Callable[[SshSlot], None]) -> None:
        """Call `work` for all devices at once.  Raises the first one's error."""
        with ThreadPoolExecutor(len(self.slots)) as pool:
            try:
                for future in as_finished([pool.submit(work, slot) for slot in self.slots]):
                    future.result()
            except BaseException:
                self.close()  # this also ends the others' waits
                raise

    def now_s(self) -> float:
        """Return the monotonic clock of this machine."""
        return time.monotonic()

    @property
    def clock_bound_s(self) -> float:
        """Return the uncertainty of the devices' clock offsets in seconds."""
        connections = [slot.connection for slot in self.slots]
        return max(0.0 if connection is None else connection.clock_bound_s for connection in connections)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes for the report on these devices."""
        return (
            "Real devices over SSH: commands, weights and snapshots travel through SSH, tensors between devices"
            f" {_DATA_WORDS[self.cluster.data]}.",
            f"The devices' clocks are aligned with this machine's to within {1000 * self.clock_bound_s:.2g} ms.",
        )

    def health(self, rank: int) -> str:
        """Return a device's temperature, free memory and cause of throttling, as it last reported them; '' without a
        report.
        """
        connection = self.slots[rank].connection
        health = None if connection is None else connection.health
        if health is None:
            return ""
        heat = [] if health.temperature_c is None else [f"{health.temperature_c:.0f} °C"]
        return ", ".join(
            [*heat, f"{size_words(health.free_memory_bytes)} free", *([health.throttled] if health.throttled else [])]
        )

    def context(self, rank: int) -> RankContext:
        """Return the context of a rank's next job.  Raises DeviceLostError without a connection."""
        slot = self.slots[rank]
        return RankContext(
            rank=rank,
            world_size=self.cluster.world_size,
            device=slot.device,
            cluster=self.cluster,
            fidelity="real",
            interface="lo" if self.relays else "",
            generation=self.number,
            clock_offset_s=slot.link.clock_offset_s,
            is_watched=self.is_watched,
        )

    def _prepare(self) -> None:
        self.relays = Relays(lambda rank, error: self.slots[rank].give_up(error)) if self._certificate else None
        for slot in self.slots:
            if slot.connection is None or slot.why:
                slot.open()
        self._together(SshSlot.wait)

    def _finish(self, busy: Sequence[int]) -> None:
        for rank in busy:
            self.slots[rank].kill()
            self.slots[rank].why = "it did not end its job."

    def _give_up(self) -> None:
        for slot in self.slots:
            slot.why = "its group did not form."


def require_addresses(cluster: Cluster) -> None:
    """Raise ConfigError for a cluster with both real and emulated devices."""
    without = [device.name for device in cluster.devices if not device.address]
    if without:
        raise ConfigError(
            f"Running on cluster '{cluster.name}' was asked for.",
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no address, the others have.",
            "Give every device one to run on real devices, or none to emulate them.",
        )
