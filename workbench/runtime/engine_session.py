"""One running set of engines: controller, one engine per device, links, event channel and janitor, all started and ended together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from workbench.core.cluster import Cluster as DeviceCluster
from workbench.core.errors import RuntimeSetupError
from workbench.core.run_folder import ProcessId, make_run_folder, note_process, remove_run_folder, start_janitor
from workbench.core.serial import to_json, write_text
from workbench.runtime.engine import SETTINGS_FILE, START_TIMEOUT_S, EngineSettings
from workbench.runtime.engine_starter import EnginesLate, EngineStarter, engine_environment
from workbench.runtime.jobs import identify
from workbench.runtime.network import EmulatedNetwork, Endpoint, Fidelity, require_loopback
from workbench.runtime.work_folder import is_full_disk

if TYPE_CHECKING:
    import ipyparallel  # not needed for real devices

_LOG_TAIL_LINES = 15


class EngineSession:
    """All processes and sockets of a cluster of emulated devices.  `close` ends all of them, also after a failed `open`."""

    def __init__(self, cluster: DeviceCluster, fidelity: Fidelity) -> None:
        self.cluster = cluster
        self.fidelity = fidelity
        self.endpoints: tuple[Endpoint, ...] = ()
        self.engines: tuple[ProcessId, ...] = ()
        self.starter: EngineStarter | None = None
        self.client: ipyparallel.Client | None = None
        self.events_address = ""
        self._owner_pid = os.getpid()
        self._timeout_s = START_TIMEOUT_S
        self._folder: Path | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._network: EmulatedNetwork | None = None
        self._controller: ProcessId | None = None
        self._ipp: ipyparallel.Cluster | None = None
        self._zmq: zmq.Context | None = None
        self._events: zmq.Socket | None = None

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        assert self._folder is not None
        return self._folder

    def shape_links(self, cluster: DeviceCluster) -> None:
        """Set the emulated links to the rates of another cluster of the same devices."""
        if self._network is not None:
            self._network.shape(cluster)

    @property
    def healthy(self) -> bool:
        """Return whether every started process still runs and every engine is reachable by its number."""
        needed = [*self.engines, *([self._controller] if self._controller else [])]
        if self._network is not None:
            needed.append(ProcessId.of(self._network.holder_pid))
        runs = bool(self.engines) and all(process.alive for process in needed)
        # An engine whose restart was abandoned may be running without having registered.
        return runs and self.client is not None and set(self.client.ids).issuperset(range(len(self.engines)))

    def open(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start all processes (about 5 s the first time in a process, then 2 s).

        Raises RuntimeSetupError, or EnginesLate after timeout_s.  In both cases nothing is left running.
        """
        self._timeout_s = timeout_s
        deadline_s = time.monotonic() + timeout_s
        try:
            self._open(deadline_s)
        except OSError as error:
            self.close()
            raise RuntimeSetupError(
                f"Engines for cluster '{self.cluster.name}' were being started.",
                f"The system refused: {error}.",
                "Make room in the temporary folder, or set TMPDIR to another." if is_full_disk(error) else "Run workbench doctor.",
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, deadline_s: float) -> None:
        folder = self._folder = make_run_folder()
        environment = {**engine_environment(), "IPYTHONDIR": str(folder / "ipython")}
        self._janitor = start_janitor(folder)
        self.starter = EngineStarter(folder, environment)
        self.starter.prepare()  # its imports overlap with the controller's
        try:
            self._network = EmulatedNetwork.create(self.cluster, folder, self.fidelity)
        except RuntimeSetupError:
            if self.fidelity == "kernel":
                raise
            require_loopback()  # it is this machine's then
        else:
            note_process(folder, ProcessId.of(self._network.holder_pid))
            self.endpoints = self._network.endpoints
        self._open_events()
        self._start_controller(environment)
        self._start_engines(deadline_s)
        self._connect(deadline_s)

    def _open_events(self) -> None:
        self._zmq = zmq.Context()
        self._events = self._zmq.socket(zmq.PULL)
        self._events.linger = 0
        self.events_address = f"ipc://{self.folder}/events"
        self._events.bind(self.events_address)

    def _start_controller(self, environment: dict[str, str]) -> None:
        profile = self.folder / "profile"
        logger = logging.getLogger("workbench.engines")
        logger.setLevel(logging.ERROR)  # our own errors report the end of an engine
        import ipyparallel
        from traitlets.config import Config

        config = Config()
        config.LocalProcessLauncher.environment = environment
        # An engine registers with its first heartbeat.  We ignore missed heartbeats because we watch the processes.
        heartbeat = ["--HeartMonitor.period=300", "--HeartMonitor.max_heartmonitor_misses=1000"]
        # Without nodb the hub keeps every payload.  The hub imports from its current folder.
        arguments = ["--nodb", *heartbeat, f"--work-dir={self.folder}"]
        # Unix sockets cross network namespaces, use no ports, and are private to the folder's owner.
        for side, name in (("engine", "sock"), ("client", "sock"), ("monitor", "monitor")):
            arguments += [f"--IPController.{side}_transport=ipc", f"--IPController.{side}_ip={self.folder}/{name}"]
        self._ipp = ipyparallel.Cluster(
            profile_dir=str(profile),
            cluster_id="",
            cluster_file="",
            load_profile=False,
            config=config,
            log=logger,
            controller_args=arguments,
            controller_location="localhost",
            send_engines_connection_env=False,
            shutdown_atexit=False,
            delay=0,
        )
        self._ipp.start_controller_sync()
        self._controller = ProcessId.of(self._ipp.controller.pid)
        note_process(self.folder, self._controller)

    def _start_engines(self, deadline_s: float) -> None:
        assert self._ipp is not None and self.starter is not None
        owner = ProcessId.of(os.getpid())
        settings = EngineSettings(
            owner_pid=owner.pid,
            owner_started=owner.started,
            profile=self._ipp.profile_dir,
            connection_file=self._ipp.controller.connection_files["engine"],
            endpoints=self.endpoints,
        )
        write_text(self.folder / SETTINGS_FILE, to_json(settings))
        for rank in range(self.cluster.world_size):
            try:
                self.engines = (*self.engines, self.starter.start(rank, max(0.0, deadline_s - time.monotonic())))
            except EnginesLate as error:
                raise self._late() from error

    def _connect(self, deadline_s: float) -> None:
        assert self._ipp is not None and self._controller is not None
        files = {kind: Path(path) for kind, path in self._ipp.controller.connection_files.items()}
        information: dict[str, dict[str, Any]] = {}
        while len(information) < len(files):
            self._require_alive(deadline_s)
            for kind, path in files.items():
                with contextlib.suppress(OSError, ValueError):  # missing or incomplete
                    information[kind] = json.loads(path.read_text())
            time.sleep(0.02)
        self._link_sockets(information)
        import ipyparallel

        self.client = ipyparallel.Client(
            information["client"],
            profile_dir=self._ipp.profile_dir,
            ipython_dir=str(self.folder / "ipython"),  # do not use the user's folder, which may not be writable
            cluster_id="",
            timeout=30,
        )
        while len(self.client.ids) < self.cluster.world_size:
            self._require_alive(deadline_s)
            time.sleep(0.05)
        # The hub assigns the requested engine numbers.  We verify which engine has which number.
        replies = [self.client[rank].apply_async(identify) for rank in range(self.cluster.world_size)]
        for rank, reply in enumerate(replies):
            while not reply.ready():
                self._require_alive(deadline_s)
                reply.wait(0.1)
            if reply.get() != self.engines[rank].pid:
                raise RuntimeSetupError(
                    f"Engine {rank} was asked for.", f"Process {reply.get()} answered, not {self.engines[rank].pid}.", "Start again."
                )

    def _link_sockets(self, information: dict[str, dict[str, Any]]) -> None:
        """Let engines and client find the controller.  ipyparallel binds sock-PORT but connects to sock:PORT."""
        for connection in information.values():
            for value in connection.values():
                for port in value if isinstance(value, list) else [value]:
                    if isinstance(port, int):
                        with contextlib.suppress(FileExistsError):
                            (self.folder / f"sock:{port}").symlink_to(f"sock-{port}")

    def _require_alive(self, deadline_s: float) -> None:
        """Raise RuntimeSetupError if a process died during startup, or if startup takes too long."""
        named = [(f"The engine of device '{device.name}'", one) for device, one in zip(self.cluster.devices, self.engines, strict=False)]
        for name, process in [("The controller", self._controller), *named]:
            if process is not None and not process.alive:
                raise RuntimeSetupError(
                    f"Engines for cluster '{self.cluster.name}' were being started.",
                    f"{name} ended: {self._log_tail()}",
                    "Run workbench doctor.",
                )
        if time.monotonic() > deadline_s:
            raise self._late()

    def _late(self) -> EnginesLate:
        return EnginesLate(
            f"Engines for cluster '{self.cluster.name}' were being started.",
            f"They were not up after {self._timeout_s:.0f} s: {self._log_tail()}",
            "Close other programs and try again.",
        )

    def _log_tail(self) -> str:
        logs = sorted(self.folder.glob("profile/log/*.log"), key=lambda path: path.stat().st_mtime)
        lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
        return " | ".join(lines[-_LOG_TAIL_LINES:]) or "it left no log"

    def receive(self, timeout_s: float) -> list[tuple[int, int, str, Any]]:
        """Return the events received, (rank, generation, kind, event) each.  Waits up to timeout_s for the first one."""
        assert self._events is not None
        received = []
        wait_ms = max(1, int(timeout_s * 1000))
        while self._events.poll(wait_ms):
            received.append(pickle.loads(self._events.recv()))
            wait_ms = 0
        return received

    def close(self) -> None:
        """End every process and remove all files.  Safe to call repeatedly and in a forked child."""
        if os.getpid() != self._owner_pid or self._folder is None:
            return
        folder, janitor = self._folder, self._janitor
        if self.client is not None:
            with contextlib.suppress(Exception):
                self.client.close(linger=0)
            self.client = None
        for process in (*self.engines, *([self._controller] if self._controller else [])):
            process.kill()
        if self.starter is not None:
            for engine in self.engines:
                engine.wait(1.0)
            self.starter.close()
        if self._network is not None:
            self._network.close()
        remove_run_folder(folder, spare=(janitor.pid,) if janitor else ())
        if self._ipp is not None:
            with contextlib.suppress(Exception):  # its processes have ended: this joins its threads
                self._ipp.stop_cluster_sync()
        if self._events is not None and self._zmq is not None:
            self._events.close()
            self._zmq.term()
        if janitor is not None:
            janitor.kill()
            janitor.wait()
        remove_run_folder(folder)
        self._folder = self._network = self._ipp = self._controller = None
        self.engines = ()
