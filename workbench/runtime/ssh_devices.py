"""A cluster of real devices over SSH: their engines, started and ended with the run, lent to a coordinator like emulated ones."""

from __future__ import annotations

import contextlib
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.serial import shown
from workbench.models.hub import brought_folder
from workbench.models.loading import is_tiny, local_folder
from workbench.models.partial_loading import HEADER, TENSORS, header_bytes
from workbench.runtime import commands as c
from workbench.runtime.context import RankContext
from workbench.runtime.devices import News
from workbench.runtime.frames import MB
from workbench.runtime.jobs import WholeJob
from workbench.runtime.memory import MemoryReading
from workbench.runtime.messages import CallMessage, CallTable, encode, encode_told
from workbench.runtime.ssh import Connection, Span, digest_of
from workbench.runtime.ssh_agent import CERTIFICATE
from workbench.runtime.ssh_login import agent_command
from workbench.runtime.ssh_seat import KeyStore, Relays, Seat, make_certificate

_KILL_S = 2.0
"""After a kill, a device that does not report its engine's end within this time is unreachable: its connection is closed."""
_RETURN_S = 60.0
"""So long a lost device is tried again: whoever put its cable back sees it take part, and whoever took it away does not wait for long."""
_LEAST_LIMIT_BYTES = 256 * MB
_DATA_WORDS = {"tls": "by TLS 1.3", "plain": "as plain TCP", "wireguard": "by WireGuard"}


class SshEngines:
    """The engines of a cluster whose devices have addresses; what EngineCluster is for emulated ones.  Use it as a context manager.

    folder: of the run on this machine; devices have copies of what they need of it.  calls: what may be called.
    imports: modules that engines import while this machine prepares the run.
    command_of: returns what starts a device's agent; None: ssh.
    most_bytes: of a message or a file of a device: the model's weights with the optimizer's state, and 256 MB for all else.
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
        self.imports = imports
        self.cluster, self.folder, self.table = cluster, folder.absolute(), calls
        self.command_of = command_of or agent_command
        self.store = KeyStore()
        self.relays: Relays | None = None
        self._certificate = b""
        self._weights: dict[str, dict[str, Path]] = {}
        self.most_bytes = _LEAST_LIMIT_BYTES
        self._told: queue.SimpleQueue[tuple[int, str, Any, int]] = queue.SimpleQueue()
        self.seats = [Seat(rank, device, self) for rank, device in enumerate(cluster.devices)]
        self.number = 0  # of jobs
        self._busy = threading.Lock()

    def __enter__(self) -> SshEngines:
        if self.cluster.data == "tls":
            self._certificate = make_certificate()
        try:
            self._together(Seat.open)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        """Bring a model to all devices, which keep it: its files, and of its weights the headers.  Raises RuntimeSetupError.

        Each device has the tensors that it reads sent when it reads them (see bring_weights).
        """
        if is_tiny(name):
            return
        folder = local_folder(name)
        if folder is None:
            raise RuntimeSetupError(f"The model '{name}' was to be brought to devices.", "It is not on this machine.", "Fetch it first.")
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        own = brought_folder(name, Path()).as_posix()
        self._weights[own] = {file: path for file, path in files.items() if path.suffix == ".safetensors"}
        self.most_bytes = _LEAST_LIMIT_BYTES + 8 * sum(path.stat().st_size for path in self._weights[own].values())
        digests = "".join(f"{digest_of(path)} {file}\n" for file, path in files.items())

        def bring(seat: Seat) -> None:
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
                    (path, f"{kept}/{file}{HEADER}", (0, header_bytes(path))) if file in weights else (path, f"{kept}/{file}", None)
                    for file, path in files.items()
                ]
            )

        self._together(bring)

    def bring_weights(self, connection: Connection, places: Sequence[str]) -> None:
        """Bring files of weights to a device, or single tensors.  places: in its cache folder, as partial_loading names them.

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

    def _together(self, work: Callable[[Seat], None]) -> None:
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
            "Real devices over SSH: commands, weights and checkpoints travel through SSH, tensors between devices"
            f" {_DATA_WORDS[self.cluster.data]}.",
            f"The devices' clocks are laid beside this machine's to within {1000 * self.clock_bound_s:.2g} ms.",
        )

    def health(self, rank: int) -> str:
        """Return a device's temperature, free memory and what slows it down, as it last said; '' if it has said nothing."""
        connection = self.seats[rank].connection
        found = None if connection is None else connection.health
        if found is None:
            return ""
        heat = [] if found.temperature_c is None else [f"{found.temperature_c:.0f} °C"]
        return ", ".join([*heat, f"{found.free_memory_bytes / 1e6:.0f} MB free", *([found.throttled] if found.throttled else [])])

    def tell(self, rank: int, kind: str, content: Any, nbytes: int = 0) -> None:
        """Note what happened on a device; from any thread.  nbytes: of the message, which are unread until then."""
        self._told.put((rank, kind, content, nbytes))

    def told(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        """Return what happened since the last call, waiting up to timeout_s for something to come."""
        found: list[tuple[int, str, Any]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                rank, kind, content, nbytes = self._told.get(timeout=0 if found else timeout_s) if timeout_s else self._told.get_nowait()
                self.seats[rank].unread_bytes -= nbytes
                found.append((rank, kind, content))
        return found

    def run(
        self, function: Callable[[Any, Any], Any], payloads: Sequence[Any], *, on_event: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Run function(context, payloads[rank]) on every device at once; return the results by rank.

        Raises the error of the device that explains the others', or DeviceLostError if one is lost.
        """
        with self.service() as service:
            names = [device.name for device in self.cluster.devices]
            return WholeJob(service, names, function, on_event=on_event, request_stop=service.request_stop).results(payloads)

    @contextlib.contextmanager
    def service(self) -> Iterator[SshService]:
        """Lend the devices to a service (see runtime.devices.Service).  Those that do not end their jobs are started again afterwards."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError("These devices were asked for.", "They are at another job.", "Wait for it.")
        try:
            self.store = KeyStore()
            self.relays = Relays(lambda rank, error: self.seats[rank].give_up(error)) if self._certificate else None
            self.told(0)
            for seat in self.seats:
                if seat.connection is None or seat.why:
                    seat.open()
            self._together(Seat.wait)
            service = SshService(self)
            try:
                yield service
            finally:
                service.close()
        finally:
            self._busy.release()


class SshService:
    """Jobs on single devices, as runtime.devices.Service asks; used from one thread."""

    address = ""

    def __init__(self, engines: SshEngines) -> None:
        self._engines = engines
        self.running: set[int] = set()
        self._restarts: set[int] = set()
        self._closing = threading.Event()

    def start(self, rank: int, function: Callable[[RankContext, Any], Any], payload: Any) -> None:
        """Start function(context, payload) on one device, which must not be at another job.  function: one of the table."""
        self.running.add(rank)
        engines, seat = self._engines, self._engines.seats[rank]
        seat.call = engines.table.call(function)
        engines.number += 1
        seat.number = engines.number
        paths: list[Any] = []
        encoded = encode(payload, paths)
        context = RankContext(
            rank=rank,
            world_size=engines.cluster.world_size,
            device=seat.device,
            cluster=engines.cluster,
            fidelity="real",
            interface="lo" if engines.relays else "",
            generation=seat.number,
            clock_offset_s=seat.link.clock_offset_s,
        )
        seat.link.post("ask_to_stop", wanted=False)
        seat.bring(paths)
        seat.send("call", encode(CallMessage(function=seat.call.name, context=context, payload=encoded)), seat.number)

    def command(self, rank: int, content: Any) -> bool:
        """Send a command to a rank's job, after the files that it names; return False if it has none.

        A ping would wait behind files; while some are on their way, the connection watches over the device.
        """
        seat = self._engines.seats[rank]
        if rank not in self.running or seat.connection is None:
            return False
        if isinstance(content, c.Ping) and seat.connection.is_sending:
            self._engines.tell(rank, "event", seat.pong)
            return True
        paths: list[Any] = []
        data = encode_told(content, paths)
        if isinstance(content, c.Train):
            seat.bring(paths)
        seat.send("command", data)
        return True

    def news(self, timeout_s: float) -> list[News]:
        """Return what happened since the last call, waiting up to timeout_s for something to come."""
        now_s = time.monotonic()
        for seat in self._engines.seats:
            if seat.killed_s is not None and now_s - seat.killed_s > _KILL_S and seat.connection is not None:
                threading.Thread(target=seat.close, daemon=True).start()
                seat.killed_s, seat.why = None, "it cannot be reached."
                self._engines.tell(seat.rank, "died", seat.why)
        found = []
        for rank, kind, content in self._engines.told(timeout_s):
            seat = self._engines.seats[rank]
            if kind == "restarted":
                self._restarts.discard(rank)
                found.append(News(rank, "restarted", content))
            elif rank not in self.running or seat.call is None:
                continue
            elif kind == "event":
                found.append(News(rank, "event", content))
            else:
                self.running.discard(rank)
                found.append(News(rank, "died" if kind == "died" else "ended", content))
        return found

    def kill(self, rank: int) -> None:
        """End a device's engine at once; a device that does not say that it has ended is given up."""
        seat = self._engines.seats[rank]
        if seat.connection is not None:
            seat.killed_s = seat.killed_s or time.monotonic()
            seat.connection.post("signal_engine", name="kill")

    def freeze(self, rank: int) -> None:
        """Stop a device's engine without ending it."""
        self._engines.seats[rank].link.post("signal_engine", name="stop")

    def restart(self, rank: int) -> None:
        """Start a device's engine again in the background, over a new connection if need be; `news` tells when it is there.

        A device that cannot be reached is tried again for _RETURN_S.
        """
        if rank in self._restarts:
            return
        self._restarts.add(rank)
        self.running.discard(rank)

        def work() -> None:
            error: BaseException | None = None
            deadline_s = time.monotonic() + _RETURN_S
            while True:
                try:
                    self._engines.seats[rank].open()
                    self._engines.seats[rank].wait()
                    error = None
                except BaseException as failure:  # told by `news`
                    error = failure
                if error is None or time.monotonic() > deadline_s or self._closing.wait(1.0):
                    break
            self._engines.tell(rank, "restarted", error)

        threading.Thread(target=work, name=f"restart {rank}", daemon=True).start()

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds that a device's engine has used, as it last said."""
        connection = self._engines.seats[rank].connection
        return 0.0 if connection is None else connection.cpu_s

    def memory(self) -> tuple[MemoryReading | None, ...]:
        """Return the resident memory of the devices' engines, as they last said; None for lost devices."""
        links = [seat.connection for seat in self._engines.seats]
        found = [None if link is None else MemoryReading(rss_bytes=_rss(link), peak_rss_bytes=0, data_bytes=0) for link in links]
        return tuple(found)

    def request_stop(self) -> None:
        """Make should_stop() true on every rank that has a job."""
        for rank in self.running:
            connection = self._engines.seats[rank].connection
            if connection is not None:
                connection.post("ask_to_stop", wanted=True)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait a while for the jobs, which were told to end; those that do not are killed."""
        deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        for rank in self._restarts:
            self._engines.seats[rank].close()
        self.request_stop()
        while (self.running or self._restarts) and time.monotonic() < deadline_s:
            self.news(0.05)
        for rank in self.running:
            self.kill(rank)
            self._engines.seats[rank].why = "it did not end its job."


def _rss(link: Connection) -> int:
    return 0 if link.health is None else link.health.rss_bytes


def require_addresses(cluster: Cluster) -> None:
    """Raise ConfigError for a cluster of which some devices are real and some are not."""
    without = [device.name for device in cluster.devices if not device.address]
    if without:
        raise ConfigError(
            f"Running on cluster '{cluster.name}' was asked for.",
            f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no address, the others have.",
            "Give every device one to run on real devices, or none to emulate them.",
        )
