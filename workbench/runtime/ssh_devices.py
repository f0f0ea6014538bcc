"""A cluster of real devices over SSH: their engines, started and ended with the run, lent to a coordinator like emulated ones."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
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
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines
from workbench.runtime.messages import Call, CallTable
from workbench.runtime.seats import LEAST_LIMIT_BYTES
from workbench.runtime.ssh import Connection, Span, digest_of
from workbench.runtime.ssh_agent import CERTIFICATE
from workbench.runtime.ssh_login import agent_command
from workbench.runtime.ssh_seat import Relays, SshSeat, make_certificate

_DATA_WORDS = {"tls": "by TLS 1.3", "plain": "as plain TCP", "wireguard": "by WireGuard"}


class SshEngines(Engines):
    """The engines of a cluster whose devices have addresses; the counterpart of EngineCluster.  Use it as a context manager.

    folder: of the run on this machine; devices have copies of what they need of it.  calls: what may be called.
    imports: modules that engines import while this machine prepares the run.
    command_of: returns what starts a device's agent; None: ssh.
    A message or a file of a device may have as many bytes as the model's weights with the optimizer's state, and 256 MB for all else.
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

    def call(self, function: Callable[..., Any], payload: Any) -> tuple[Call, Any]:
        """Return a function of the table.  Raises RuntimeSetupError for any other."""
        return self.table.call(function), payload

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
