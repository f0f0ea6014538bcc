"""Tables and figures of the lab 'A device is four numbers' that are more than one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import plotly.graph_objects as go
from IPython.display import Markdown

from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Link
from workbench.core.heat import Level
from workbench.core.job import Fidelity, Job
from workbench.core.report import Report, median_s
from workbench.profiler.host import HostProfile, measure_host
from workbench.runtime.engines import EngineCluster, default_pool
from workbench.widgets import ClusterForm, lines
from workbench.widgets.tables import Table
from workbench_labs import device_tables
from workbench_labs.course.verdict import Verdict, usable
from workbench_labs.exercises import devices
from workbench_labs.planning import with_bandwidth
from workbench_labs.probing import Probe, measure_messages, measure_work

SLOWER = (1, 2, 4)
"""Times slower a straggler becomes."""
PRODUCT, VECTOR = Probe("product", 1024), Probe("vector", 2048)


class Bench:
    """A described cluster, emulated on this machine and measured.  The first device is examined.

    text: a cluster's file as text, which is written into the folder.  host: this machine's rates.  Raises ConfigError.
    """

    def __init__(self, text: str, host: HostProfile, folder: Path | str, fidelity: Fidelity) -> None:
        self.host, self.fidelity = host, fidelity
        path = Path(folder) / "my_cluster.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.cluster = load_cluster(path)
        self.form = ClusterForm(path)
        self.suffers_more = ""
        self._seconds: dict[Probe, list[float]] = {}

    def engines(self) -> EngineCluster:
        """Return the devices' processes; they are started if they are not running."""
        return default_pool().acquire(self.cluster, self.fidelity)

    def work(self) -> Table:
        """Measure a product of two matrices, and one with a vector, on every device."""
        ranks = range(self.cluster.world_size)
        taken = [measure_work(self.cluster, rank, (PRODUCT, VECTOR), self.host, self.fidelity) for rank in ranks]
        self._seconds = {
            probe: [device_s[number] for device_s in taken] for number, probe in enumerate((PRODUCT, VECTOR))
        }
        rows = [
            (device.name, f"{device.host_share:g}", *(f"{1e3 * seconds:.1f}" for seconds in device_s))
            for device, device_s in zip(self.cluster.devices, taken, strict=True)
        ]
        columns = ("device", "share of a core", *(f"{probe}, ms" for probe in (PRODUCT, VECTOR)))
        return Table(columns, rows, title=f"What devices take (emulated, {self.engines().fidelity} links)")

    def slowest_over_fastest(self) -> float:
        """Return how many times as long as the fastest device the slowest takes for a product, as measured."""
        seconds = self._seconds[PRODUCT]
        return max(seconds) / min(seconds)

    def rates(self) -> dict[str, float]:
        """Return the first device's FLOP/s and bytes of memory per second, from what was measured."""
        return {
            "flops_per_s": PRODUCT.amounts["flops"] / self._seconds[PRODUCT][0],
            "memory_bytes_per_s": VECTOR.amounts["memory_bytes"] / self._seconds[VECTOR][0],
        }

    def messages(self, sizes: Sequence[int]) -> list[list[float]]:
        """Return [bytes, seconds] of messages from the first device to the second one."""
        return measure_messages(self.cluster, sizes, self.fidelity)

    def link_table(self, fit_link: Callable[..., Any], messages: Sequence[Sequence[float]]) -> Table:
        """Return what the student's fit finds in the messages, next to what the cluster's file says."""
        latency_s, bytes_per_s = usable(devices.EXERCISES, "fit_link", fit_link)(messages)
        return device_tables.links_table(
            {"first to second device": self.cluster.link(0, 1)},
            {"first to second device": Link(latency_s=max(0.0, float(latency_s)), bytes_per_s=float(bytes_per_s))},
        )

    def twelve(self, seconds_of: Callable[..., Any], device: Mapping[str, float], most_s: float) -> Verdict:
        """Predict and measure twelve new things on the first device (see devices.twelve)."""
        return devices.twelve(seconds_of, device, self.cluster, 0, self.host, fidelity=self.fidelity, most_s=most_s)

    def bandwidth_figure(self, job: Job, rates: Sequence[float]) -> go.Figure:
        """Return the time of a training step over the links' Mbit/s (simulated); each has its plan.

        Afterwards `suffers_more` names the step that becomes longer by the larger factor.
        """
        reports = {rate: experiment.run(job, with_bandwidth(self.cluster, rate), "simulate") for rate in rates}
        series = {
            name: [(rate, _typical_ms(report, cached=cached)) for rate, report in reports.items()]
            for name, cached in (("first epoch", False), ("from the cache", True))
        }
        slowest, fastest = min(rates), max(rates)
        worse = {name: dict(points)[slowest] / dict(points)[fastest] for name, points in series.items()}
        self.suffers_more = max(worse, key=worse.__getitem__)
        return lines(
            series,
            title="Step time over bandwidth",
            label="simulated",
            x_title="Mbit/s of every link",
            y_title="ms a step (median)",
            logarithmic="x",
        )

    def straggler_figure(self, job: Job) -> go.Figure:
        """Return the time of a step when the first device becomes slower, with the old plan and with new ones."""
        slowed = {factor: self.cluster.slowed(0, factor) for factor in SLOWER}
        planned = {factor: experiment.run(job, cluster, "simulate") for factor, cluster in slowed.items()}
        with_old_plan = {1: planned[1]}
        for factor in SLOWER[1:]:
            with_old_plan[factor] = experiment.run(job, slowed[factor], "simulate", chosen_plan=planned[1].plan)
        series = {
            name: [(factor, _typical_ms(report, cached=False)) for factor, report in reports.items()]
            for name, reports in (("planned again", planned), ("the old plan", with_old_plan))
        }
        return lines(
            series,
            title=f"Step time when '{self.cluster.devices[0].name}' slows down",
            label="simulated",
            x_title="times slower",
            y_title="ms a step of the first epoch",
        )

    def edge_table(self, job: Job) -> Table:
        """Return a step, the run and the plan on the cluster as described, on the shared air of Wi-Fi, and if the first
        device gets hot: when it has computed for a quarter of the run, it is half as fast (simulated).
        """
        described = experiment.run(job, self.cluster, "simulate")
        first, *others = self.cluster.devices
        curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=described.predicted_s / 4, speed=0.5))
        hot = replace(self.cluster, devices=(replace(first, sustained=curve), *others))
        reports = {
            "as described": described,
            "on Wi-Fi": experiment.run(job, replace(self.cluster, medium="wifi"), "simulate"),
            f"'{first.name}' gets hot": experiment.run(job, hot, "simulate"),
        }
        rows = [
            (
                name,
                f"{_typical_ms(report, cached=False):.1f}",
                f"{report.predicted_s:.2f}",
                f"{report.plan.partition()} on {report.plan.grouping()}",
            )
            for name, report in reports.items()
        ]
        columns = ("the devices", "a step of the first epoch, ms", "the run, s", "layers on devices")
        return Table(columns, rows, title="The same devices on Wi-Fi, and one that gets hot (simulated)")


def host_rates(seconds: float) -> HostProfile:
    """Measure this machine.  seconds: time for each rate."""
    return measure_host(seconds=seconds)


def shown(text: str) -> Markdown:
    """Return the text of a file, as it stands there."""
    return Markdown(f"```toml\n{text}```")


def message_figure(messages: Sequence[Sequence[float]]) -> go.Figure:
    """Return how long messages take, by their size."""
    sizes = sorted({size for size, _ in messages})
    typical = [(size, 1e3 * median(taken for nbytes, taken in messages if nbytes == size)) for size in sizes]
    return lines(
        {"median of each size": typical},
        title="How long a message takes",
        label="emulated",
        subtitle="flat: the latency; rising: the bandwidth",
        x_title="bytes of the message",
        y_title="milliseconds",
        logarithmic="xy",
    )


def training_job(model: str, train_samples: int) -> Job:
    """Return a job of two epochs, the second from the cache (PAC+)."""
    return Job(model=model, train_samples=train_samples, epochs=2)


def _typical_ms(report: Report, *, cached: bool) -> float:
    return 1e3 * (median_s((step for step in report.steps if step.cached == cached), "predicted_s") or 0.0)
