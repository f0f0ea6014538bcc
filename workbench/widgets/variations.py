"""Variations of a cluster, for sweeps: the same devices with other links, memory or speed."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.cluster import Cluster


def with_bandwidth(cluster: Cluster, megabit_per_s: float) -> Cluster:
    """Return the cluster with every link at megabit_per_s: the very cluster if they are."""
    if not cluster.pairs and all(one.link.bytes_per_s == megabit_per_s * 125_000 for one in cluster.devices):
        return cluster
    devices = tuple(replace(one, link=replace(one.link, bytes_per_s=megabit_per_s * 125_000)) for one in cluster.devices)
    return replace(cluster, name=f"{cluster.name}-{megabit_per_s:g}-mbit", devices=devices, pairs={})


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """Return the cluster with memory_bytes on every device."""
    devices = tuple(replace(one, memory_bytes=memory_bytes) for one in cluster.devices)
    return replace(cluster, name=f"{cluster.name}-other-memory", devices=devices)
