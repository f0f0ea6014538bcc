"""Tables of a machine, devices and links: described, asked for and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.core.catalogue import cluster_names, device_models, load_cluster, load_device
from workbench.core.cluster import Cluster, Link
from workbench.profiler.host import HostProfile
from workbench.runs.survey import DeviceRates
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
            ("cores", f"{host.cores}"),
        ],
        title="This machine (measured)",
    )


def catalogue_table() -> Table:
    """Return the devices of the catalogue."""
    rows = [
        (
            one.model,
            f"{one.flops_per_s / 1e9:.1f}",
            f"{one.memory_bytes / 1e6:.0f}",
            f"{one.link.bytes_per_s * 8e-6:g}",
            f"{one.watts_idle:g} - {one.watts_busy:g}",
        )
        for one in map(load_device, device_models())
    ]
    columns = ("model", "GFLOP/s", "memory, MB", "link, Mbit/s", "watts idle - busy")
    return Table(columns, rows, title="Device catalogue (described, not measured)")


def clusters_table() -> Table:
    """Return the clusters of the catalogue."""
    clusters = [load_cluster(name) for name in cluster_names()]
    return Table(("cluster", "devices", "description"), [(c.name, c.world_size, c.description) for c in clusters])


def engines_table(engines: EngineCluster) -> Table:
    """Return the processes of emulated devices."""
    running = zip(engines.device_names, engines.engine_pids, engines.memory(), strict=True)
    return Table(
        ("rank", "device", "process", "resident memory"),
        [(rank, name, pid, f"{now.rss_bytes / 1e6:.0f} MB") for rank, (name, pid, now) in enumerate(running)],
    )


def shares_table(cluster: Cluster, full_speed_s: float, taken: Sequence[tuple[float, float]]) -> Table:
    """Return what devices made of their share of a core.

    full_speed_s: a product's seconds on a whole core.  taken: its seconds on each device, and how late it was.
    """
    rows = [
        (
            device.name,
            f"{device.host_share:g}",
            f"{1e3 * seconds:.1f}",
            f"{full_speed_s / seconds:.3f}",
            f"{1e3 * late:.1f}",
        )
        for device, (seconds, late) in zip(cluster.devices, taken, strict=True)
    ]
    return Table(
        ("device", "share asked for", "product takes, ms", "share reached", "late, ms"),
        rows,
        title=f"A product of 512 x 512 matrices; {1e3 * full_speed_s:.1f} ms on a whole core (emulated)",
        note="Late: the host was too busy to be as fast as even the slow device should be. Close other programs.",
    )


def rates_table(rates: Sequence[DeviceRates]) -> Table:
    """Return the measured rates of real devices."""
    rows = [
        (
            one.name,
            f"{one.flops_per_s / 1e9:.1f}",
            "" if one.memory_bytes_per_s is None else f"{one.memory_bytes_per_s / 1e9:.1f}",
            f"{one.storage_bytes_per_s / 1e6:.0f}",
        )
        for one in rates
    ]
    columns = ("device", "GFLOP/s", "memory, GB/s", "disk, MB/s")
    return Table(columns, rows, title="Your devices, all at once (real)")


def links_table(asked: Mapping[str, Link], measured: Mapping[str, Link]) -> Table:
    """Return what was asked of links and what was measured, by the link's name."""
    rows = [
        (
            name,
            f"{asked[name].bytes_per_s * 8e-6:.0f}",
            f"{link.bytes_per_s * 8e-6:.0f}",
            f"{asked[name].latency_s * 1e3:.2f}",
            f"{link.latency_s * 1e3:.2f}",
        )
        for name, link in measured.items()
    ]
    columns = ("link", "Mbit/s asked for", "Mbit/s measured", "latency asked for, ms", "latency measured, ms")
    return Table(columns, rows, note="The path's latency is that of both devices' links.")
