"""Measure the inputs of planning for display: devices, links, layers (PAC+, section V-A, 'Profiling')."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import ConfigError, check_choice
from workbench.core.job import Fidelity, Job
from workbench.core.medium import Medium
from workbench.core.serial import to_builtins
from workbench.experiment import profile
from workbench.methods import load_method
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.devices import over_ssh
from workbench.models.configuration import model_facts
from workbench.profiler.host import (
    SIZES,
    HostProfile,
    LinkSample,
    ProcessorRate,
    fit_link,
    lasting_equally,
    measure_host,
)
from workbench.runtime.engines import EngineCluster
from workbench.runtime.measuring import (
    HeatSample,
    measure_rank_at_once,
    measure_rank_host,
    measure_rank_links,
    measure_rank_sustained,
)

LONGEST_MESSAGE_S = 0.3
"""Messages that would take longer over a cluster's slowest link are not sent: a slow link can be measured without large
messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The compute and memory rates of a device.

    emulated: the rates are this machine's, at the device's share of a core; otherwise they are its own, as measured
    there, or the catalogue's, without memory_bytes_per_s.  storage_bytes_per_s, storage_write_bytes_per_s: see Device.
    memory_bytes: what a plan may use.  installed_bytes, swap_bytes: a real device's memory, and what it may swap to its
    disk.
    """

    name: str
    emulated: bool
    flops_per_s: float
    memory_bytes_per_s: float | None
    storage_bytes_per_s: float
    storage_write_bytes_per_s: float | None
    memory_bytes: int
    processors: tuple[ProcessorRate, ...] = ()
    installed_bytes: int | None = None
    swap_bytes: int = 0

    @property
    def swaps(self) -> str:
        """Return a warning if a plan may use more memory than the device has; '' if not."""
        if self.installed_bytes is None or self.memory_bytes <= self.installed_bytes:
            return ""
        return (
            f"{self.name} has {self.installed_bytes / 1e6:,.0f} MB of memory, and a plan may use "
            f"{self.memory_bytes / 1e6:,.0f}: it would swap to a disk of {self.storage_bytes_per_s / 1e6:.0f} MB/s "
            f"({self.swap_bytes / 1e6:,.0f} MB of swap), or be killed. Lower memory_mb in its cluster's file."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """A path between two devices: its rate and latency in the cluster description, and as measured."""

    source: str
    destination: str
    described: Link
    measured: Link
    samples: tuple[LinkSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSurvey:
    """Every path of a cluster as measured.  fidelity: how links are emulated, or 'real'.

    at_once: seconds of messages while each device sends to the next one, over the seconds that each takes alone.  It is
    1 over private wires, and the number of devices on a shared medium.
    """

    fidelity: str
    rows: tuple[LinkRow, ...]
    at_once: float

    @property
    def medium(self) -> Medium:
        """Return the medium that the ratio speaks for."""
        num_devices = len({row.source for row in self.rows})
        return "wifi" if self.at_once > (1 + num_devices) / 2 else "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer for one batch.  measured: the costs that planners use.  analytic: the same costs, computed from the
    model's sizes.

    Both have the seconds (measured) or FLOPs (analytic) of the forward and backward pass, side network included.  Both
    have the bytes of the frozen and the trained parameters, of the activations sent to the next layer, of the cached
    taps, and of the context that the backward pass needs.
    """

    layer: int
    batch: int
    measured: dict[str, float]
    analytic: dict[str, float]

    @property
    def flops_per_s(self) -> float:
        """Return the analytic FLOPs of both passes over the measured seconds."""
        seconds = self.measured["forward_s"] + self.measured["backward_s"]
        return (self.analytic["forward_flops"] + self.analytic["backward_flops"]) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSurvey:
    """Every layer of a job's model on one device.  source: 'measured', 'scaled' or 'analytic'.  notes: when it was
    measured.
    """

    model: str
    method: str
    device: str
    source: str
    sequence_length: int
    rows: tuple[LayerRow, ...]
    notes: tuple[str, ...] = ()


SURVEY_S = 1.0
"""Seconds of arithmetic, and of copying, by which a device is measured."""


def survey_devices(cluster: Cluster) -> tuple[HostProfile | None, tuple[DeviceRates, ...]]:
    """Measure this machine and derive each device's rates.  All work on an emulated device is paced to its share of a
    core.

    Real devices measure themselves, all at once; the first value is then None.
    """
    if cluster.is_real:
        with over_ssh(cluster) as engines:
            measured = engines.run(measure_rank_host, [SURVEY_S] * cluster.world_size)
        return None, tuple(
            replace(
                _rates(device, rates, 1.0, rates.processors),
                installed_bytes=rates.memory_bytes,
                swap_bytes=rates.swap_bytes,
            )
            for device, rates in zip(cluster.devices, measured, strict=True)
        )
    host = measure_host(seconds=SURVEY_S)
    return host, tuple(_rates(device, host, device.host_share) for device in cluster.devices)


def survey_sustained(cluster: Cluster, seconds: float) -> dict[str, tuple[HeatSample, ...]]:
    """Return samples of each real device while all compute for so many seconds, by its name."""
    with over_ssh(cluster) as engines:
        samples_by_device = engines.run(measure_rank_sustained, [seconds] * cluster.world_size)
    return {device.name: samples for device, samples in zip(cluster.devices, samples_by_device, strict=True)}


def _rates(
    device: Device, measured: HostProfile, share: float | None, processors: tuple[ProcessorRate, ...] = ()
) -> DeviceRates:
    """Return a device's rates: its share of a measured machine's, or the catalogue's (share None)."""
    return DeviceRates(
        name=device.name,
        emulated=device.host_share is not None and not device.address,
        flops_per_s=device.flops_per_s if share is None else share * measured.gemm_flops_per_s,
        memory_bytes_per_s=None if share is None else share * measured.memory_bytes_per_s,
        storage_bytes_per_s=device.storage_bytes_per_s if share is None else share * measured.storage_bytes_per_s,
        storage_write_bytes_per_s=device.storage_write_bytes_per_s
        if share is None
        else share * measured.storage_write_bytes_per_s,
        memory_bytes=device.memory_bytes,
        processors=processors,
    )


def survey_links(cluster: Cluster, *, fidelity: Fidelity = "auto", repeats: int = 5) -> LinkSurvey:
    """Emulate the cluster, or reach its real devices, and send messages over each link in turn, then over several at
    once.

    Raises ConfigError for a cluster of one device, RuntimeSetupError if it cannot be emulated or reached.
    """
    if cluster.world_size < 2:
        raise ConfigError(
            f"The links of cluster '{cluster.name}' were asked for.", "It has one device.", "Describe two or more."
        )
    ranks = range(cluster.world_size)
    slowest = min((cluster.link(a, b) for a in ranks for b in ranks if a != b), key=lambda link: link.bytes_per_s)
    sizes = tuple(size for size in SIZES if size <= max(1 << 14, slowest.bytes_per_s * LONGEST_MESSAGE_S))
    names = cluster.names
    with over_ssh(cluster) if cluster.is_real else EngineCluster.start(cluster, fidelity=fidelity) as engines:
        rows_by_device = engines.run(measure_rank_links, [(sizes, repeats)] * cluster.world_size)
        rows = []
        for samples in (row for of_rank in rows_by_device for row in of_rank):
            a, b = samples[0].source, samples[0].destination
            ends = {"source": names[a], "destination": names[b]}
            rows.append(LinkRow(**ends, described=cluster.link(a, b), measured=fit_link(samples), samples=samples))
        measured = {(row.source, row.destination): row.measured for row in rows}
        ring = [measured[names[rank], names[(rank + 1) % len(names)]] for rank in ranks]
        together_sizes = lasting_equally(ring, sizes[-1])
        together = engines.run(measure_rank_at_once, [(together_sizes, repeats)] * cluster.world_size)
        fidelity_used = engines.fidelity
    alone_s = [link.transfer_s(nbytes) for link, nbytes in zip(ring, together_sizes, strict=True)]
    ratio = sum(sample.seconds for sample in together) / sum(alone_s)
    return LinkSurvey(fidelity=fidelity_used, rows=tuple(rows), at_once=ratio)


def survey_layers(
    job: Job,
    cluster: Cluster,
    *,
    device: str | None = None,
    batch_sizes: Sequence[int] = (1, 4, 16),
    sequence_length: int = 32,
    refresh: bool = False,
    progress: Notify = ignore,
) -> LayerSurvey:
    """Return the profiled cost of every layer on one device (default: the first), together with the analytic figures.

    Sizes between measured ones are interpolated.  Raises ConfigError for an unknown device.
    """
    names = cluster.names
    if device is not None:
        check_choice(f"device of cluster '{cluster.name}'", device, names)
    if not batch_sizes or min(batch_sizes) < 1 or sequence_length < 1:
        raise ConfigError(
            f"Layers for batches of {list(batch_sizes)} and {sequence_length} tokens were asked for.",
            "All must be at least 1.",
            "Raise them.",
        )
    longest = model_facts(job.model).max_length
    if sequence_length > longest:
        raise ConfigError(
            f"Layers for {sequence_length} tokens were asked for.",
            f"'{job.model}' knows {longest} positions.",
            "Ask for fewer.",
        )
    notes: list[str] = []

    def note(event: Event) -> None:
        if event.kind == "note":
            notes.append(event.message)
        progress(event)

    profiled = profile(job, cluster, "execute", progress=note, refresh=refresh)
    rank = 0 if device is None else names.index(device)
    method = load_method(job.method)
    prepared = method.prepare(job, ignore)
    rows = []
    for batch in batch_sizes:
        costs = method.layer_costs(prepared, batch=batch, sequence_length=sequence_length)
        for index, (layer, cost) in enumerate(zip(profiled.layers[rank], costs, strict=True)):
            tokens = batch * sequence_length
            measured = {
                "forward_s": layer.forward_s(batch, sequence_length),
                "backward_s": layer.backward_s(batch, sequence_length),
            }
            analytic = {
                "forward_flops": cost.forward_flops + cost.side_forward_flops,
                "backward_flops": cost.backward_flops + cost.side_backward_flops,
            }
            both: Any = ((measured, layer), (analytic, cost))
            for sizes, described in both:
                sizes |= {
                    "frozen_bytes": described.frozen_bytes,
                    "trainable_bytes": described.trainable_bytes,
                    "activation_bytes": tokens * described.output_bytes.per_token,
                    "tap_bytes": tokens * described.tap_bytes.per_token,
                    "context_bytes": tokens * described.context_bytes.per_token,
                }
            rows.append(LayerRow(layer=index, batch=batch, measured=measured, analytic=analytic))
    return LayerSurvey(
        model=job.model,
        method=job.method,
        device=names[rank],
        source=profiled.source,
        sequence_length=sequence_length,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def alike(survey: LayerSurvey) -> list[tuple[int, int, list[LayerRow]]]:
    """Merge consecutive layers with equal figures, for a short table: return (first layer, last layer, rows by batch
    size) of each run.
    """
    layers: dict[int, list[LayerRow]] = {}
    for row in survey.rows:
        layers.setdefault(row.layer, []).append(row)
    runs: list[tuple[int, int, list[LayerRow]]] = []
    for index, rows in layers.items():
        if runs and [replace(row, layer=0) for row in rows] == [replace(row, layer=0) for row in runs[-1][2]]:
            runs[-1] = (runs[-1][0], index, runs[-1][2])
        else:
            runs.append((index, index, rows))
    return runs


def as_builtins(rows: Sequence[LinkRow]) -> list[dict[str, Any]]:
    """Return the links as JSON-ready dictionaries, with flat rates and latencies."""
    return [
        to_builtins(row)
        | {"samples": [to_builtins(sample) | {"bytes_per_s": sample.bytes_per_s} for sample in row.samples]}
        for row in rows
    ]
