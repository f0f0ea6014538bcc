"""`workbench bench kit`: what the cluster named kit costs: reaching it, bringing files, starting a run, a step, a lost
device.

`python tests/runtime/ssh_hosts.py 4 400` runs it on servers of this machine with links of 400 Mbit/s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median

from workbench.core.catalogue import KIT, load_cluster
from workbench.core.cluster import Cluster, DataPlane, Device
from workbench.core.job import Job
from workbench.core.profile import Profile
from workbench.core.run_folder import scratch_folder
from workbench.experiment import run
from workbench.methods import load_method
from workbench.methods.base import Event, ignore
from workbench.methods.devices import connected
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_devices import SshEngines
from workbench.runtime.ssh_login import agent_command, with_log
from workbench.runtime.ssh_setup import bring_code, install
from workbench_studies.bench.frame import Figures, Progress, ratios, require_words, turns

FILE_BYTES = 90_000_000
JOB = Job(
    method="fine_tuning",
    epochs=2,
    train_samples=320,
    validation_samples=32,
    test_samples=32,
    options={"technique": "lora"},
)
WORDS = ("reach", "files", "start", "epochs", "faults")
SLOWED = 4
"""All devices take this multiple of their measured times, so that the processors of one machine suffice for four
servers."""
PACED = "slow:{device}:1.001@step1"
"""Real devices run as fast as they can until a fault slows them; then they keep to their profile, as emulated ones
do."""
ROUNDS = 3


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS) -> Figures:
    """Return seconds, MB/s, and ratios to the same run on emulated devices with links of the same speed.

    only: some of WORDS, none is all.  Raises ConfigError if no cluster is named kit.
    """
    require_words(only, WORDS)
    cluster = load_cluster(KIT)
    figures: Figures = {"devices": cluster.world_size, "model": JOB.model}
    with scratch_folder() as folder:
        for part in only or WORDS:
            figures |= globals()[f"_{part}"](cluster, folder, rounds, progress)
    return figures


def _reach(cluster: Cluster, folder: Path, rounds: int, progress: Progress) -> dict[str, float]:
    progress(f"Reaching {cluster.in_words}")
    check_s = _on_all(cluster, lambda connection: connection.ask("facts"))
    return {"check_s": check_s, "second_setup_s": _on_all(cluster, _set_up)}


def _files(cluster: Cluster, folder: Path, rounds: int, progress: Progress) -> dict[str, float]:
    """Return the rate of a file to all devices at once, and its share of the first device's link in the kit's file;
    connecting included.

    ssh_share_of_link: the same file through `ssh DEVICE cat`, without the agent and its digests.
    """
    progress(f"Bringing {FILE_BYTES / 1e6:.0f} MB to each")
    file = folder / "file"
    file.write_bytes(os.urandom(FILE_BYTES))
    seconds = _on_all(cluster, lambda connection: connection.bring([(file, "run/file", None)]))
    began_s = time.monotonic()
    with ExitStack() as stack:
        for device in cluster.devices:  # all at once; each is waited for at the end
            command = [*with_log(agent_command(device)[:-1], os.devnull), "cat >/dev/null"]
            stack.enter_context(subprocess.Popen(command, stdin=stack.enter_context(open(file, "rb"))))
    rates = [cluster.world_size * FILE_BYTES / spent for spent in (seconds, time.monotonic() - began_s)]
    shares = [rate / cluster.devices[0].link.bytes_per_s for rate in rates]
    return {"file_mb_per_s": rates[0] / 1e6, "file_share_of_link": shares[0], "ssh_share_of_link": shares[1]}


def _start(cluster: Cluster, folder: Path, rounds: int, progress: Progress) -> dict[str, float]:
    """Return the seconds from a run's beginning to the end of its first step, and what they went into; the devices were
    measured before.
    """
    progress("Measuring the devices")
    with connected(JOB, cluster, folder / "start") as engines:
        _measured(engines)
    progress("Starting a run")
    began_s, firsts = time.monotonic(), list[float]()

    def note(event: Event) -> None:
        if event.kind == "step" and not firsts:
            firsts.append(time.monotonic() - began_s)

    report = run(replace(JOB, epochs=1), cluster, progress=note, workdir=folder / "start")
    return {"first_step_s": firsts[0]} | {f"start_{stage}_s": seconds for stage, seconds in report.spent_s.items()}


def _epochs(cluster: Cluster, folder: Path, rounds: int, progress: Progress) -> Figures:
    """Return the seconds of an epoch, and the ratio to emulated devices.  Both have the profile that the real ones
    measured.
    """
    figures, costs = Figures(), None
    job = replace(JOB, train_samples=160, faults=_paced(cluster))
    planes: tuple[DataPlane, ...] = ("plain", "tls")
    for data in planes:
        with connected(JOB, replace(cluster, data=data), folder / data) as engines:
            costs = costs or _measured(engines)
            seconds: dict[str, list[float]] = {"emulated": [], "real": []}
            for turn, side in turns(seconds, range(rounds)):
                progress(f"Tensors {data}, {side} devices, run {turn + 1} of {rounds}")
                where, on = (engines.cluster, engines) if side == "real" else (cluster.emulated(1 / SLOWED), None)
                report = run(job, where, costs=costs, engines=on, workdir=folder / data)
                shutil.rmtree(folder / data)
                seconds[side].append(report.epochs[-1].seconds)
                progress(f"  an epoch took {seconds[side][-1]:.2f} s")
            figures[f"epoch_s_{data}"] = median(seconds["real"])
            figures |= {
                f"epoch_{name}_{data}": value for name, value in ratios(seconds["real"], seconds["emulated"]).items()
            }
    return figures


def _faults(cluster: Cluster, folder: Path, rounds: int, progress: Progress) -> dict[str, float]:
    """Return the seconds from a kill to the end of the next step, of real and of emulated devices."""
    progress("Running, and killing a device")
    job = replace(
        JOB,
        epochs=1,
        train_samples=160,
        faults=f"{_paced(cluster)}; kill:{cluster.devices[-1].name}@step4",
        snapshot_every=2,
        snapshot_to="neighbour",
    )
    with connected(JOB, cluster, folder / "faults") as engines:
        costs = _measured(engines)
        real = run(job, cluster, costs=costs, engines=engines, workdir=folder / "faults")
    emulated = run(job, cluster.emulated(1 / SLOWED), costs=costs, workdir=folder / "emulated faults")
    names = {"fault_to_next_step_s": real, "fault_to_next_step_s_emulated": emulated}
    return {
        name: sum(recovery.seconds for recovery in report.recoveries if recovery.what.startswith("kill"))
        for name, report in names.items()
    }


def _measured(engines: SshEngines) -> Profile:
    """Return the real devices' own profile, slowed down."""
    method = load_method(JOB.method)
    costs = method.profile(method.prepare(JOB, ignore), engines.cluster, ignore, emulated=True, engines=engines)
    return costs.with_layers(lambda layer, *_: layer.scaled(SLOWED))


def _paced(cluster: Cluster) -> str:
    return "; ".join(PACED.format(device=device.name) for device in cluster.devices)


def _on_all(cluster: Cluster, work: Callable[[Connection], object]) -> float:
    """Return the seconds in which all devices are reached, all at once, and something is done on each."""

    def task(device: Device) -> None:
        with closing(Connection(device.name, agent_command(device))) as connection:
            connection.open()
            work(connection)

    began_s = time.monotonic()
    with ThreadPoolExecutor(cluster.world_size) as pool:
        list(pool.map(task, cluster.devices))
    return time.monotonic() - began_s


def _set_up(connection: Connection) -> None:
    python = next(device.python for device in load_cluster(KIT).devices if device.name == connection.name)
    if not python:
        install(connection, lambda text: None)
    bring_code(connection)
