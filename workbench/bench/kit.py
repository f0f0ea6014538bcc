"""`workbench bench kit`: what the cluster named kit costs: reaching it, bringing files, starting a run, a step, a lost device.

`python tests/runtime/ssh_hosts.py 4 400` runs it on servers of this machine with links of 400 Mbit/s.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.bench.frame import Progress
from workbench.core.catalogue import KIT, load_cluster
from workbench.core.cluster import Cluster, DataPlane, Device
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.experiment import run
from workbench.methods.base import Event
from workbench.runtime.ssh import Connection, agent_command
from workbench.runtime.ssh_setup import bring_code, install

FILE_BYTES = 90_000_000
JOB = Job(method="fine_tuning", epochs=2, train_samples=320, validation_samples=32, test_samples=32, options={"technique": "lora"})


def bench(progress: Progress = print) -> dict[str, Any]:
    """Return seconds, and the MB/s of a file that goes to all devices at once, also as a share of one device's link in the kit's file.

    Raises ConfigError if no cluster is named kit.
    """
    cluster = load_cluster(KIT)
    progress(f"Reaching {cluster.size_words}")
    found: dict[str, Any] = {"devices": cluster.world_size, "model": JOB.model}
    found["check_s"] = _on_all(cluster, lambda connection: connection.ask("facts"))
    found["second_setup_s"] = _on_all(cluster, _set_up)
    progress(f"Bringing {FILE_BYTES / 1e6:.0f} MB to each")
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(FILE_BYTES))
        file.flush()
        seconds = _on_all(cluster, lambda connection: connection.send_file(Path(file.name), "run/file").result())
        found["file_mb_per_s"] = cluster.world_size * FILE_BYTES / 1e6 / seconds
        found["file_share_of_link"] = 1e6 * found["file_mb_per_s"] / cluster.devices[0].link.bytes_per_s
    with tempfile.TemporaryDirectory() as folder:
        planes: tuple[DataPlane, ...] = ("plain", "tls")
        for data in planes:
            progress(f"Running, tensors {data}")
            report, first_s = _run(replace(cluster, data=data), JOB, Path(folder) / data)
            found[f"first_step_s_{data}"] = first_s
            found[f"step_s_{data}"] = median(step.measured_s or 0.0 for step in report.steps)
        progress("Running, and killing a device")
        faulty = replace(JOB, faults=f"kill:{cluster.devices[-1].name}@step4", backup_every=2)
        report, _ = _run(cluster, faulty, Path(folder) / "faulty")
        found["fault_to_next_step_s"] = sum(recovery.seconds for recovery in report.recoveries)
    return found


def _on_all(cluster: Cluster, work: Callable[[Connection], object]) -> float:
    """Return the seconds in which all devices are reached, all at once, and something is done on each."""

    def one(device: Device) -> None:
        with ExitStack() as stack:
            connection = Connection(device.name, agent_command(device))
            stack.callback(connection.close)
            connection.open()
            work(connection)

    began_s = time.monotonic()
    with ThreadPoolExecutor(cluster.world_size) as pool:
        list(pool.map(one, cluster.devices))
    return time.monotonic() - began_s


def _set_up(connection: Connection) -> None:
    python = next(device.python for device in load_cluster(KIT).devices if device.name == connection.name)
    if not python:
        install(connection, lambda text: None)
    bring_code(connection)


def _run(cluster: Cluster, job: Job, folder: Path) -> tuple[Report, float]:
    """Return a run's report, and the seconds from its beginning to the end of the first step."""
    began_s, firsts = time.monotonic(), list[float]()

    def note(event: Event) -> None:
        if event.kind == "step" and not firsts:
            firsts.append(time.monotonic() - began_s)

    return run(job, cluster, progress=note, workdir=folder), firsts[0]
