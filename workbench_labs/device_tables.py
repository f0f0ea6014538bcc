"""Tables of a machine, devices and links: described, requested and measured."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.core.catalogue import device_models, load_device
from workbench.core.cluster import Link
from workbench.core.units import size_words
from workbench.profiler.host import HostProfile
from workbench.runtime.engines import EngineCluster
from workbench.widgets.tables import Table


def host_table(host: HostProfile) -> Table:
    """Return this machine's rates."""
    cold = "" if host.storage_is_cold else " (from memory: the cache was warm)"
    return Table(
        ("what", "measured"),
        [
            ("matrix product, one core", f"{host.gemm_flops_per_s / 1e9:.1f} GFLOP/s"),
            ("memory, large copy", f"{host.memory_bytes_per_s / 1e9:.1f} GB/s"),
            ("disk, sequential read", f"{host.storage_bytes_per_s / 1e6:.0f} MB/s{cold}"),
            ("disk, sequential write", f"{host.storage_write_bytes_per_s / 1e6:.0f} MB/s"),
            ("cores", f"{host.cores}"),
        ],
        title="This machine (measured)",
    )


def catalogue_table() -> Table:
    """Return the devices of the catalogue."""
    rows = [
        (
            device.model,
            f"{device.flops_per_s / 1e9:.1f}",
            f"{device.memory_bytes / 1e6:.0f}",
            f"{device.link.mbit_per_s:g}",
            f"{device.watts_idle:g} - {device.watts_busy:g}",
        )
        for device in map(load_device, device_models())
    ]
    columns = ("model", "GFLOP/s", "memory, MB", "link, Mbit/s", "watts idle - busy")
    return Table(columns, rows, title="Device catalogue (described, not measured)")


def engines_table(engines: EngineCluster) -> Table:
    """Return the processes of emulated devices."""
    running = zip(engines.cluster.names, engines.engine_pids, engines.memory(), strict=True)
    return Table(
        ("rank", "device", "process", "resident memory"),
        [(rank, name, pid, size_words(now.rss_bytes)) for rank, (name, pid, now) in enumerate(running)],
    )


def four_numbers(numbers: Mapping[str, float]) -> Table:
    """Return a device's four numbers; numbers: flops_per_s, memory_bytes_per_s, latency_s, bytes_per_s."""
    rows = [
        ("flops_per_s", f"{numbers['flops_per_s'] / 1e9:.1f} GFLOP/s"),
        ("memory_bytes_per_s", f"{numbers['memory_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("latency_s", f"{numbers['latency_s'] * 1e3:.2f} ms"),
        ("bytes_per_s", f"{numbers['bytes_per_s'] / 1e6:.1f} MB/s"),
    ]
    return Table(("name", "measured"), rows, title="The first device, as measured (emulated)")


def links_table(described: Mapping[str, Link], measured: Mapping[str, Link]) -> Table:
    """Return the requested and the measured values of links, by the link's name."""
    rows = [
        (
            name,
            f"{described[name].mbit_per_s:.0f}",
            f"{link.mbit_per_s:.0f}",
            f"{described[name].latency_s * 1e3:.2f}",
            f"{link.latency_s * 1e3:.2f}",
        )
        for name, link in measured.items()
    ]
    columns = ("link", "Mbit/s asked for", "Mbit/s measured", "latency asked for, ms", "latency measured, ms")
    return Table(columns, rows, note="The path's latency is that of both devices' links.")
