"""Devices and clusters by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster, Device, Link


def device(name: str = "d0", *, bytes_per_s: float = 1e9, latency_s: float = 0.0, **settings: Any) -> Device:
    """Return a device of 1 GFLOP/s and 1 GB, if the settings do not say otherwise."""
    link = Link(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Device(**{"name": name, "flops_per_s": 1e9, "memory_bytes": 10**9, "link": link} | settings)


def devices(names: int | Iterable[str], **settings: Any) -> tuple[Device, ...]:
    """Return devices.  names: or their number, for d0, d1 and so on.  settings: of `device`; a list has one value for
    each."""
    several = [f"d{rank}" for rank in range(names)] if isinstance(names, int) else names
    return tuple(
        device(name, **{key: value[rank] if isinstance(value, list) else value for key, value in settings.items()})
        for rank, name in enumerate(several)
    )


def cluster_of(names: int | Iterable[str], *, name: str = "test", **settings: Any) -> Cluster:
    """Return a cluster of such devices (see `devices`)."""
    return Cluster(name=name, devices=devices(names, **settings))


def with_devices(cluster: Cluster, **changes: Any) -> Cluster:
    """Return the cluster with each device changed.  changes: a function returns the value for a device."""
    return replace(
        cluster,
        devices=tuple(
            replace(one, **{name: value(one) if callable(value) else value for name, value in changes.items()})
            for one in cluster.devices
        ),
    )
